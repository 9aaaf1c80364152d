// Jobs for the tests of this folder: one problem, its oracle, a Buffer that fits it.
#pragma once
#include <functional>

#include "api/small_job.h"
#include "engine/contract.h"

namespace turnout::testing {

/// A problem with its answers, which all ranks share.
struct Problem {
  explicit Problem(const RandomProblem& problem, uint64_t seed = 1)
      : p(problem),
        received(core::reference_dispatch(p.dispatch)),
        sums(random_combine(p, received, seed)),
        combined(core::reference_combine(sums)) {}
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  void expect_rows(const DispatchResult& got, int rank) const { expect_dispatch(got, received[static_cast<size_t>(rank)], p.dispatch); }
  void expect_sums(const CombineResult& got, int rank) const {
    expect_combine(got, combined[static_cast<size_t>(rank)], p.dtype, p.hidden, p.with_side);
  }
  CombineArgs back(int rank, const Handle& handle) const { return combine_args(p, sums, received, rank, handle); }

  const RandomProblem p;
  const std::vector<core::DispatchOutput> received;
  const core::CombineProblem sums;
  const std::vector<core::CombineOutput> combined;
};

/// A problem by hand: `ids(rank)` are the choices of its tokens, [T, K]; bf16 rows, no weights.
inline RandomProblem problem_of(int num_ranks, int num_experts, int num_topk, int64_t hidden, Layout layout,
                                const std::function<std::vector<int64_t>(int)>& ids, uint64_t seed = 1) {
  Random random(seed);
  RandomProblem p;
  const core::ExpertMap split = core::ExpertMap::split(num_experts, num_ranks);
  for (int e = 0; e < num_experts; ++e) p.expert_to_rank.push_back(split.rank_of(e));
  p.node_of_rank.assign(static_cast<size_t>(num_ranks), 0);
  core::DispatchProblem& d = p.dispatch;
  d.experts = core::ExpertMap::of(p.expert_to_rank, num_ranks);
  d.num_topk = num_topk;
  d.hidden = p.hidden = hidden;
  d.dtype = p.dtype = DType::bf16;
  d.layout = layout;
  for (int rank = 0; rank < num_ranks; ++rank) {
    core::DispatchInput& in = d.ranks.emplace_back();
    in.topk_idx = ids(rank);
    in.num_tokens = static_cast<int64_t>(in.topk_idx.size()) / num_topk;
    in.x = random_rows(random, d.dtype, in.num_tokens * hidden);
  }
  return p;
}

/// Dispatch and combine in one mode, compared. Collective.
inline void expect_round(Buffer& buffer, const Problem& problem, Mode mode) {
  const int rank = buffer.rank();
  RankArguments arguments(problem.p, rank, {.mode = mode});
  const DispatchResult rows = buffer.dispatch(arguments.dispatch);
  problem.expect_rows(rows, rank);
  CombineArgs back = problem.back(rank, rows.handle);
  back.mode = mode;
  problem.expect_sums(buffer.combine(back), rank);
}

inline void run_problem(const Problem& problem, const std::function<void(Communicator&, Buffer&)>& body, const RunChoices& run = {}) {
  CommunicatorOptions options;
  options.transport = run.transport;
  run_virtual_ranks(
      static_cast<int>(problem.p.dispatch.ranks.size()),
      [&](Communicator& comm) {
        Buffer buffer(comm, config_of(problem.p, run));
        body(comm, buffer);
      },
      options);
}

inline void expect_both_modes(const RandomProblem& p) {
  const Problem problem(p);
  run_problem(problem, [&](Communicator&, Buffer& buffer) {
    for (Mode mode : {Mode::throughput, Mode::low_latency}) expect_round(buffer, problem, mode);
  });
}

/// Choices of one rank, uniform.
inline std::vector<int64_t> uniform_ids(int rank, int64_t num_tokens, int num_topk, int num_experts) {
  Random random(static_cast<uint64_t>(rank) + 100);
  return random_topk(random, RoutingKind::uniform, num_tokens, num_topk, num_experts);
}

}  // namespace turnout::testing
