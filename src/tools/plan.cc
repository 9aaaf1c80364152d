#include "tools/plan.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "tools/construct.h"
#include "tools/gpus.h"
#include "tools/models.h"
#include "tools/self_launch.h"

namespace turnout::tools {

namespace {

/// `--option value: it must be LEAST to MOST`
void in_range(const char* option, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  throw InvalidArgument("--" + std::string(option) + " " + std::to_string(value) + ": it must be " + std::to_string(least) + " to " +
                        std::to_string(most));
}

void one_of(const char* option, const std::string& value, std::initializer_list<const char*> words) {
  std::string known;
  for (const char* word : words) {
    if (value == word) return;
    known += (known.empty() ? "" : ", ") + std::string(word);
  }
  throw InvalidArgument("--" + std::string(option) + " " + value + " is unknown: use one of " + known);
}

/// Bytes that programs may still take without swapping; 0 if the system does not say.
size_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  for (size_t kib = 0; file >> key >> kib; file.ignore(256, '\n')) {
    if (key == "MemAvailable:") return kib * 1024;
  }
  return 0;
}

void take_model(const BenchOptions& o, ProblemSpec& s) {
  s.num_experts = o.experts, s.topk = o.topk, s.hidden = o.hidden;
  if (!o.model) return;
  const auto model = find_model(*o.model);
  if (!model) throw InvalidArgument("--model " + *o.model + " is unknown: use one of " + model_names());
  s.num_experts = model->num_experts, s.topk = model->topk, s.hidden = model->hidden;
}

void take_dtype(const std::string& dtype, ProblemSpec& s) {
  one_of("dtype", dtype, {"bf16", "fp16", "fp32", "fp64", "fp8", "fp8-ue8m0"});
  if (dtype == "fp8") s.quantize = Quantize::fp8_e4m3;
  else if (dtype == "fp8-ue8m0") s.quantize = Quantize::fp8_e4m3_ue8m0;
  else if (dtype == "fp16") s.dtype = DType::fp16;
  else if (dtype == "fp32") s.dtype = DType::fp32;
  else if (dtype == "fp64") s.dtype = DType::fp64;
}

void check_numbers(const BenchOptions& o, const ProblemSpec& s, int num_ranks) {
  in_range("ranks", num_ranks, 1, kMostRanks);
  in_range("tokens", o.tokens, 0, INT32_MAX / num_ranks - 1);
  in_range("hidden", s.hidden, 1, int64_t{1} << 24);
  in_range("top-k", s.topk, 1, kMaxTopk);
  in_range("experts", s.num_experts, 1, 1 << 20);
  in_range("num-threads", o.num_threads, 1, 256);
  if (!(o.seconds >= 0 && o.seconds <= 3600)) throw InvalidArgument("--seconds " + std::to_string(o.seconds) + ": it must be 0 to 3600");
}

void take_device(const BenchOptions& o, Plan& plan) {
  const bool on_gpu = device_from(o.device).kind == DeviceKind::cuda;
  one_of("launch", o.launch, {"eager", "graph"});
  plan.graph = o.launch == "graph";
  if (plan.graph && !on_gpu) throw InvalidArgument("--launch graph needs --device cuda");
  if (plan.graph && o.size == "exact") throw InvalidArgument("--launch graph needs --size capacity: with an exact size the host waits for counts");
  if (plan.graph && plan.construct) throw InvalidArgument("--launch graph does not go with --op construct");
}

}  // namespace

