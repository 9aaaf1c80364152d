// Four ranks in one process, three tokens each, six experts: see which rows go where, and what comes back.
// The page that goes with it: docs/examples.md.
#include <cstdio>
#include <sstream>
#include <string>
#include <turnout/turnout.hpp>
#include <vector>

using namespace turnout;

namespace {

constexpr int kRanks = 4, kExperts = 6, kTokens = 3, kTopk = 2, kHidden = 4;

/// Expert e multiplies by e + 1, so that what comes back can be worked out in the head.
float expert(int e, float value) { return value * static_cast<float>(e + 1); }

/// Prints as one piece: ranks are threads and would otherwise print into each other's lines.
void print(const std::string& text) { std::fputs(text.c_str(), stdout); }

void run_rank(Communicator& ranks) {
  const int rank = ranks.rank();
  // Memory for calls of at most kTokens rows. All ranks give the same facts.
  Buffer buffer(ranks, {.num_experts = kExperts, .hidden = kHidden, .dtype = DType::fp32, .max_tokens_per_rank = kTokens, .max_topk = kTopk});

  // Token t of rank r is the row {10 r + t, ...}. Each goes to two experts; token 2 to one only, -1 is none.
  std::vector<float> x;
  for (int t = 0; t < kTokens; ++t) x.insert(x.end(), kHidden, static_cast<float>(10 * rank + t));
  const std::vector<int> experts = {rank, 5, (rank + 1) % kExperts, (rank + 3) % kExperts, 2, -1};

  DispatchResult got = buffer.dispatch({.x = TensorView::dense(x.data(), DType::fp32, {kTokens, kHidden}),
                                        .topk_idx = TensorView::dense(experts.data(), DType::i32, {kTokens, kTopk}),
                                        .layout = Layout::expert_major});

  // Rows are grouped by expert: those of local expert e are offsets[e] to offsets[e + 1].
  std::ostringstream text;
  text << "rank " << rank << " received " << got.num_rows.as<int64_t>()[0] << " rows\n";
  const int64_t* offsets = got.expert_offsets.as<int64_t>();
  // In order, the first 6 % 4 ranks hold one expert more: ranks 0 and 1 have two, ranks 2 and 3 one.
  const int first = rank < 2 ? 2 * rank : rank + 2;
  for (int e = 0; e < buffer.num_local_experts(); ++e) {
    text << "  expert " << first + e << ":";
    for (int64_t i = offsets[e]; i < offsets[e + 1]; ++i) {
      float* row = reinterpret_cast<float*>(got.x.row(i));  // rows may be further apart than they are long: ask row()
      text << ' ' << row[0];
      for (int h = 0; h < kHidden; ++h) row[h] = expert(first + e, row[h]);
    }
    text << '\n';
  }
  print(text.str());

  // Back to their tokens, added up.
  CombineResult back = buffer.combine({.y = got.x, .handle = &got.handle});
  for (int t = 0; t < kTokens; ++t) {
    float wanted = 0;
    for (int k = 0; k < kTopk; ++k) {
      const int e = experts[static_cast<size_t>(t * kTopk + k)];
      if (e >= 0) wanted += expert(e, static_cast<float>(10 * rank + t));
    }
    const float came = reinterpret_cast<const float*>(back.x.row(t))[0];
    if (came != wanted)
      throw Error("rank " + std::to_string(rank) + ", token " + std::to_string(t) + ": " + std::to_string(came) + ", not " + std::to_string(wanted));
  }
}

}  // namespace

int main() {
  try {
    run_virtual_ranks(kRanks, run_rank);
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  std::puts("every token came back as the sum over its experts");
}
