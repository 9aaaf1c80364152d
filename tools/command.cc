// The command: parse, call src/tools, print what went wrong.
#include "tools/command.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "tools/about.h"
#include "tools/bench.h"
#include "tools/demo.h"
#include "tools/environment.h"
#include "tools/launch.h"
#include "tools/models.h"
#include "tools/self_launch.h"
#include "tools/selftest.h"
#include "turnout/communicator.h"
#include "turnout/config.h"
#include "turnout/error.h"

namespace {

using namespace turnout;

/// Whole numbers only, told in the option's words: the parser would wrap -1 and cut 99999999999.
template <class T>
CLI::Option* whole(CLI::App* c, const std::string& name, T& value, int64_t least, int64_t most, const std::string& help) {
  return c->add_option(name, value, help)->check([least, most](const std::string& text) {
    int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const bool good = error == std::errc() && end == text.data() + text.size() && number >= least && number <= most;
    return good ? std::string() : "it is " + text + ", but must be a whole number from " + std::to_string(least) + " to " + std::to_string(most);
  });
}

CLI::Option* seconds(CLI::App* c, const std::string& name, double& value, double least, double most, const std::string& help) {
  return c->add_option(name, value, help)->check([least, most](const std::string& text) {
    double number = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const bool good = error == std::errc() && end == text.data() + text.size() && number >= least && number <= most;
    return good ? std::string()
                : "it is " + text + ", but must be a number of seconds from " + CLI::detail::to_string(least) + " to " + CLI::detail::to_string(most);
  });
}

void add_device(CLI::App* c, std::string& device) {
  c->add_option("--device", device, "cpu; cuda (rank r on GPU r modulo their number), cuda:N")->capture_default_str();
}

constexpr const char* kRanksHelp = "Ranks, when not under a launcher";

void add_bench(CLI::App& app, tools::BenchOptions& o) {
  CLI::App* c = app.add_subcommand("bench", "Verify a shape against the reference, then time it beside its limit");
  whole(c, "-n,--ranks", o.ranks, 1, tools::kMostRanks, kRanksHelp)->capture_default_str();
  c->add_option("--placement", o.placement, "processes or threads")->capture_default_str();
  CLI::Option* model = c->add_option("--model", o.model, "Shape of a published model: " + tools::model_names());
  whole(c, "--tokens", o.tokens, 0, INT32_MAX - 1, "Tokens per rank")->capture_default_str();
  whole(c, "--hidden", o.hidden, 1, 1 << 24, "Elements of a row")->capture_default_str()->excludes(model);
  whole(c, "--top-k", o.topk, 1, kMaxTopk, "Experts per token")->capture_default_str()->excludes(model);
  whole(c, "--experts", o.experts, 1, 1 << 20, "Experts")->capture_default_str()->excludes(model);
  c->add_option("--dtype", o.dtype, "bf16, fp16, fp32, fp64; fp8, fp8-ue8m0: bf16 quantised on its way")->capture_default_str();
  c->add_option("--mode", o.mode, "auto, throughput, low_latency")->capture_default_str();
  c->add_option("--layout", o.layout, "rank_major, expert_major, expert_slab")->capture_default_str();
  c->add_option("--op", o.op, "dispatch, combine, both; construct: making a Buffer")->capture_default_str();
  whole(c, "--arena-mib", o.arena_mib, 1, 1 << 20, "With --op construct: symmetric memory per rank")->capture_default_str();
  c->add_option("--size", o.size, "exact, capacity")->capture_default_str();
  whole(c, "--capacity", o.capacity, 0, INT32_MAX, "Rows per rank (slab: per expert) with --size capacity; default: as many as arrive");
  c->add_option("--result", o.result, "lease, fresh")->capture_default_str();
  c->add_option("--wire", o.wire, "payload, fp32, fp8, rows")->capture_default_str();
  c->add_option("--routing", o.routing, "uniform, zipf:S, one-expert, text:FILE, FILE.npy")->capture_default_str();
  whole(c, "--seed", o.seed, 0, INT64_MAX, "Of the routing and the rows")->capture_default_str();
  add_device(c, o.device);
  c->add_option("--launch", o.launch, "eager; graph: calls on a GPU are captured and replayed")->capture_default_str();
  whole(c, "--num-sms", o.num_sms, 1, 1024, "Multiprocessors that a call on a GPU takes; default: as many as it gains from");
  o.num_threads = tools::default_num_threads();
  whole(c, "--num-threads", o.num_threads, 1, 256, "Threads that move rows, per rank")->capture_default_str();
  CLI::Option* iterations = whole(c, "--iters", o.iterations, 1, 1'000'000, "Timed calls of each operation");
  seconds(c, "--seconds", o.seconds, 0, 3600, "Time for each operation")->capture_default_str()->excludes(iterations);
  c->add_option("--transport", o.transport, "auto, shm, inproc")->capture_default_str();
  c->add_option("--json", o.json, "Write the report here (- is standard output)");
}

void add_demo(CLI::App& app, tools::DemoOptions& o) {
  CLI::App* c = app.add_subcommand("demo", "A Mixture-of-Experts layer on the words of a text, over several ranks, checked");
  whole(c, "-n,--ranks", o.ranks, 1, tools::kMostRanks, kRanksHelp)->capture_default_str();
  c->add_option("--placement", o.placement, "processes or threads")->capture_default_str();
  c->add_option("--text", o.text, "Text to read (default: one that Debian ships, else README.md)");
  c->add_option("--wire", o.wire, "rows (compared bit for bit), payload, fp32, fp8 (compared within a tolerance)")->capture_default_str();
  c->add_option("--dtype", o.dtype, "bf16, fp32")->capture_default_str();
  c->add_option("--mode", o.mode, "auto, throughput, low_latency")->capture_default_str();
  add_device(c, o.device);
  c->add_flag("--corrupt", o.corrupt, "Flip one bit of a row on its way: the comparison must fail");
}

void add_selftest(CLI::App& app, tools::SelftestOptions& o) {
  CLI::App* c =
      app.add_subcommand("selftest", "Every mode, layout, size, dtype, wire and way to call against the reference, then speed beside its limit");
  whole(c, "-n,--ranks", o.ranks, 1, tools::kMostRanks, std::string(kRanksHelp) + "; default: one per GPU, or 2 to 4 on a CPU");
  c->add_option("--placement", o.placement, "processes or threads; default: processes, or threads where all share a GPU");
  c->add_option("--transport", o.transport, "auto, shm, inproc")->capture_default_str();
  c->add_option("--device", o.device, "auto: GPUs where all ranks have them, else cpu; cpu; cuda (rank r on GPU r modulo their number), cuda:N")
      ->capture_default_str();
  seconds(c, "--seconds", o.seconds, 0, 60, "Time for each operation that is timed; 0: none is")->capture_default_str();
  c->add_option("--max-ratio", o.max_ratio, "Fail where a throughput call takes more than this many times its limit; default: never")
      ->check(CLI::PositiveNumber);
  c->add_flag("--corrupt", o.corrupt, "Change one bit of a row on its way: the comparison must fail");
  c->add_option("--json", o.json, "Write the report here (- is standard output)");
  c->add_flag("-v,--verbose", o.verbose, "Name every case");
}

void add_launch(CLI::App& app, tools::LaunchOptions& o) {
  CLI::App* c = app.add_subcommand("launch", "Start a program once per rank on this machine: turnout launch -n N -- PROGRAM ...");
  whole(c, "-n,--ranks", o.num_ranks, 1, 4096, "Ranks")->required();
  c->add_flag("--tag", o.tag, "Begin every line of output with its rank");
  seconds(c, "--timeout", o.timeout_s, 0.001, 1e7, "End the job after this many seconds");
  c->add_option("program", o.command, "Program and its arguments, after --")->required();
}

/// -1 if a command is to run, else the exit status: of --help, or 2 for a mistake, told in one line with where to read on.
int parse(CLI::App& app, int argc, char** argv) {
  std::string command;
  try {
    if (argc > 1 && argv[1][0] != '-') {
      command = argv[1];
      const auto named = app.get_subcommands([&](const CLI::App* c) { return c->get_name() == command; });
      if (named.empty()) throw InvalidArgument("there is no command '" + command + "'");
    }
    app.parse(argc, argv);
    return -1;
  } catch (const CLI::Success& e) {
    return app.exit(e);
  } catch (const CLI::ExtrasError& e) {
    const char* hint = command == "launch" ? "; write -- before the program" : "";
    std::fprintf(stderr, "turnout %s: %s%s\n", command.c_str(), e.what(), hint);
  } catch (const CLI::ParseError& e) {
    std::fprintf(stderr, "turnout%s: %s\n", (command.empty() ? "" : " " + command).c_str(), e.what());
  } catch (const InvalidArgument& e) {
    std::fprintf(stderr, "turnout: %s\n", e.what());
    command.clear();
  }
  std::fprintf(stderr, "`turnout%s --help` lists what there is.\n", (command.empty() ? "" : " " + command).c_str());
  return 2;
}

/// Under a launcher how many ranks there are, and where, is the launcher's to say.
void check_launched(const CLI::App& c, const tools::BenchOptions& bench, const tools::DemoOptions& demo, const tools::SelftestOptions& selftest) {
  if (c.get_name() == "version") return;
  const LaunchInfo info = launch_info_from_env();
  if (info.launcher == "none") return;
  const auto of = [&](const auto& b, const auto& d, const auto& s) { return c.get_name() == "bench" ? b : c.get_name() == "demo" ? d : s; };
  const int ranks = of(bench.ranks, demo.ranks, selftest.ranks);
  const std::string where = "this is one of the " + std::to_string(info.num_ranks) + " ranks that " +
                            (info.launcher == "turnout" ? "turnout launch" : info.launcher) + " has started";
  if (c.count("--ranks") > 0 && ranks != info.num_ranks) {
    throw InvalidArgument("--ranks " + std::to_string(ranks) + ": " + where + "; leave --ranks out, or start without a launcher");
  }
  if (c.count("--placement") > 0 && of(bench.placement, demo.placement, selftest.placement) == "threads") {
    throw InvalidArgument("--placement threads: " + where + " as processes; leave --placement out, or start without a launcher");
  }
}

/// What was printed may still lie in the stream: only now is it known whether it could be written.
int with_output_written(int status) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  std::fprintf(stderr, "turnout: the output cannot be written\n");
  return status == 0 ? 3 : status;
}