Plan plan_of(const BenchOptions& o, int num_ranks) {
  Plan plan;
  ProblemSpec& s = plan.spec;
  take_model(o, s);
  check_numbers(o, s, num_ranks);
  s.tokens.assign(static_cast<size_t>(num_ranks), o.tokens);
  s.routing = o.routing, s.seed = o.seed;
  s.layout = layout_from(o.layout);
  plan.mode = mode_from(o.mode);
  plan.wire = wire_from(o.wire);
  take_dtype(o.dtype, s);
  one_of("op", o.op, {"both", "dispatch", "combine", "construct"});
  plan.construct = o.op == "construct";
  plan.dispatch = o.op == "both" || o.op == "dispatch";
  plan.combine = o.op == "both" || o.op == "combine";
  one_of("result", o.result, {"lease", "fresh"});
  // Insisting on a lease would make ranks wait for each other's verdicts, which users of the default do not.
  plan.result = o.result == "lease" ? ResultKind::automatic : ResultKind::fresh;
  one_of("size", o.size, {"exact", "capacity"});
  const bool exact = o.size == "exact";
  if (s.layout != Layout::rank_major) plan.apply = CombineWeights::source;
  else if (plan.wire == Wire::rows) throw InvalidArgument("--wire rows needs --layout expert_major or expert_slab: rank_major rows are sums already");
  if (s.layout == Layout::expert_slab && exact) throw InvalidArgument("--layout expert_slab needs --size capacity");
  if (o.capacity && exact) throw InvalidArgument("--capacity " + std::to_string(*o.capacity) + " needs --size capacity");
  take_device(o, plan);
  if (o.capacity) in_range("capacity", *o.capacity, 0, INT32_MAX);
  if (o.capacity) s.capacity = *o.capacity;
  check_routing({.source = s.routing, .num_experts = s.num_experts, .topk = s.topk, .num_tokens = o.tokens, .seed = s.seed});
  return plan;
}

void check_memory(double wanted, const std::string& what, const std::string& instead) {
  const size_t there = available_memory();
  if (there == 0 || wanted <= static_cast<double>(there)) return;
  throw InvalidArgument(what + " needs about " + std::to_string(static_cast<int64_t>(std::ceil(wanted / 0x1p30))) +
                        " GiB on this machine, which has " + std::to_string(there >> 30) + " GiB left: use " + instead);
}

void check_writable(const std::optional<std::string>& wanted) {
  if (!wanted || *wanted == "-") return;
  const std::string& path = *wanted;
  if (path.empty()) throw InvalidArgument("--json needs the name of a file, or - for standard output");
  const std::filesystem::path file(path);
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
  std::error_code ignored;
  const bool there = std::filesystem::exists(file, ignored);
  if (std::filesystem::is_directory(file, ignored)) throw InvalidArgument("--json " + path + " is a folder: name a file");
  if (access(there ? file.c_str() : folder.c_str(), W_OK) != 0) {
    throw InvalidArgument("--json " + path + " cannot be written: " + std::strerror(errno));
  }
}

void check_transport(const std::string& transport, const std::string& placement, int num_ranks) {
  one_of("transport", transport, {"auto", "shm", "inproc"});
  if (transport == "inproc" && num_ranks > 1 && placement_from(placement) == Placement::processes) {
    throw InvalidArgument("--transport inproc needs --placement threads: it reaches the threads of one process");
  }
}

void check_resources(const BenchOptions& o, const Plan& plan, int num_local) {
  check_writable(o.json);
  if (plan.construct) {
    // Which GPU makes no difference to the size.
    construct_config(plan, o, plan.spec.num_ranks(), {device_from(o.device).kind, 0});
    return;
  }
  // x twice, the sums, what arrives twice (two results), expert output, and the arena of the limit: about eight of the rows of all ranks.
  // With GPUs x, and expert output once: the rest is in their memory.
  const auto& s = plan.spec;
  const bool on_gpu = device_from(o.device).kind == DeviceKind::cuda;
  const double spread = std::min({static_cast<double>(s.topk), static_cast<double>(s.num_ranks()), static_cast<double>(s.num_experts)});
  const double copies = s.layout == Layout::rank_major ? spread : static_cast<double>(std::min(s.topk, s.num_experts));
  double wanted = static_cast<double>(o.tokens) * static_cast<double>(s.hidden) * static_cast<double>(size_of(s.dtype)) *
                  (on_gpu ? 2 + copies : 3 + 4 * copies) * num_local;
  if (o.capacity && !on_gpu) {
    const double places =
        s.layout == Layout::expert_slab ? static_cast<double>(*o.capacity) * s.num_experts / s.num_ranks() : static_cast<double>(*o.capacity);
    wanted = std::max(wanted, places * static_cast<double>(s.hidden) * static_cast<double>(size_of(s.dtype)) * 4 * num_local);
  }
  check_memory(wanted, "this shape", "fewer --tokens, --ranks or a smaller --hidden or --capacity");
}

}  // namespace turnout::tools
