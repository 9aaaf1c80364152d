#include "tools/selftest.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <span>
#include <thread>

#include "api/communicator_impl.h"
#include "tools/measure.h"
#include "tools/self_launch.h"
#include "tools/selftest_cases.h"
#include "tools/selftest_table.h"
#include "transport/cuda.h"

namespace turnout::tools {

namespace {

/// What `auto` becomes here, and why it is not GPUs.
struct Chosen {
  std::string device, why_not_gpus;
};
Chosen choose_device(const std::string& device) {
  if (device != "auto") {
    check_device(device);
    return {device, ""};
  }
  try {
    check_device("cuda");
    if (transport::num_cuda_devices() > 0) return {"cuda", ""};
    return {"cpu", "there is no GPU"};
  } catch (const Error& e) {
    const std::string text = e.what(), prefix = "--device cuda: ";
    return {"cpu", text.starts_with(prefix) ? text.substr(prefix.size()) : text};
  }
}

std::vector<std::string> gather_words(Communicator& communicator, const std::string& mine) {
  std::vector<std::string> all;
  for (const auto& bytes : communicator.all_gather(std::as_bytes(std::span(mine.data(), mine.size())))) {
    all.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return all;
}

class Selftest {
 public:
  Selftest(Communicator& communicator, const SelftestOptions& options, const Chosen& chosen);
  int run();

 private:
  bool speaks() const { return communicator_.rank() == 0; }
  void introduce() const;
  void try_cases();
  bool try_case(const TestCase& c, bool corrupt);
  std::vector<BenchOptions> speed_shapes() const;
  void time_shapes();
  void judge(const ReportCase& c);
  void note(const std::string& name, bool good);
  void tell(const std::string& text) const;

  Communicator& communicator_;
  const SelftestOptions& options_;
  Chosen chosen_;
  std::FILE* out_;  ///< where people read: standard output may be the report's
  Where where_;
  Report report_ = new_report("turnout selftest");
  std::vector<TestCase> cases_;
  std::vector<bool> good_;
  std::shared_ptr<Flip> flip_;
};

Selftest::Selftest(Communicator& communicator, const SelftestOptions& options, const Chosen& chosen)
    : communicator_(communicator), options_(options), chosen_(chosen), out_(options.json == "-" ? stderr : stdout) {
  // GPUs, where all ranks have them: those of other machines may not.
  const auto reasons = gather_words(communicator, chosen.why_not_gpus);
  const auto lacks = std::find_if(reasons.begin(), reasons.end(), [](const std::string& why) { return !why.empty(); });
  if (lacks != reasons.end()) {
    const bool all = std::count(reasons.begin(), reasons.end(), *lacks) == std::ssize(reasons);
    chosen_ = {"cpu", (all ? "" : "rank " + std::to_string(lacks - reasons.begin()) + ": ") + *lacks};
  }
  where_.device = device_of(device_from(chosen_.device), communicator);
  where_.gpus = gather_gpus(communicator, where_.device);
  report_.host.gpu = where_.gpus.summary();
  cases_ = all_test_cases(where_.device.kind == DeviceKind::cuda);
  if (options.corrupt && where_.device.kind == DeviceKind::cpu && communicator.num_ranks() > 1) {
    flip_ = std::make_shared<Flip>();
    communicator.impl()->transport = with_flip(communicator.impl()->transport, flip_);
  }
}

void Selftest::introduce() const {
  if (!speaks()) return;
  const std::string on = where_.gpus.words.empty() ? report_.host.cpu : where_.gpus.summary();
  std::fprintf(out_, "turnout %s selftest: %d ranks (%s) on %s\n", std::string(version()).c_str(), communicator_.num_ranks(),
               std::string(communicator_.transport()).c_str(), on.c_str());
  if (!chosen_.why_not_gpus.empty()) std::fprintf(out_, "GPUs are not used: %s\n", chosen_.why_not_gpus.c_str());
  std::fflush(out_);
}

/// A step that was taken, where there is no terminal to draw a bar on.
void Selftest::tell(const std::string& text) const {
  if (!speaks() || isatty(STDERR_FILENO)) return;
  std::fprintf(stderr, "selftest: %s\n", text.c_str());
}

void Selftest::note(const std::string& name, bool good) {
  ++(good ? report_.tests.passed : report_.tests.failed);
  report_.tests.names.push_back(name + (good ? ": passed" : ": failed"));
}

/// Whether it was right on all ranks; the first difference is printed.
bool Selftest::try_case(const TestCase& c, bool corrupt) {
  std::string text;
  try {
    text = run_test_case(communicator_, c, where_.device, corrupt ? flip_.get() : nullptr, corrupt && !flip_);
  } catch (const InvalidArgument& e) {
    text = e.what();  // on all ranks
  } catch (const std::exception&) {
    std::fprintf(stderr, "selftest: rank %d: %s:\n", communicator_.rank(), c.to_string().c_str());
    throw;
  }
  const auto all = gather_words(communicator_, text);
  const auto wrong = std::find_if(all.begin(), all.end(), [](const std::string& words) { return !words.empty(); });
  const bool good = wrong == all.end();
  if (speaks() && !good) {
    std::fprintf(out_, "FAILED %s: rank %ld: %s\n", c.to_string().c_str(), static_cast<long>(wrong - all.begin()), wrong->c_str());
  }
  if (speaks() && good && options_.verbose) std::fprintf(out_, "ok     %s\n", c.to_string().c_str());
  return good;
}

void Selftest::try_cases() {
  Progress progress("selftest", static_cast<int64_t>(cases_.size()), speaks());
  for (size_t i = 0; i < cases_.size(); ++i) {
    good_.push_back(try_case(cases_[i], options_.corrupt && i == 0));
    note(cases_[i].to_string(), good_.back());
    progress.at(static_cast<int64_t>(i) + 1);
    const bool ends_group = i + 1 == cases_.size() || cases_[i + 1].mode != cases_[i].mode || cases_[i + 1].layout != cases_[i].layout;
    if (!ends_group) continue;
    tell(std::string(name(cases_[i].mode)) + ", " + std::string(name(cases_[i].layout)) + ": " + std::to_string(i + 1) + " of " +
         std::to_string(cases_.size()) + " cases done");
  }
  if (!flip_) return;
  const auto flipped = gather_words(communicator_, flip_->done ? "x" : "");
  if (std::count(flipped.begin(), flipped.end(), "x") != 1) throw TransportError("--corrupt: no message held the row that was to be changed");
}

std::vector<BenchOptions> Selftest::speed_shapes() const {
  const bool on_gpu = where_.device.kind == DeviceKind::cuda;
  BenchOptions large, small;
  for (BenchOptions* o : {&large, &small}) o->device = chosen_.device, o->seconds = options_.seconds;
  // All rows of a machine fit into its memory, however many ranks it has.
  large.tokens = on_gpu ? 4096 : std::clamp(4096 / communicator_.num_ranks(), 16, 512);
  large.mode = "throughput";
  small.mode = "low_latency", small.layout = "expert_slab", small.size = "capacity";
  small.tokens = on_gpu ? 128 : 16;
  if (!on_gpu) return {large, small};
  large.size = "capacity";
  small.dtype = "fp8";
  BenchOptions by_expert = large, graph = small;
  by_expert.layout = "expert_major", by_expert.dtype = "fp8";
  graph.launch = "graph";
  return {large, by_expert, small, graph};
}

void Selftest::time_shapes() {
  if (options_.seconds == 0) return;
  const std::vector<BenchOptions> shapes = speed_shapes();
  for (const BenchOptions& shape : shapes) {
    const Plan plan = plan_of_ranks(shape, communicator_.num_ranks());
    const std::string name = "speed: " + shape.mode + ", " + shape.layout + ", " + std::to_string(shape.tokens) + " tokens, " + shape.launch;
    tell(name);
    const auto wrong = gather_words(communicator_, verify_small(communicator_, where_, plan, shape, nullptr));
    const bool good = std::all_of(wrong.begin(), wrong.end(), [](const std::string& words) { return words.empty(); });
    if (!good) {
      for (size_t r = 0; speaks() && r < wrong.size(); ++r) {
        if (!wrong[r].empty()) std::fprintf(out_, "FAILED %s: rank %zu: %s\n", name.c_str(), r, wrong[r].c_str());
      }
      note(name, false);
      continue;
    }
    const size_t before = report_.cases.size();
    time_calls(communicator_, where_, plan, shape, report_);
    for (size_t i = before; i < report_.cases.size(); ++i) judge(report_.cases[i]);
  }
}

/// Small calls are bound by latency and may take many times the limit of their bytes.
void Selftest::judge(const ReportCase& c) {
  const bool slow = options_.max_ratio > 0 && c.mode == "throughput" && c.ratio() && *c.ratio() > options_.max_ratio;
  if (slow && speaks()) {
    std::fprintf(out_, "FAILED speed: %s of %ld tokens, %s: %.1f us are %.2f times the limit, --max-ratio %g\n", c.op.c_str(),
                 static_cast<long>(c.tokens), c.layout.c_str(), *c.p50_us, *c.ratio(), options_.max_ratio);
  }
  note("speed: " + c.op + ", " + c.mode + ", " + c.layout + ", " + std::to_string(c.tokens) + " tokens, " + c.launch, !slow);
}

int Selftest::run() {
  introduce();
  try_cases();
  if (report_.tests.failed == 0) time_shapes();
  // Every rank has judged by its own clock, and all say what rank 0 says.
  const int failed = std::stoi(gather_words(communicator_, std::to_string(report_.tests.failed))[0]);
  if (speaks()) {
    print_correctness(out_, cases_, good_);
    print_speed(out_, report_);
    if (options_.corrupt) {
      std::fprintf(out_, "\nOne bit of a row was changed %s (--corrupt): this must fail.\n",
                   flip_ ? "on its way to another rank" : "where it arrived");
    }
    const std::string on = where_.gpus.words.empty() ? "" : " on " + where_.gpus.summary();
    std::fprintf(out_, "\n%s: %d ranks (%s)%s: %d passed, %d failed\n", failed ? "FAIL" : "PASS", communicator_.num_ranks(),
                 std::string(communicator_.transport()).c_str(), on.c_str(), report_.tests.passed, report_.tests.failed);
    if (options_.json) write_report(report_, *options_.json);
  }
  return failed ? 1 : 0;
}

}  // namespace

int run_selftest(const SelftestOptions& options) {
  const bool launched = launch_info_from_env().launcher != "none";
  check_writable(options.json);
  const Chosen chosen = choose_device(options.device);
  const int gpus = device_from(chosen.device).kind == DeviceKind::cuda ? transport::num_cuda_devices() : 0;
  const bool shares = gpus == 1 || device_from(chosen.device).index;
  const std::string placement = !options.placement.empty() ? options.placement : shares ? "threads" : "processes";
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const int ranks = options.ranks > 0 ? options.ranks : gpus > 1 && !shares ? std::min(gpus, kMostRanks) : gpus > 0 ? 2 : std::clamp(cores, 2, 4);
  if (!launched) check_transport(options.transport, placement, ranks);
  CommunicatorOptions communicator;
  communicator.transport = options.transport;
  return run_ranks(
      ranks, placement_from(placement), options.command_line, [&](Communicator& c) { return Selftest(c, options, chosen).run(); }, communicator);
}

}  // namespace turnout::tools
