// Random calls over long-lived Buffers, bit for bit against the oracle, for as long as asked. A session is one group of
// ranks, threads or processes, with one or two Buffers; all ranks play the same script of dispatches, cached dispatches,
// combines and refused calls on several lanes, wait in any order, keep results for a while, and one rank is slow. The seed
// of a session replays it.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <sstream>

#include "engine/soak_perils.h"
#include "engine/soak_place.h"
#include "engine/soak_player.h"
#include "engine/soak_processes.h"
#include "tools/report.h"

namespace turnout::testing {
namespace {

/// Runs each body in a thread and throws what the first of them threw.
void run_all(const std::vector<std::function<void()>>& bodies) {
  std::vector<std::exception_ptr> failures(bodies.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < bodies.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        bodies[i]();
      } catch (...) {
        failures[i] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

/// One rank of a session, on all of its Buffers.
Tally play_rank(const Session& s, Communicator& comm) {
  std::deque<Buffer> buffers;
  const auto place = [&] { return s.num_gpus > 0 ? gpu_place(comm.rank(), s.num_gpus) : std::make_unique<Place>(); };
  BufferConfig config = s.config;
  config.device = place()->device();
  for (int b = 0; b < s.num_buffers; ++b) buffers.emplace_back(comm, config);
  std::vector<int> lanes;
  for (int lane = 0; lane < s.config.num_lanes; ++lane) lanes.push_back(lane);
  std::vector<std::unique_ptr<Player>> players;
  for (Buffer& buffer : buffers) {
    if (s.lane_threads) {
      for (int lane : lanes) players.push_back(std::make_unique<Player>(s, buffer, place(), std::vector<int>{lane}, s.seed + players.size()));
    } else {
      players.push_back(std::make_unique<Player>(s, buffer, place(), lanes, s.seed + players.size()));
    }
  }
  std::vector<Tally> tallies(players.size());
  std::vector<std::function<void()>> bodies;
  for (size_t i = 0; i < players.size(); ++i) bodies.emplace_back([&, i] { tallies[i] = players[i]->play(s.num_steps); });
  if (bodies.size() == 1) bodies.front()();
  else run_all(bodies);
  Tally all;
  for (const Tally& tally : tallies) add_to(all, tally);
  return all;
}

/// Counts what kind of session it was.
void tell_kind(const Session& s, Tally& all) {
  const auto session = [&](const std::string& what) { ++all["sessions " + what]; };
  session("of " + std::to_string(s.num_ranks) + " ranks");
  session(s.processes ? "over shm of processes" : "over " + s.options.transport + " of threads");
  if (s.options.scheduler_seed) session("with puts and signals reordered");
  if (s.slow_rank >= 0) session("with a slow rank");
  if (s.config.num_lanes > 1) session(s.lane_threads ? "with a thread per lane" : "with several lanes of one thread");
  if (s.config.max_outstanding > 1) session("with several outstanding calls");
  if (s.num_buffers > 1) session("with two Buffers");
  if (s.config.num_threads > 1) session("with several threads per rank");
}

/// What the session did on all of its ranks, which are threads. Throws what went wrong first.
Tally run_session(const Session& s) {
  Tally all;
  std::mutex mutex;
  run_virtual_ranks(
      s.num_ranks,
      [&](Communicator& comm) {
        const Tally mine = play_rank(s, comm);
        std::lock_guard lock(mutex);
        add_to(all, mine);
      },
      s.options);
  return all;
}

/// What sessions did that start together. Throws what went wrong first.
Tally run_sessions(std::span<const Session> sessions) {
  Tally all = sessions.front().processes ? run_processes(sessions, play_rank) : run_session(sessions.front());
  for (const Session& s : sessions) tell_kind(s, all);
  return all;
}

/// What a run that chose nothing must have done at least once.
std::vector<std::string> not_covered(const Tally& tally) {
  std::vector<std::string> wanted;
  for (const char* layout : {"rank_major", "expert_major", "expert_slab"}) {
    for (Mode mode : Player::kModes) {
      wanted.push_back(std::string("dispatch ") + layout + " " + std::string(name(mode)));
      wanted.push_back(wanted.back() + " cached");
      for (Wire wire : {Wire::payload, Wire::fp32, Wire::fp8, Wire::rows}) {
        if (wire == Wire::rows && std::string_view(layout) == "rank_major") continue;
        wanted.push_back(std::string("combine ") + layout + " " + std::string(name(mode)) + " wire " + std::string(name(wire)));
      }
    }
  }
  for (int ranks = 1; ranks <= 6; ++ranks) wanted.push_back("sessions of " + std::to_string(ranks) + " ranks");
  for (const char* what : {"dispatch to fp8_e4m3",
                           "dispatch to fp8_e4m3_ue8m0",
                           "dispatch exact",
                           "dispatch with a capacity",
                           "dispatch_async resident",
                           "dispatch_async deferred",
                           "dispatch of strided rows",
                           "dispatch out=",
                           "combine_async",
                           "combine out=",
                           "combine side=",
                           "combine weights of the source",
                           "combine weights of rows",
                           "combine of rows in a lease",
                           "results in a lease",
                           "results in other memory",
                           "refused",
                           "experts moved",
                           "sessions over inproc of threads",
                           "sessions over shm of threads",
                           "sessions with puts and signals reordered",
                           "sessions with a slow rank",
                           "sessions with a thread per lane",
                           "sessions with several lanes of one thread",
                           "sessions with several outstanding calls",
                           "sessions with two Buffers",
                           "sessions with several threads per rank",
                           "sessions with deaths and joins",
                           "ranks killed",
                           "ranks joined",
                           "groups recovered from a late rank"}) {
    wanted.emplace_back(what);
  }
  std::erase_if(wanted, [&](const std::string& what) { return tally.count(what) > 0; });
  return wanted;
}

struct Options {
  double seconds = 180;
  int64_t steps = 0;  ///< not by time, but until so many were made
  uint64_t seed = 1;
  std::string device = "cpu";
  bool perils = false;  ///< sessions of deaths and joins alone
  SoakChoices choices;
  std::string record;
};

/// Made before the run: what it says of the tree and of the load is how things were then.
tools::Report new_record(const Options& options) {
  std::ostringstream command;
  command << "./dev soak --seconds " << options.seconds << " --seed " << options.seed;
  if (options.choices.num_gpus > 0) command << " --device cuda --gpus " << options.choices.num_gpus;
  command << " --record";
  return tools::new_report(command.str());
}

void write_record(tools::Report report, const Options& options, const Tally& tally, int64_t num_sessions, int64_t num_failed) {
  report.tests.passed = static_cast<int>(tally.count(Player::kCompared) ? tally.at(Player::kCompared) : 0);
  report.tests.failed = static_cast<int>(num_failed);
  report.tests.names.push_back(std::to_string(num_sessions) + " sessions");
  for (const auto& [what, times] : tally) report.tests.names.push_back(what + ": " + std::to_string(times));
  tools::write_report(report, options.record);
}

/// Prints the last line of a run and returns its exit status.
int finish(tools::Report record, const Options& options, const Tally& tally, const Flat& flat, int64_t num_sessions, bool failed) {
  const std::string memory = "memory has grown by " + std::to_string(flat.heap_grown_kib()) + " KiB of the heap, and by " +
                             std::to_string(flat.grown_kib()) + " KiB resident since it has settled; descriptors, threads and mappings have not";
  record.tests.names.push_back(memory);
  for (const auto& [what, times] : tally) std::printf("%10lld  %s\n", static_cast<long long>(times), what.c_str());
  int64_t num_failed = failed ? 1 : 0;
  if (!failed && !options.perils && options.seconds >= 60 && options.choices.num_ranks == 0 && options.choices.transport.empty() &&
      options.choices.num_gpus == 0) {
    for (const std::string& what : not_covered(tally)) {
      std::printf("FAILED: never done: %s\n", what.c_str());
      ++num_failed;
    }
  }
  std::printf("%s\n", memory.c_str());
  if (!options.record.empty()) write_record(record, options, tally, num_sessions, num_failed);
  const auto compared = tally.count(Player::kCompared) ? tally.at(Player::kCompared) : 0;
  std::printf("%lld passed, %lld failed, 0 skipped\n", static_cast<long long>(compared), static_cast<long long>(num_failed));
  return num_failed ? 1 : 0;
}

/// A session on GPUs is told of before it starts: a kernel that waits for ever cannot be stopped from outside.
void announce(const Session& s) {
  if (s.num_gpus == 0) return;
  std::printf("session of seed %llu: %d ranks on %d GPUs, %s, %d steps\n", static_cast<unsigned long long>(s.seed), s.num_ranks, s.num_gpus,
              s.processes ? "processes" : "threads", s.num_steps);
  std::fflush(stdout);
  alarm(60);
}

/// Whether a session of deaths and joins comes next: where nothing was chosen that it cannot have.
bool is_perilous(int64_t num_sessions, const Options& options) {
#if defined(__SANITIZE_THREAD__)
  return false;  // ThreadSanitizer does not follow forked ranks
#else
  const SoakChoices& c = options.choices;
  return (options.perils || num_sessions % 100 == 20) && options.steps == 0 && c.num_gpus == 0 && c.num_ranks == 0 && c.transport != "inproc";
#endif
}

/// `s` is the first session of those that started with the one that failed.
void tell_failure(const Session& s, const SoakChoices& c, const char* what, bool perilous) {
  if (perilous) {
    std::printf("FAILED session of deaths and joins: %s\nagain with: soak --perils --seconds 1 --seed %llu\n", what,
                static_cast<unsigned long long>(s.seed));
    return;
  }
  const auto seed = static_cast<unsigned long long>(s.seed);
  const std::string ranks = c.num_ranks > 0 ? " --ranks " + std::to_string(c.num_ranks) : "";
  const std::string transport = c.transport.empty() ? "" : " --transport " + c.transport;
  const std::string gpus = c.num_gpus > 0 ? " --device cuda --gpus " + std::to_string(c.num_gpus) : "";
  std::printf("FAILED session of seed %llu (%d ranks, %s%s): %s\nagain with: soak --seconds 1 --seed %llu%s\n", seed, s.num_ranks,
              s.options.transport.c_str(), s.processes ? ", processes" : "", what, seed, (ranks + transport + gpus).c_str());
}

int soak(const Options& options) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const tools::Report record = new_record(options);
  Tally tally;
  int64_t num_sessions = 0, num_steps = 0;
  double reported = 0;
  Flat flat;
  const auto goes_on = [&] { return num_sessions == 0 || (options.steps > 0 ? num_steps < options.steps : seconds() < options.seconds); };
  for (uint64_t seed = options.seed; goes_on();) {
    if (num_sessions > 0 && options.choices.num_gpus == 0) {
      try {
        flat.look();
      } catch (const std::exception& e) {
        std::printf("FAILED after %lld sessions: %s\n", static_cast<long long>(num_sessions), e.what());
        return finish(record, options, tally, flat, num_sessions, true);
      }
    }
    std::vector<Session> sessions;
    // Threads start at once.
    const size_t most = options.choices.num_gpus > 0 && options.choices.transport == "shm" && options.choices.num_ranks > 0 ? 9 : 1;
    for (int64_t steps = num_steps; sessions.size() < most && (sessions.empty() || options.steps == 0 || steps < options.steps); ++seed) {
      sessions.push_back(random_session(seed, options.choices));
      steps += sessions.back().num_steps;
      announce(sessions.back());
    }
    for (const Session& s : sessions) num_steps += s.num_steps;
    const bool perilous = is_perilous(num_sessions, options);
    try {
      add_to(tally, perilous ? Perils::run(sessions.front().seed, 6) : run_sessions(sessions));
    } catch (const std::exception& e) {
      tell_failure(sessions.front(), options.choices, e.what(), perilous);
      return finish(record, options, tally, flat, num_sessions, true);
    }
    num_sessions += static_cast<int64_t>(sessions.size());
    if (seconds() - reported >= 10) {
      reported = seconds();
      std::printf("%.0f s: %lld sessions, %lld results equal the oracle's\n", reported, static_cast<long long>(num_sessions),
                  static_cast<long long>(tally[Player::kCompared]));
      std::fflush(stdout);
    }
  }
  return finish(record, options, tally, flat, num_sessions, false);
}

}  // namespace
}  // namespace turnout::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(throw_on_failure, true);  // the first difference ends the session
  setenv("TURNOUT_LOG", "error", 0);       // NOLINT(concurrency-mt-unsafe): results that find no lease are meant to be here
  mallopt(M_ARENA_MAX, 1);                 // what is resident is to tell of leaks, and not of an arena for each of a thousand threads
  turnout::testing::Options options;
  CLI::App app("Random dispatches and combines against the oracle");
  app.add_option("--seconds", options.seconds, "How long to run");
  app.add_option("--steps", options.steps, "Run until so many steps are made, however long that takes");
  app.add_option("--device", options.device, "cpu, or cuda: ranks on GPUs, threads unless the transport is shm")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--gpus", options.choices.num_gpus, "GPUs that ranks are dealt to, with --device cuda")->check(CLI::Range(1, 64));
  app.add_option("--seed", options.seed, "Of the first session; the next ones count on");
  app.add_option("--ranks", options.choices.num_ranks, "Ranks of each session; otherwise 1 to 6")->check(CLI::Range(0, 64));
  app.add_option("--transport", options.choices.transport, "inproc or shm; otherwise either")->check(CLI::IsMember({"inproc", "shm"}));
  app.add_flag("--perils", options.perils, "Sessions of deaths and joins alone");
  app.add_option("--record", options.record, "File for a report of what was done");
  CLI11_PARSE(app, argc, argv);
  if (options.device == "cuda") {
    options.choices.num_gpus = std::max(1, options.choices.num_gpus);
    if (options.choices.transport.empty()) options.choices.transport = "inproc";
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // NOLINT(concurrency-mt-unsafe)
  } else {
    options.choices.num_gpus = 0;
  }
  return turnout::testing::soak(options);
}