int run(int argc, char** argv, std::vector<std::string> program) {
  CLI::App app("Turnout: dispatch and combine for Mixture-of-Experts models");
  app.require_subcommand(1);
  app.set_version_flag("--version", "turnout " + std::string(version()));
  tools::BenchOptions bench;
  tools::DemoOptions demo;
  tools::SelftestOptions selftest;
  tools::LaunchOptions launch;
  add_launch(app, launch);
  add_bench(app, bench);
  add_demo(app, demo);
  add_selftest(app, selftest);
  app.add_subcommand("version", "Print the version");
  if (const int status = parse(app, argc, argv); status >= 0) return status;

  const tools::CommandLine command_line{std::move(program), {argv + 1, argv + argc}};
  bench.command_line = demo.command_line = selftest.command_line = command_line;
  if (demo.text.empty() && app.get_subcommand("demo")->count("--text") > 0) throw InvalidArgument("--text needs the name of a file");
  if (!app.got_subcommand("launch")) check_launched(*app.get_subcommands().front(), bench, demo, selftest);
  if (app.got_subcommand("launch")) return tools::run_launch(launch);
  if (app.got_subcommand("bench")) return tools::run_bench(bench);
  if (app.got_subcommand("demo")) return tools::run_demo(demo);
  if (app.got_subcommand("selftest")) return tools::run_selftest(selftest);
  std::printf("%s", tools::about().c_str());
  return 0;
}

}  // namespace

namespace turnout::tools {

int main_of(int argc, char** argv, std::vector<std::string> program) {
  try {
    return with_output_written(run(argc, argv, std::move(program)));
  } catch (const InvalidArgument& e) {
    std::fprintf(stderr, "turnout: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "turnout: %s\n", e.what());
    return 3;
  }
}

}  // namespace turnout::tools
