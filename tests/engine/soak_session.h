// What a session of the soak is made of, all of it from one seed: a group of ranks, the shape of its Buffers, and families of
// problems with the oracle's answers, from which the ranks then play.
#pragma once
#include <deque>
#include <map>
#include <string>

#include "engine/contract.h"

namespace turnout::testing {

/// How often each thing was done: what a run has covered.
using Tally = std::map<std::string, int64_t>;

inline void add_to(Tally& all, const Tally& more) {
  for (const auto& [what, times] : more) all[what] += times;
}

/// One routing with two sets of rows and two combines.
struct Family {
  int map = 0;
  RandomProblem variants[2];
  std::vector<core::DispatchOutput> received[2];
  RandomProblem back[2];
  core::CombineProblem combine[2];
  std::vector<core::CombineOutput> combined[2];
};

struct Session {
  uint64_t seed = 0;
  int num_gpus = 0;  ///< ranks are dealt to so many; 0: the host
  int num_ranks = 1, slow_rank = -1, num_buffers = 1, num_steps = 60;
  bool lane_threads = false, processes = false;
  bool own_threads = true;  ///< ranks may start some
  CommunicatorOptions options;
  BufferConfig config;
  std::vector<std::vector<int>> maps;
  std::deque<Family> families;
};

/// What a command line may fix.
struct SoakChoices {
  int num_ranks = 0, num_gpus = 0;
  std::string transport;
};

/// On GPUs: what the script must not ask for there.
inline void put_on_gpus(Session& s, int num_gpus) {
  s.num_gpus = num_gpus;
  // Processes where the driver has not been started here: all sessions of a run are of one kind.
  s.processes = s.options.transport == "shm";
  s.options.scheduler_seed = 0;
  // Kernels that wait for each other must all fit on their GPU at once.
  s.lane_threads = false;
  s.num_buffers = 1;
  s.config.receive_bytes = size_t{2} << 30;
  s.config.staging_bytes = 0;
  s.config.num_threads = 1;
  s.config.timeouts.timeout = s.config.timeouts.busy_timeout = std::chrono::seconds(10);
}

inline void fit(RandomProblem& p, const Session& s, int map) {
  const auto experts = static_cast<int64_t>(s.config.num_experts);
  p.expert_to_rank = s.maps[static_cast<size_t>(map)];
  p.node_of_rank = s.options.node_of_rank;
  p.dispatch.experts = core::ExpertMap::of(p.expert_to_rank, s.num_ranks);
  for (auto& in : p.dispatch.ranks) {
    for (int64_t& id : in.topk_idx) id = id < 0 ? -1 : id % experts;
  }
}

/// The same routing as `p` with the rows of `q`.
inline RandomProblem with_rows_of(const RandomProblem& p, RandomProblem q, Random& random) {
  const core::DispatchProblem& d = p.dispatch;
  core::DispatchProblem& e = q.dispatch;
  e.experts = d.experts;
  e.num_topk = d.num_topk;
  e.has_weights = d.has_weights;
  e.layout = d.layout;
  e.alignment = d.alignment;
  e.capacity = d.capacity;
  for (size_t r = 0; r < e.ranks.size(); ++r) {
    core::DispatchInput& in = e.ranks[r];
    in.num_tokens = d.ranks[r].num_tokens;
    in.topk_idx = d.ranks[r].topk_idx;
    in.topk_weights = d.ranks[r].topk_weights;
    in.x = random_rows(random, e.dtype, in.num_tokens * e.hidden);
    for (size_t i = 0; i < in.side.size(); ++i) in.side[i] = random_rows(random, DType::u8, in.num_tokens * static_cast<int64_t>(e.side_bytes[i]));
  }
  return q;
}

/// The choices of `q` for a combine of `p`, where the layout of `p` allows them.
inline RandomProblem with_combine_of(RandomProblem p, const RandomProblem& q) {
  const bool by_rank = p.dispatch.layout == Layout::rank_major;
  p.dtype = q.dtype;
  p.hidden = q.hidden;
  p.with_side = q.with_side;
  p.wire = q.wire == Wire::rows && by_rank ? Wire::fp32 : q.wire;
  p.apply = q.apply == CombineWeights::source && (by_rank || !p.dispatch.has_weights) ? CombineWeights::none : q.apply;
  if (p.apply == CombineWeights::tokens && p.wire != Wire::rows) p.apply = CombineWeights::none;
  return p;
}

inline void add_family(Session& s, Random& random, const RandomLimits& limits) {
  Family& f = s.families.emplace_back();
  f.map = static_cast<int>(random.below(static_cast<int64_t>(s.maps.size())));
  f.variants[0] = random_problem(random.bits(), limits);
  fit(f.variants[0], s, f.map);
  f.variants[1] = with_rows_of(f.variants[0], random_problem(random.bits(), limits), random);
  fit(f.variants[1], s, f.map);
  for (int v = 0; v < 2; ++v) {
    const RandomProblem& p = f.variants[v];
    f.received[v] = core::reference_dispatch(p.dispatch);
    f.back[v] = with_combine_of(f.variants[0], v ? random_problem(random.bits(), limits) : p);
    const BufferConfig needed = config_of(p, {}), back = config_of(f.back[v], {});
    s.config.hidden = std::max({s.config.hidden, needed.hidden, back.hidden});
    s.config.max_side_bytes = std::max(s.config.max_side_bytes, needed.max_side_bytes);
  }
  for (int v = 0; v < 2; ++v) {
    f.combine[v] = random_combine(f.back[v], f.received[0], random.bits());
    f.combined[v] = core::reference_combine(f.combine[v]);
  }
}

inline Session random_session(uint64_t seed, const SoakChoices& choices) {
#if defined(__SANITIZE_THREAD__)
  constexpr bool kCanFork = false;  // ThreadSanitizer does not follow forked ranks
#else
  constexpr bool kCanFork = true;
#endif
  Random random(seed);
  Session s;
  s.seed = seed;
  s.num_ranks = static_cast<int>(random.between(1, 6));
  if (choices.num_ranks > 0) s.num_ranks = choices.num_ranks;
  s.options.transport = random.chance(0.5) ? "inproc" : "shm";
  if (!choices.transport.empty()) s.options.transport = choices.transport;
  const bool shm = s.options.transport == "shm";
  if (const uint64_t bits = random.bits(); !shm && random.chance(0.4)) s.options.scheduler_seed = bits | 1;
  s.processes = random.chance(0.4) && shm && kCanFork;
  const auto nodes = random.between(1, s.num_ranks);
  for (int r = 0; r < s.num_ranks; ++r) s.options.node_of_rank.push_back(static_cast<int>(random.below(nodes)));
  s.slow_rank = random.chance(0.6) ? static_cast<int>(random.below(s.num_ranks)) : -1;
  s.lane_threads = random.chance(0.4);
  s.num_buffers = random.chance(0.2) ? 2 : 1;
  s.num_steps = random.chance(0.1) ? 600 : 60;

  RandomLimits limits;
  limits.num_ranks = s.num_ranks;
  limits.max_tokens = random.one_of(std::vector<int64_t>{1, 8, 24, 64});
  limits.max_hidden = random.one_of(std::vector<int64_t>{20, 300, 1500});
  limits.max_topk = static_cast<int>(random.one_of(std::vector<int64_t>{3, 9, 24}));
  BufferConfig& c = s.config;
  c.num_experts = static_cast<int>(random.between(1, limits.max_experts));
  for (int64_t maps = random.between(1, s.lane_threads ? 1 : 3); maps > 0; --maps) s.maps.push_back(random_owners(random, c.num_experts, limits));
  c.expert_to_rank = s.maps[0];
  c.dtype = DType::u8;
  c.max_tokens_per_rank = limits.max_tokens;
  c.max_topk = limits.max_topk;
  c.num_lanes = static_cast<int>(random.between(1, 3));
  c.max_outstanding = static_cast<int>(random.between(1, 4));
  c.num_threads = random.chance(0.2) ? 2 : 1;
  if (random.chance(0.5)) c.receive_bytes = random.one_of(std::vector<size_t>{4096, 16384, 262144});
  if (random.chance(0.5)) c.staging_bytes = random.one_of(std::vector<size_t>{1, 4096, 65536});
  c.timeouts.timeout = c.timeouts.busy_timeout = std::chrono::seconds(60);
  for (int64_t n = random.between(3, 8); n > 0; --n) add_family(s, random, limits);
  if (choices.num_gpus > 0) put_on_gpus(s, choices.num_gpus);
  return s;
}

}  // namespace turnout::testing
