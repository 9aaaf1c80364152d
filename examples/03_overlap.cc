// Computing while rows travel: a micro-batch is sent while the one before it is in the experts, and a second lane carries a
// call that must not queue behind them. The page that goes with it: docs/examples.md.
#include <cstdio>
#include <optional>
#include <string>
#include <turnout/turnout.hpp>
#include <utility>
#include <vector>

using namespace turnout;

namespace {

constexpr int kRanks = 3, kExperts = 8, kTopk = 2, kHidden = 256, kTokens = 64, kBatches = 6;
constexpr int kLayer = 0, kUrgent = 1;  // lanes

/// Inputs of one micro-batch. They stay as they are until its dispatch was waited for.
struct Batch {
  std::vector<float> x;
  std::vector<int> experts;

  Batch(int rank, int number) {
    for (int t = 0; t < kTokens; ++t) {
      x.insert(x.end(), kHidden, static_cast<float>(100 * number + 10 * rank + t % 10));
      for (int k = 0; k < kTopk; ++k) experts.push_back((t + number + 3 * k + rank) % kExperts);
    }
  }
  DispatchArgs args(int lane) const {
    return {.x = TensorView::dense(x.data(), DType::fp32, {kTokens, kHidden}),
            .topk_idx = TensorView::dense(experts.data(), DType::i32, {kTokens, kTopk}),
            .layout = Layout::expert_major,
            .receive = Receive::resident,  // a thread of the library receives while this one computes
            .lane = lane};
  }
};

/// The experts: each adds one. In place, so what the combine reads is the lease itself.
void run_experts(const DispatchResult& got) {
  for (int64_t i = 0; i < got.num_rows.as<int64_t>()[0]; ++i) {
    float* row = reinterpret_cast<float*>(got.x.row(i));
    for (int h = 0; h < kHidden; ++h) row[h] += 1.0f;
  }
}

/// Each token went to kTopk experts, each of which added one.
void check(const Batch& batch, const CombineResult& back, const std::string& what) {
  for (int t = 0; t < kTokens; ++t) {
    const float wanted = kTopk * (batch.x[static_cast<size_t>(t) * kHidden] + 1.0f);
    const float* row = reinterpret_cast<const float*>(back.x.row(t));
    for (int h = 0; h < kHidden; ++h) {
      if (row[h] != wanted) throw Error(what + ", token " + std::to_string(t) + ": " + std::to_string(row[h]) + ", not " + std::to_string(wanted));
    }
  }
}

void run_rank(Communicator& ranks) {
  // Three calls of a lane may be in flight: two dispatches and a combine.
  Buffer buffer(ranks, {.num_experts = kExperts,
                        .hidden = kHidden,
                        .dtype = DType::fp32,
                        .max_tokens_per_rank = kTokens,
                        .max_topk = kTopk,
                        .num_lanes = 2,
                        .max_outstanding = 3});
  std::vector<Batch> batches;
  for (int b = 0; b < kBatches; ++b) batches.emplace_back(ranks.rank(), b);

  std::optional<PendingDispatch> next = buffer.dispatch_async(batches[0].args(kLayer));
  std::optional<PendingCombine> last;       // of the batch before, on its way back
  std::optional<DispatchResult> last_rows;  // whose rows must stay until then
  for (int b = 0; b < kBatches; ++b) {
    DispatchResult got = next->wait();
    next.reset();
    if (b + 1 < kBatches) next = buffer.dispatch_async(batches[static_cast<size_t>(b + 1)].args(kLayer));
    run_experts(got);  // meanwhile batch b + 1 arrives, and batch b - 1 goes home

    if (b == kBatches / 2) {  // something else in between: lanes do not wait for each other
      const Batch urgent(ranks.rank(), 1000);
      DispatchResult rows = buffer.dispatch(urgent.args(kUrgent));
      run_experts(rows);
      check(urgent, buffer.combine({.y = rows.x, .handle = &rows.handle, .lane = kUrgent}), "urgent call");
    }

    if (last) check(batches[static_cast<size_t>(b - 1)], last->wait(), "batch " + std::to_string(b - 1));
    last.reset();
    last_rows = std::move(got);
    last = buffer.combine_async({.y = last_rows->x, .handle = &last_rows->handle, .lane = kLayer});
  }
  check(batches[kBatches - 1], last->wait(), "last batch");
  buffer.synchronize();
}

}  // namespace

int main() {
  try {
    run_virtual_ranks(kRanks, run_rank);
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  std::printf("%d micro-batches on %d ranks, each sent while another was computed: all sums right\n", kBatches, kRanks);
}
