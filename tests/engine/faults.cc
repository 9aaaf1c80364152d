// Kills ranks at random steps of random calls, one job after the other, and measures how soon the others know. The engine is built with
// probes (tests/engine/probed), so that a point is a step of the protocol: a signal, a piece of a row or header, the start of a wait.
#include <CLI/CLI.hpp>
#include <sstream>

#include "engine/fault_hosts.h"
#include "engine/fault_processes.h"
#include "engine/fault_threads.h"
#include "tools/report.h"

namespace turnout::testing {
namespace {

struct Options {
  int64_t points = 40, from = 0;
  uint64_t seed = 1;
  std::string job_program;  ///< of the ranks on hosts that are cut off; none: no such faults
  std::string record;
};

/// Of one kind of fault.
struct Outcome {
  int64_t injected = 0, survived = 0;
  std::vector<double> detection_us;  ///< of every other rank
};

struct Run {
  std::map<std::string, Outcome> kinds;
  int64_t calls = 0, bytes = 0, failed = 0;
  std::vector<std::string> skipped;
  double loaded_seconds = 0;  ///< from the first call of a job to its fault, all jobs together
};

/// How long each of the others took to find out. Throws if one took too long, or did not.
std::vector<double> detections(const FaultCase& c, const FaultReport& report) {
  const int64_t died = report.ranks[static_cast<size_t>(c.victim)].died_us;
  if (died == 0) throw std::runtime_error("the fault did not happen");
  std::vector<double> times;
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    if (rank == c.victim) continue;
    const int64_t took = report.ranks[static_cast<size_t>(rank)].caught_us - died;
    times.push_back(static_cast<double>(took));
    if (took < 0 || took > 1000 * kDetection.count()) {
      throw std::runtime_error("rank " + std::to_string(rank) + " found out after " + std::to_string(took / 1000) + " ms");
    }
  }
  return times;
}

void run_point(const FaultCase& c, Run& run) {
  Outcome& outcome = run.kinds[name(c.kind)];
  ++outcome.injected;
  SharedReport report;
  if (is_of_processes(c.kind)) FaultProcesses(c, *report);
  else run_fault_of_threads(c, *report);
  const auto times = detections(c, *report);
  outcome.detection_us.insert(outcome.detection_us.end(), times.begin(), times.end());
  const RankReport& victim = report->ranks[static_cast<size_t>(c.victim)];
  run.loaded_seconds += static_cast<double>(victim.died_us - victim.began_us) * 1e-6;
  for (const RankReport& rank : report->ranks) {
    run.calls += rank.calls;
    run.bytes += rank.bytes;
  }
  ++outcome.survived;
}

/// One cable is pulled for every ten other faults.
void cut_hosts(const Options& options, Run& run) {
  if (options.job_program.empty()) return;
  CutHosts hosts;
  if (const std::string why = hosts.make(); !why.empty()) {
    run.skipped.push_back("host cut off: " + why);
    return;
  }
  Outcome& outcome = run.kinds["host cut off"];
  for (int64_t i = 0; i < std::max<int64_t>(1, options.points / 10); ++i) {
    ++outcome.injected;
    try {
      for (const int64_t took : hosts.cut(options.job_program, options.seed + static_cast<uint64_t>(i)))
        outcome.detection_us.push_back(static_cast<double>(took));
      ++outcome.survived;
    } catch (const std::exception& e) {
      std::printf("FAILED host cut off, number %lld: %s\n", static_cast<long long>(i), e.what());
      ++run.failed;
    }
  }
}

std::string words(const std::string& kind, const Outcome& o) {
  std::ostringstream text;
  text << kind << ": " << o.injected << " injected, " << o.survived << " survived";
  if (o.detection_us.empty()) return text.str();
  text.precision(1);
  text << std::fixed << "; found by the others after " << tools::quantile(o.detection_us, 0.5) / 1000 << " ms (p50), "
       << tools::quantile(o.detection_us, 1) / 1000 << " ms (max)";
  return text.str();
}

/// A case per kind; its times are those of detection.
tools::ReportCase case_of(const std::string& kind, const Outcome& o, const Options& options) {
  tools::ReportCase c;
  c.op = "fault: " + kind;
  c.transport = kind.rfind("thread", 0) == 0 ? "inproc" : kind == "host cut off" ? "tcp" : "shm";
  c.placement = c.transport == "inproc" ? "threads" : "processes";
  c.seed = options.seed;
  c.n_calls = o.injected;
  c.verified = o.survived == o.injected;
  if (o.detection_us.empty()) return c;
  c.p50_us = tools::quantile(o.detection_us, 0.5);
  c.p99_us = tools::quantile(o.detection_us, 0.99);
  c.limit_us = 1e3 * static_cast<double>(kDetection.count());
  c.limit_kind = "the deadline of detection; p50 and p99 are of the time from the fault to the error of each other rank";
  return c;
}

int finish(tools::Report record, const Options& options, const Run& run) {
  Outcome all;
  for (const auto& [kind, outcome] : run.kinds) {
    record.tests.names.push_back(words(kind, outcome));
    record.cases.push_back(case_of(kind, outcome, options));
    all.injected += outcome.injected;
    all.survived += outcome.survived;
    if (kind != "host cut off") all.detection_us.insert(all.detection_us.end(), outcome.detection_us.begin(), outcome.detection_us.end());
  }
  for (const std::string& what : run.skipped) record.tests.names.push_back("skipped: " + what);
  record.tests.names.push_back(words("all", all));
  record.tests.names.push_back(std::to_string(static_cast<int64_t>(static_cast<double>(run.calls) / std::max(run.loaded_seconds, 1e-3))) +
                               " calls per second under load (all ranks of a job together, comparing included, until its fault)");
  record.tests.names.push_back(std::to_string(run.bytes) + " bytes of " + std::to_string(run.calls) + " results verified");
  for (const std::string& line : record.tests.names) std::printf("%s\n", line.c_str());
  record.tests.passed = static_cast<int>(all.survived);
  record.tests.failed = static_cast<int>(run.failed);
  record.tests.skipped = static_cast<int>(run.skipped.size());
  if (!options.record.empty()) tools::write_report(record, options.record);
  std::printf("%d passed, %d failed, %d skipped\n", record.tests.passed, record.tests.failed, record.tests.skipped);
  return run.failed ? 1 : 0;
}

int faults(const Options& options) {
  std::vector<FaultKind> kinds;
  for (const FaultKind kind : kFaultKinds) {
#if defined(__SANITIZE_THREAD__)
    if (is_of_processes(kind)) continue;  // ThreadSanitizer does not follow forked ranks
#endif
    kinds.push_back(kind);
  }
  tools::Report record =
      tools::new_report("./dev faults --points " + std::to_string(options.points) + " --seed " + std::to_string(options.seed) + " --record");
  Run run;
  for (int64_t number = options.from; number < options.from + options.points; ++number) {
    const FaultCase c = fault_case(options.seed, number, kinds);
    try {
      run_point(c, run);
    } catch (const std::exception& e) {
      ++run.failed;
      std::printf("FAILED %s: %s\nagain with: faults --seed %llu --from %lld --points 1\n", c.words().c_str(), e.what(),
                  static_cast<unsigned long long>(options.seed), static_cast<long long>(number));
      std::fflush(stdout);
    }
  }
  cut_hosts(options, run);
  return finish(std::move(record), options, run);
}

}  // namespace
}  // namespace turnout::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(throw_on_failure, true);  // the first difference ends a rank
  setenv("TURNOUT_LOG", "error", 0);       // NOLINT(concurrency-mt-unsafe): results that find no lease are meant to be here
  std::thread([] {}).join();               // a sanitizer starts its own thread with the first
  turnout::testing::Options options;
  CLI::App app("Ranks that die at random steps of calls");
  app.add_option("--points", options.points, "Faults, one after the other")->check(CLI::PositiveNumber);
  app.add_option("--from", options.from, "Number of the first")->check(CLI::NonNegativeNumber);
  app.add_option("--seed", options.seed, "Of everything that is drawn");
  app.add_option("--job-program", options.job_program, "Program of the ranks on hosts that are cut off");
  app.add_option("--record", options.record, "File for a report");
  CLI11_PARSE(app, argc, argv);
  return turnout::testing::faults(options);
}
