// A Mixture-of-Experts layer with its experts spread over ranks, compared bit for bit with the same layer on one rank.
//
//   02_moe_layer                              four ranks, as threads
//   turnout launch -n 3 -- 02_moe_layer       three processes; so with torchrun, mpirun and srun
// The page that goes with it: docs/examples.md.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <turnout/turnout.hpp>
#include <vector>

using namespace turnout;

namespace {

constexpr int kExperts = 16, kTopk = 4, kHidden = 128, kInner = 64, kTokens = 50;

/// A number in [-1, 1) that depends on nothing but its arguments: every rank makes the same weights without sending any.
float noise(uint64_t seed, uint64_t index) {
  uint64_t z = seed * 0x9e3779b97f4a7c15ull + index * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<float>(static_cast<int64_t>(z ^ (z >> 31)) * 0x1p-63);
}

std::vector<float> matrix(uint64_t seed, int rows, int cols) {
  std::vector<float> m(static_cast<size_t>(rows) * static_cast<size_t>(cols));
  for (size_t i = 0; i < m.size(); ++i) m[i] = noise(seed, i) / std::sqrt(static_cast<float>(cols));
  return m;
}

/// out = m * in. One row at a time, in one order: the same bits wherever it runs.
void multiply(const std::vector<float>& m, const float* in, int cols, float* out) {
  for (size_t r = 0; r * static_cast<size_t>(cols) < m.size(); ++r) {
    out[r] = 0;
    for (int c = 0; c < cols; ++c) out[r] += m[r * static_cast<size_t>(cols) + static_cast<size_t>(c)] * in[c];
  }
}

/// One expert: two matrices with a SiLU between.
struct Expert {
  std::vector<float> up, down;
  explicit Expert(int id)
      : up(matrix(100 + static_cast<uint64_t>(id), kInner, kHidden)), down(matrix(200 + static_cast<uint64_t>(id), kHidden, kInner)) {}
  void run(const float* in, float* out) const {
    float inner[kInner];
    multiply(up, in, kHidden, inner);
    for (float& v : inner) v = v / (1.0f + std::exp(-v));
    multiply(down, inner, kInner, out);
  }
};

/// The top-k experts of each token, and the softmax of their scores.
struct Routing {
  std::vector<int> experts;
  std::vector<float> weights;
};
Routing route(const std::vector<float>& x) {
  static const std::vector<float> router = matrix(1, kExperts, kHidden);
  Routing r;
  for (size_t t = 0; t < x.size() / kHidden; ++t) {
    float scores[kExperts];
    multiply(router, x.data() + t * kHidden, kHidden, scores);
    std::vector<int> order(kExperts);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + kTopk, order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
    float sum = 0;
    for (int k = 0; k < kTopk; ++k) sum += std::exp(scores[order[static_cast<size_t>(k)]] - scores[order[0]]);
    for (int k = 0; k < kTopk; ++k) {
      r.experts.push_back(order[static_cast<size_t>(k)]);
      r.weights.push_back(std::exp(scores[order[static_cast<size_t>(k)]] - scores[order[0]]) / sum);
    }
  }
  return r;
}

/// The layer, on whatever ranks there are. `first` is the first expert of this rank.
std::vector<float> moe_layer(Buffer& buffer, int first, const std::vector<float>& x) {
  const auto tokens = static_cast<int64_t>(x.size() / kHidden);
  const Routing routing = route(x);
  DispatchResult got = buffer.dispatch({.x = TensorView::dense(x.data(), DType::fp32, {tokens, kHidden}),
                                        .topk_idx = TensorView::dense(routing.experts.data(), DType::i32, {tokens, kTopk}),
                                        .topk_weights = TensorView::dense(routing.weights.data(), DType::fp32, {tokens, kTopk}),
                                        .layout = Layout::expert_major});
  const int64_t rows = got.num_rows.as<int64_t>()[0];
  std::vector<float> y(static_cast<size_t>(rows) * kHidden);
  const int64_t* offsets = got.expert_offsets.as<int64_t>();
  for (int e = 0; e < buffer.num_local_experts(); ++e) {
    const Expert expert(first + e);
    for (int64_t i = offsets[e]; i < offsets[e + 1]; ++i) expert.run(reinterpret_cast<const float*>(got.x.row(i)), y.data() + i * kHidden);
  }
  got.release();  // the rows are used: others may have their place
  // Wire::rows: the sum is made at the source in top-k order, so any number of ranks gives the bits of one rank.
  const CombineResult back = buffer.combine(
      {.y = TensorView::dense(y.data(), DType::fp32, {rows, kHidden}), .handle = &got.handle, .apply = CombineWeights::source, .wire = Wire::rows});
  std::vector<float> out(x.size());
  for (int64_t t = 0; t < tokens; ++t) std::memcpy(out.data() + t * kHidden, back.x.row(t), kHidden * sizeof(float));
  return out;
}

/// First expert of `rank` if experts are dealt out in order, as Buffer does unless told otherwise.
int first_expert(int rank, int ranks) { return rank * (kExperts / ranks) + std::min(rank, kExperts % ranks); }

void run_rank(Communicator& ranks) {
  const BufferConfig config = {.num_experts = kExperts, .hidden = kHidden, .dtype = DType::fp32, .max_tokens_per_rank = kTokens, .max_topk = kTopk};
  std::vector<float> x(static_cast<size_t>(kTokens) * kHidden);
  for (size_t i = 0; i < x.size(); ++i) x[i] = noise(1000 + static_cast<uint64_t>(ranks.rank()), i);

  Buffer buffer(ranks, config);
  const std::vector<float> many = moe_layer(buffer, first_expert(ranks.rank(), ranks.num_ranks()), x);

  // The same tokens through a group of this rank alone, which has all experts.
  Communicator alone = Communicator::from_store(thread_store(), 0, 1);
  Buffer own(alone, config);
  const std::vector<float> one = moe_layer(own, 0, x);
  if (std::memcmp(many.data(), one.data(), many.size() * sizeof(float)) != 0)
    throw Error("rank " + std::to_string(ranks.rank()) + ": the two layers differ");
  ranks.barrier();
  if (ranks.rank() == 0) {
    std::printf("%d ranks over %s: %d tokens each, bit for bit as on one rank\n", ranks.num_ranks(), std::string(ranks.transport()).c_str(), kTokens);
  }
}

}  // namespace

int main() {
  try {
    if (launch_info_from_env().num_ranks > 1) {
      Communicator ranks = Communicator::from_env();
      run_rank(ranks);
    } else {
      run_virtual_ranks(4, run_rank);
    }
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
