// Calls of every kind that are small enough for tools that slow a kernel down a hundred times (compute-sanitizer): 64 tokens, hidden 512.
#pragma once
#include "cuda/gpu_test.h"
#include "engine/contract.h"

namespace turnout::testing {

namespace small_calls {

inline constexpr int64_t kTokens = 64, kHidden = 512;
inline constexpr int kExperts = 16, kTopk = 4;

struct Kind {
  Layout layout;
  Quantize quantize;
  Wire wire;
  CombineWeights apply;
  bool exact, side;
};
/// Each kernel and each branch of its format once.
inline constexpr Kind kKinds[] = {
    {Layout::rank_major, Quantize::none, Wire::payload, CombineWeights::none, true, true},
    {Layout::rank_major, Quantize::fp8_e4m3, Wire::fp32, CombineWeights::rows, false, false},
    {Layout::expert_major, Quantize::fp8_e4m3_ue8m0, Wire::fp8, CombineWeights::source, true, true},
    {Layout::expert_major, Quantize::none, Wire::rows, CombineWeights::source, false, true},
    {Layout::expert_slab, Quantize::fp8_e4m3, Wire::payload, CombineWeights::source, false, false},
};

inline RandomProblem problem_of(const Kind& kind, int num_ranks, uint64_t seed) {
  Random random(seed);
  RandomProblem p;
  core::DispatchProblem& d = p.dispatch;
  d.experts = core::ExpertMap::split(kExperts, num_ranks);
  for (int e = 0; e < kExperts; ++e) p.expert_to_rank.push_back(d.experts.rank_of(e));
  p.node_of_rank.assign(static_cast<size_t>(num_ranks), 0);
  d.num_topk = kTopk;
  d.hidden = kHidden;
  d.dtype = DType::bf16;
  d.has_weights = true;
  d.layout = kind.layout;
  d.alignment = kind.layout == Layout::expert_major ? 8 : 1;
  d.quantize = kind.quantize;
  if (kind.side) {
    p.side_dtypes = {DType::fp32};
    d.side_bytes = {16};
  }
  for (int r = 0; r < num_ranks; ++r) {
    core::DispatchInput& in = d.ranks.emplace_back();
    in.num_tokens = kTokens - r;
    in.x = random_rows(random, d.dtype, in.num_tokens * kHidden);
    in.topk_idx = random_topk(random, RoutingKind::uniform, in.num_tokens, kTopk, kExperts);
    in.topk_weights = random_floats(random, in.num_tokens * kTopk);
    for (size_t width : d.side_bytes) in.side.push_back(random_rows(random, DType::u8, in.num_tokens * static_cast<int64_t>(width)));
  }
  if (!kind.exact) d.capacity = kind.layout == Layout::expert_slab ? kTokens * num_ranks / 3 : kTokens * num_ranks;
  p.dtype = DType::bf16;
  p.hidden = kHidden;
  p.apply = kind.apply;
  p.wire = kind.wire;
  p.with_side = kind.side;
  return p;
}

}  // namespace small_calls

/// Number `index` of them, all kinds in both modes.
struct SmallCall {
  static constexpr size_t kNum = 2 * std::size(small_calls::kKinds);
  SmallCall(size_t index, int num_ranks)
      : e(index + 101, small_calls::problem_of(small_calls::kKinds[index / 2], num_ranks, index + 1)), kind(index / 2) {
    run.mode = index % 2 ? Mode::low_latency : Mode::throughput;
    run.receive_bytes = size_t{16} << 20;
    run.timeout = std::chrono::seconds(60);
    run.async = index % 2 == 1;
    run.repeats = 2;  // the second with the handle of the first
  }
  std::string what() const { return std::string(name(run.mode)) + " kind " + std::to_string(kind); }
  const Expected e;
  const size_t kind;
  RunChoices run;
};

}  // namespace turnout::testing
