// The whole CPU engine under seeded schedules: virtual ranks take turns (turns.h) over random calls, and what they deliver equals the oracle's
// bit for bit. A seed that fails is printed and replays. With --mutations, mistakes are planted in the protocol, and every one must be found.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>

#include "engine/cpu/mutation.h"
#include "engine/soak_player.h"
#include "engine/turns.h"
#include "tools/report.h"

namespace turnout::testing {
namespace {

/// Few ranks, few tokens, little memory: rings fill up, leases run out, and a run has some thousand steps.
Session small_session(uint64_t seed) {
  Random random(seed * 0x9e3779b97f4a7c15ull + 1);
  Session s;
  s.seed = seed;
  s.own_threads = false;
  s.num_ranks = static_cast<int>(random.one_of(std::vector<int>{2, 2, 3, 3, 4, 6}));
  s.options.transport = "inproc";
  if (const uint64_t bits = random.bits(); random.chance(0.25)) s.options.scheduler_seed = bits | 1;
  for (int r = 0; r < s.num_ranks; ++r) s.options.node_of_rank.push_back(static_cast<int>(random.below(2)));
  s.num_steps = 16;
  RandomLimits limits;
  limits.num_ranks = s.num_ranks;
  limits.max_tokens = random.one_of(std::vector<int64_t>{2, 5, 12});
  limits.max_hidden = random.one_of(std::vector<int64_t>{8, 40, 500});
  limits.max_topk = 3;
  limits.max_experts = 7;
  switch (random.below(4)) {
    case 0:  // more rows for a rank than its rings hold, which is 16 of the largest
      s.num_ranks = limits.num_ranks = static_cast<int>(random.between(2, 3));
      s.options.node_of_rank.assign(static_cast<size_t>(s.num_ranks), 0);
      limits.max_tokens = 70;
      limits.max_hidden = 200;
      limits.kinds = {RoutingKind::uniform, RoutingKind::one_expert};
      limits.dtypes = {DType::fp64, DType::i64};
      limits.max_topk = 1;
      limits.zero_tokens = 0;
      break;
    case 1:  // rows that peers read in place
      limits.layouts = {Layout::rank_major};
      limits.wires = {Wire::payload};
      limits.side = limits.capacity = limits.quantize = false;
      break;
    default: break;
  }
  BufferConfig& c = s.config;
  c.num_experts = static_cast<int>(random.between(1, limits.max_experts));
  for (int64_t maps = random.between(1, 2); maps > 0; --maps) s.maps.push_back(random_owners(random, c.num_experts, limits));
  c.expert_to_rank = s.maps[0];
  c.dtype = DType::u8;
  c.max_tokens_per_rank = limits.max_tokens;
  c.max_topk = limits.max_topk;
  c.num_lanes = static_cast<int>(random.between(1, 2));
  c.max_outstanding = static_cast<int>(random.between(1, 3));
  if (random.chance(0.5)) c.receive_bytes = random.one_of(std::vector<size_t>{4096, 16384});
  c.staging_bytes = 1;
  c.timeouts.timeout = c.timeouts.busy_timeout = std::chrono::seconds(3);  // after a failure alone
  for (int64_t n = random.between(1, 3); n > 0; --n) add_family(s, random, limits);
  return s;
}

struct Played {
  std::string failure;  ///< empty if all went well
  uint64_t trace = 0, num_steps = 0, num_turns = 0;
  int64_t compared = 0;
};

Played play(uint64_t seed) {
  const Session s = small_session(seed);
  Turns turns(seed, s.num_ranks);
  Played played;
  std::mutex mutex;
  try {
    run_virtual_ranks(
        s.num_ranks,
        [&](Communicator& comm) {
          try {
            Buffer buffer(comm, s.config);
            std::vector<int> lanes;
            for (int lane = 0; lane < s.config.num_lanes; ++lane) lanes.push_back(lane);
            Player player(s, buffer, std::make_unique<Place>(), lanes, s.seed);
            const Turns::Seat seat(turns, comm.rank());
            try {
              const Tally tally = player.play(s.num_steps);
              std::lock_guard lock(mutex);
              played.compared += tally.count(Player::kCompared) ? tally.at(Player::kCompared) : 0;
            } catch (const std::exception& e) {  // said before this rank keeps the others waiting
              turns.give_up("rank " + std::to_string(comm.rank()) + ": " + e.what());
              throw;
            }
          } catch (const std::exception& e) {
            turns.give_up("rank " + std::to_string(comm.rank()) + ": " + e.what());
            throw;
          }
        },
        s.options);
  } catch (const std::exception& e) {
    turns.give_up(e.what());
  }
  played.failure = turns.why();
  played.trace = turns.trace();
  played.num_steps = turns.num_steps();
  played.num_turns = turns.num_turns();
  return played;
}

struct Options {
  uint64_t seed = 1;
  int64_t seeds = 0;  ///< so many; 0: by time
  double seconds = 10;
  bool mutations = false;
  std::string record;
};

/// Plays seeds until one fails or enough are played. The exit status.
int play_seeds(const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  tools::Report record = tools::new_report("./dev schedules --seconds " + std::to_string(static_cast<int64_t>(options.seconds)) + " --seed " +
                                           std::to_string(options.seed) + " --record");
  int64_t num_seeds = 0, num_failed = 0, compared = 0;
  uint64_t num_steps = 0, num_turns = 0;
  for (uint64_t seed = options.seed; num_failed == 0 && (options.seeds ? num_seeds < options.seeds : seconds() < options.seconds); ++seed) {
    const Played played = play(seed);
    ++num_seeds;
    compared += played.compared;
    num_steps += played.num_steps;
    num_turns += played.num_turns;
    std::string failure = played.failure;
    // A seed is worth something only if it replays.
    if (failure.empty() && num_seeds % 50 == 1 && play(seed).trace != played.trace) failure = "the seed does not replay: steps come in another order";
    if (failure.empty()) continue;
    ++num_failed;
    std::printf("FAILED seed %llu: %s\nagain with: schedules --seeds 1 --seed %llu\n", static_cast<unsigned long long>(seed), failure.c_str(),
                static_cast<unsigned long long>(seed));
  }
  char line[256];
  std::snprintf(line, sizeof line, "%lld schedules, %llu steps, %llu turns, %lld results equal the oracle's, %.0f s",
                static_cast<long long>(num_seeds), static_cast<unsigned long long>(num_steps), static_cast<unsigned long long>(num_turns),
                static_cast<long long>(compared), seconds());
  std::printf("%s\n%lld passed, %lld failed, 0 skipped\n", line, static_cast<long long>(num_seeds - num_failed), static_cast<long long>(num_failed));
  record.tests.passed = static_cast<int>(num_seeds - num_failed);
  record.tests.failed = static_cast<int>(num_failed);
  record.tests.names.emplace_back(line);
  if (!options.record.empty()) tools::write_report(record, options.record);
  return num_failed ? 1 : 0;
}

/// Every one must be found within so many seeds.
constexpr uint64_t kMostSeeds = 400;

/// In a process of its own: a mistake may crash it, and that is found, too. 0: found, and again with the same seed; else not.
int find(engine::Mutation mutation, uint64_t first) {
  const int which = static_cast<int>(mutation);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const int words = dup(1);
    if (!std::freopen("/dev/null", "w", stdout) || !std::freopen("/dev/null", "w", stderr)) _exit(2);
    alarm(240);
    engine::active_mutation = mutation;
    for (uint64_t seed = first; seed < first + kMostSeeds; ++seed) {
      const Played played = play(seed);
      if (played.failure.empty()) continue;
      const bool again = !play(seed).failure.empty();
      dprintf(words, "mutation %d: found by seed %llu%s: %.90s\n", which, static_cast<unsigned long long>(seed), again ? "" : ", but not again",
              played.failure.substr(0, played.failure.find('\n')).c_str());
      _exit(again ? 0 : 1);
    }
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status) && WTERMSIG(status) != SIGALRM) {
    std::printf("mutation %d: found, it ends the process (signal %d)\n", which, WTERMSIG(status));
    return 0;
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
  std::printf("FAILED mutation %d: not found by %llu seeds\n", which, static_cast<unsigned long long>(kMostSeeds));
  return 1;
}

int find_mutations(const Options& options) {
  int num_missed = 0, num_all = 0;
  for (int m = 1; m < static_cast<int>(engine::Mutation::last); ++m, ++num_all) num_missed += find(static_cast<engine::Mutation>(m), options.seed);
  std::printf("%d passed, %d failed, 0 skipped\n", num_all - num_missed, num_missed);
  return num_missed ? 1 : 0;
}

/// One processor: turns go from one thread to the next, and a wake-up of another processor takes several times as long.
void stay_on_one_processor() {
  cpu_set_t all, one;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &all)) continue;
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
    return;
  }
}

}  // namespace
}  // namespace turnout::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(throw_on_failure, true);  // the first difference ends a run
  setenv("TURNOUT_LOG", "error", 0);       // NOLINT(concurrency-mt-unsafe): results that find no lease are meant to be here
  turnout::testing::Options options;
  CLI::App app("Seeded schedules of the CPU engine");
  app.add_option("--seed", options.seed, "The first");
  app.add_option("--seeds", options.seeds, "How many; without it, for some seconds");
  app.add_option("--seconds", options.seconds, "How long to play");
  app.add_flag("--mutations", options.mutations, "Plant mistakes, and find each");
  app.add_option("--record", options.record, "File for a report");
  CLI11_PARSE(app, argc, argv);
  turnout::testing::stay_on_one_processor();
  return options.mutations ? turnout::testing::find_mutations(options) : turnout::testing::play_seeds(options);
}
