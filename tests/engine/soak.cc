// Random calls over long-lived Buffers, bit for bit against the oracle, for as long as asked. A session is one group of
// ranks with one Buffer; all ranks play the same script of dispatches, cached dispatches and combines on several lanes,
// wait in any order, keep results for a while, and one rank is slow. The seed of a session replays it.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <deque>
#include <memory>
#include <thread>

#include "engine/contract.h"

namespace turnout::testing {
namespace {

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
  int num_ranks = 1, slow_rank = -1;
  bool lane_threads = false;
  CommunicatorOptions options;
  BufferConfig config;
  std::vector<std::vector<int>> maps;
  std::deque<Family> families;
};

void fit(RandomProblem& p, const Session& s, int map) {
  const auto experts = static_cast<int64_t>(s.config.num_experts);
  p.expert_to_rank = s.maps[static_cast<size_t>(map)];
  p.node_of_rank = s.options.node_of_rank;
  p.dispatch.experts = core::ExpertMap::of(p.expert_to_rank, s.num_ranks);
  for (auto& in : p.dispatch.ranks) {
    for (int64_t& id : in.topk_idx) id = id < 0 ? -1 : id % experts;
  }
}

/// The same routing as `p` with the rows of `q`.
RandomProblem with_rows_of(const RandomProblem& p, RandomProblem q, Random& random) {
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
RandomProblem with_combine_of(RandomProblem p, const RandomProblem& q) {
  const bool by_rank = p.dispatch.layout == Layout::rank_major;
  p.dtype = q.dtype;
  p.hidden = q.hidden;
  p.with_side = q.with_side;
  p.wire = q.wire == Wire::rows && by_rank ? Wire::fp32 : q.wire;
  p.apply = q.apply == CombineWeights::source && (by_rank || !p.dispatch.has_weights) ? CombineWeights::none : q.apply;
  return p;
}

void add_family(Session& s, Random& random, const RandomLimits& limits) {
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

Session random_session(uint64_t seed, int num_ranks, const std::string& transport) {
  Random random(seed);
  Session s;
  s.seed = seed;
  s.num_ranks = static_cast<int>(random.between(1, 6));
  if (num_ranks > 0) s.num_ranks = num_ranks;
  s.options.transport = random.chance(0.6) ? "inproc" : "shm";
  if (!transport.empty()) s.options.transport = transport;
  if (const uint64_t bits = random.bits(); s.options.transport == "inproc" && random.chance(0.4)) s.options.scheduler_seed = bits | 1;
  const auto nodes = random.between(1, s.num_ranks);
  for (int r = 0; r < s.num_ranks; ++r) s.options.node_of_rank.push_back(static_cast<int>(random.below(nodes)));
  s.slow_rank = random.chance(0.6) ? static_cast<int>(random.below(s.num_ranks)) : -1;
  s.lane_threads = random.chance(0.4);

  RandomLimits limits;
  limits.num_ranks = s.num_ranks;
  limits.max_tokens = random.one_of(std::vector<int64_t>{1, 8, 24, 64});
  limits.max_hidden = random.one_of(std::vector<int64_t>{20, 300, 1500});
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
  return s;
}

/// One rank's play of a script on some lanes.
class Player {
 public:
  Player(const Session& session, Buffer& buffer, std::vector<int> lanes, uint64_t script)
      : s_(session),
        buffer_(buffer),
        rank_(buffer.rank()),
        lanes_(std::move(lanes)),
        shared_(script),
        own_(script * 31 + static_cast<uint64_t>(rank_)) {}

  int64_t play(int num_steps) {
    for (int step = 0; step < num_steps; ++step) {
      if (rank_ == s_.slow_rank && own_.chance(0.3)) std::this_thread::sleep_for(std::chrono::microseconds(own_.below(3000)));
      do_step();
    }
    while (!open_.empty()) wait_for(0);
    kept_.clear();
    return num_checked_;
  }

 private:
  struct Open {
    int lane = 0, family = 0, variant = 0;
    std::unique_ptr<RankArguments> arguments;
    std::unique_ptr<Handle> handle;
    core::Bytes out;
    std::optional<PendingDispatch> dispatch;
    std::optional<PendingCombine> combine;
  };
  struct Kept {
    int family, variant;
    core::Bytes out;
    DispatchResult result;
  };
  struct Known {
    int family;
    Handle handle;
  };

  void do_step() {
    const int lane = shared_.one_of(lanes_);
    const auto what = shared_.below(10);
    const auto on_lane = std::count_if(open_.begin(), open_.end(), [&](const Open& o) { return o.lane == lane; });
    if (on_lane == s_.config.max_outstanding || (what == 0 && !open_.empty())) {
      wait_for(static_cast<size_t>(shared_.below(static_cast<int64_t>(open_.size()))));
    } else if (what == 1 && s_.maps.size() > 1) {
      map_ = static_cast<int>(shared_.below(static_cast<int64_t>(s_.maps.size())));
      buffer_.set_expert_to_rank(s_.maps[static_cast<size_t>(map_)]);
    } else if (what < 5 || known_.empty()) {
      const int family = static_cast<int>(shared_.below(static_cast<int64_t>(s_.families.size())));
      if (s_.families[static_cast<size_t>(family)].map == map_) start_dispatch(lane, family, 0, nullptr);
    } else {
      const Known& known = known_[static_cast<size_t>(shared_.below(static_cast<int64_t>(known_.size())))];
      const int variant = static_cast<int>(shared_.below(2));
      if (what < 7) start_dispatch(lane, known.family, variant, &known.handle);
      else start_combine(lane, known.family, variant, known.handle);
    }
    if (known_.size() > 6) known_.erase(known_.begin() + shared_.below(static_cast<int64_t>(known_.size())));
    while (kept_.size() > 3 || (!kept_.empty() && own_.chance(0.3))) forget(static_cast<size_t>(own_.below(static_cast<int64_t>(kept_.size()))));
  }

  void start_dispatch(int lane, int family, int variant, const Handle* handle) {
    const Family& f = s_.families[static_cast<size_t>(family)];
    const RandomProblem& p = f.variants[variant];
    RunChoices run;
    run.mode = shared_.one_of(kModes);
    run.i32_ids = own_.chance(0.5);
    run.result = own_.chance(0.3) ? ResultKind::fresh : ResultKind::automatic;
    run.receive = own_.chance(0.3) ? Receive::resident : Receive::deferred;
    Open& open = open_.emplace_back();
    open.lane = lane;
    open.family = family;
    open.variant = variant;
    open.arguments = std::make_unique<RankArguments>(p, rank_, run);
    DispatchArgs& args = open.arguments->dispatch;
    args.lane = lane;
    if (handle) {
      open.handle = std::make_unique<Handle>(*handle);
      args.handle = open.handle.get();
      args.topk_idx = args.topk_weights = TensorView();
    }
    const core::DispatchOutput& want = f.received[variant][static_cast<size_t>(rank_)];
    if (own_.chance(0.2)) {
      const DType dtype = p.dispatch.quantize == Quantize::none ? p.dispatch.dtype : DType::fp8_e4m3;
      open.out.resize(static_cast<size_t>(want.array_rows * p.dispatch.hidden) * size_of(dtype));
      args.out = TensorView::dense(open.out.data(), dtype, {want.array_rows, p.dispatch.hidden});
      args.result = ResultKind::automatic;
    }
    if (shared_.chance(0.5)) {
      open.dispatch.emplace(buffer_.dispatch_async(args));
    } else {
      Open now = std::move(open);
      open_.pop_back();
      arrived(now, buffer_.dispatch(now.arguments->dispatch));
    }
  }

  void start_combine(int lane, int family, int variant, const Handle& handle) {
    const Family& f = s_.families[static_cast<size_t>(family)];
    Open& open = open_.emplace_back();
    open.lane = lane;
    open.family = family;
    open.variant = variant;
    open.handle = std::make_unique<Handle>(handle);
    CombineArgs args = combine_args(f.back[variant], f.combine[variant], f.received[0], rank_, *open.handle);
    args.lane = lane;
    args.mode = shared_.one_of(kModes);
    if (shared_.chance(0.5)) {
      open.combine.emplace(buffer_.combine_async(args));
    } else {
      const Open now = std::move(open);
      open_.pop_back();
      came_back(now, buffer_.combine(args));
    }
  }

  void wait_for(size_t at) {
    Open open = std::move(open_[at]);
    open_.erase(open_.begin() + static_cast<int64_t>(at));
    if (open.dispatch) arrived(open, open.dispatch->wait());
    else came_back(open, open.combine->wait());
  }

  void arrived(Open& open, DispatchResult result) {
    check(open.family, open.variant, result);
    known_.push_back({open.family, result.handle});
    kept_.push_back({open.family, open.variant, std::move(open.out), std::move(result)});
  }

  void came_back(const Open& open, const CombineResult& result) {
    const Family& f = s_.families[static_cast<size_t>(open.family)];
    const RandomProblem& p = f.back[open.variant];
    expect_combine(result, f.combined[open.variant][static_cast<size_t>(rank_)], p.dtype, p.hidden, p.with_side);
    ++num_checked_;
  }

  void check(int family, int variant, const DispatchResult& result) {
    const Family& f = s_.families[static_cast<size_t>(family)];
    expect_dispatch(result, f.received[variant][static_cast<size_t>(rank_)], f.variants[variant].dispatch);
    ++num_checked_;
  }

  /// A result that was kept must still be what arrived.
  void forget(size_t at) {
    check(kept_[at].family, kept_[at].variant, kept_[at].result);
    kept_.erase(kept_.begin() + static_cast<int64_t>(at));
  }

  static constexpr Mode kModes[] = {Mode::automatic, Mode::throughput, Mode::low_latency};
  const Session& s_;
  Buffer& buffer_;
  const int rank_;
  const std::vector<int> lanes_;
  Random shared_, own_;  ///< the script, and what a rank may choose alone
  int map_ = 0;
  std::deque<Open> open_;
  std::vector<Kept> kept_;
  std::vector<Known> known_;
  int64_t num_checked_ = 0;
};

/// Returns the number of results compared. Throws what went wrong first.
int64_t run_session(const Session& s) {
  std::atomic<int64_t> num_checked{0};
  run_virtual_ranks(
      s.num_ranks,
      [&](Communicator& comm) {
        Buffer buffer(comm, s.config);
        constexpr int kSteps = 60;
        std::vector<int> lanes;
        for (int lane = 0; lane < s.config.num_lanes; ++lane) lanes.push_back(lane);
        if (!s.lane_threads) {
          num_checked += Player(s, buffer, lanes, s.seed).play(kSteps);
          return;
        }
        std::vector<std::exception_ptr> failures(lanes.size());
        std::vector<std::thread> threads;
        for (int lane : lanes) {
          threads.emplace_back([&, lane] {
            try {
              num_checked += Player(s, buffer, {lane}, s.seed + static_cast<uint64_t>(lane)).play(kSteps);
            } catch (...) {
              failures[static_cast<size_t>(lane)] = std::current_exception();
            }
          });
        }
        for (auto& thread : threads) thread.join();
        for (auto& failure : failures) {
          if (failure) std::rethrow_exception(failure);
        }
      },
      s.options);
  return num_checked;
}

int soak(double num_seconds, uint64_t seed, int num_ranks, const std::string& transport) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  int64_t num_passed = 0, num_sessions = 0;
  double reported = 0;
  while (num_sessions == 0 || seconds() < num_seconds) {
    const Session s = random_session(seed, num_ranks, transport);
    try {
      num_passed += run_session(s);
    } catch (const std::exception& e) {
      std::printf("FAILED session of seed %llu (%d ranks, %s): %s\nagain with: soak --seconds 1 --seed %llu%s%s\n%lld passed, 1 failed, 0 skipped\n",
                  static_cast<unsigned long long>(seed), s.num_ranks, s.options.transport.c_str(), e.what(), static_cast<unsigned long long>(seed),
                  num_ranks > 0 ? (" --ranks " + std::to_string(num_ranks)).c_str() : "",
                  transport.empty() ? "" : (" --transport " + transport).c_str(), static_cast<long long>(num_passed));
      return 1;
    }
    ++num_sessions;
    ++seed;
    if (seconds() - reported >= 10) {
      reported = seconds();
      std::printf("%.0f s: %lld sessions, %lld results equal the oracle's\n", reported, static_cast<long long>(num_sessions),
                  static_cast<long long>(num_passed));
      std::fflush(stdout);
    }
  }
  std::printf("%lld passed, 0 failed, 0 skipped\n", static_cast<long long>(num_passed));
  return 0;
}

}  // namespace
}  // namespace turnout::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(throw_on_failure, true);  // the first difference ends the session
  double seconds = 180;
  uint64_t seed = 1;
  int ranks = 0;
  std::string transport;
  CLI::App app("Random dispatches and combines against the oracle");
  app.add_option("--seconds", seconds, "How long to run");
  app.add_option("--seed", seed, "Of the first session; the next ones count on");
  app.add_option("--ranks", ranks, "Ranks of each session; otherwise 1 to 6")->check(CLI::Range(0, 64));
  app.add_option("--transport", transport, "inproc or shm; otherwise either")->check(CLI::IsMember({"inproc", "shm"}));
  CLI11_PARSE(app, argc, argv);
  return turnout::testing::soak(seconds, seed, ranks, transport);
}
