// The command: parse, call src/tools, print what went wrong.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "tools/about.h"
#include "tools/bench.h"
#include "tools/demo.h"
#include "tools/environment.h"
#include "tools/launch.h"
#include "tools/models.h"
#include "tools/selftest.h"
#include "turnout/communicator.h"
#include "turnout/error.h"

namespace {

using namespace turnout;

void add_bench(CLI::App& app, tools::BenchOptions& o) {
  CLI::App* c = app.add_subcommand("bench", "Verify a shape against the reference, then time it beside its limit");
  c->add_option("-n,--ranks", o.ranks, "Ranks, when not under a launcher")->capture_default_str();
  c->add_option("--placement", o.placement, "processes or threads")->capture_default_str();
  c->add_option("--model", o.model, "Shape of a published model: " + tools::model_names());
  c->add_option("--tokens", o.tokens, "Tokens per rank")->capture_default_str()->check(CLI::NonNegativeNumber);
  c->add_option("--hidden", o.hidden, "Elements of a row")->capture_default_str()->check(CLI::PositiveNumber);
  c->add_option("--top-k", o.topk, "Experts per token")->capture_default_str()->check(CLI::PositiveNumber);
  c->add_option("--experts", o.experts, "Experts")->capture_default_str()->check(CLI::PositiveNumber);
  c->add_option("--dtype", o.dtype, "bf16, fp16, fp32, fp64; fp8, fp8-ue8m0: bf16 quantised on its way")->capture_default_str();
  c->add_option("--mode", o.mode, "auto, throughput, low_latency")->capture_default_str();
  c->add_option("--layout", o.layout, "rank_major, expert_major, expert_slab")->capture_default_str();
  c->add_option("--op", o.op, "dispatch, combine, both")->capture_default_str();
  c->add_option("--size", o.size, "exact, capacity")->capture_default_str();
  c->add_option("--capacity", o.capacity, "Rows per rank (slab: per expert) with --size capacity; default: as many as arrive");
  c->add_option("--result", o.result, "lease, fresh")->capture_default_str();
  c->add_option("--wire", o.wire, "payload, fp32, fp8, rows")->capture_default_str();
  c->add_option("--routing", o.routing, "uniform, zipf:S, one-expert, text:FILE, FILE.npy")->capture_default_str();
  c->add_option("--seed", o.seed, "Of the routing and the rows")->capture_default_str();
  o.num_threads = tools::default_num_threads();
  c->add_option("--num-threads", o.num_threads, "Threads that move rows, per rank")->capture_default_str()->check(CLI::PositiveNumber);
  CLI::Option* iterations = c->add_option("--iters", o.iterations, "Timed calls of each operation")->check(CLI::PositiveNumber);
  c->add_option("--seconds", o.seconds, "Time for each operation")->capture_default_str()->excludes(iterations);
  c->add_option("--transport", o.transport, "auto, shm, inproc")->capture_default_str();
  c->add_option("--json", o.json, "Write the report here (- is standard output)");
}

void add_demo(CLI::App& app, tools::DemoOptions& o) {
  CLI::App* c = app.add_subcommand("demo", "A Mixture-of-Experts layer on the words of a text, over several ranks, checked");
  c->add_option("-n,--ranks", o.ranks, "Ranks, when not under a launcher")->capture_default_str();
  c->add_option("--placement", o.placement, "processes or threads")->capture_default_str();
  c->add_option("--text", o.text, "Text to read (default: one that Debian ships, else README.md)");
  c->add_option("--wire", o.wire, "rows (compared bit for bit), payload, fp32, fp8 (compared within a tolerance)")->capture_default_str();
  c->add_option("--dtype", o.dtype, "bf16, fp32")->capture_default_str();
  c->add_option("--mode", o.mode, "auto, throughput, low_latency")->capture_default_str();
  c->add_flag("--corrupt", o.corrupt, "Flip one bit of a row on its way: the comparison must fail");
}

void add_selftest(CLI::App& app, tools::SelftestOptions& o) {
  CLI::App* c = app.add_subcommand("selftest", "Every mode, layout, size and wire against the reference, on small shapes");
  c->add_option("-n,--ranks", o.ranks, "Ranks, when not under a launcher")->capture_default_str();
  c->add_option("--placement", o.placement, "processes or threads")->capture_default_str();
  c->add_option("--transport", o.transport, "auto, shm, inproc")->capture_default_str();
  c->add_option("--json", o.json, "Write the report here (- is standard output)");
  c->add_flag("-v,--verbose", o.verbose, "Name every case");
}

void add_launch(CLI::App& app, tools::LaunchOptions& o) {
  CLI::App* c = app.add_subcommand("launch", "Start a program once per rank on this machine: turnout launch -n N -- PROGRAM ...");
  c->add_option("-n,--ranks", o.num_ranks, "Ranks")->required()->check(CLI::PositiveNumber);
  c->add_flag("--tag", o.tag, "Begin every line of output with its rank");
  c->add_option("--timeout", o.timeout_s, "End the job after this many seconds")->check(CLI::PositiveNumber);
  c->add_option("program", o.command, "Program and its arguments, after --")->required();
}

int run(int argc, char** argv) {
  CLI::App app("Turnout: dispatch and combine for Mixture-of-Experts models");
  app.require_subcommand(1);
  tools::BenchOptions bench;
  tools::DemoOptions demo;
  tools::SelftestOptions selftest;
  tools::LaunchOptions launch;
  add_launch(app, launch);
  add_bench(app, bench);
  add_demo(app, demo);
  add_selftest(app, selftest);
  app.add_subcommand("version", "Print the version");
  CLI11_PARSE(app, argc, argv);

  const std::vector<std::string> arguments(argv + 1, argv + argc);
  bench.arguments = demo.arguments = selftest.arguments = arguments;
  if (app.got_subcommand("launch")) return tools::run_launch(launch);
  if (app.got_subcommand("bench")) return tools::run_bench(bench);
  if (app.got_subcommand("demo")) return tools::run_demo(demo);
  if (app.got_subcommand("selftest")) return tools::run_selftest(selftest);
  std::printf("%s", tools::about().c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const turnout::InvalidArgument& e) {
    std::fprintf(stderr, "turnout: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "turnout: %s\n", e.what());
    return 3;
  }
}
