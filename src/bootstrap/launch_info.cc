// One function per launcher, tried in the order of docs/launch.md; the innermost launcher of a nest comes first.
#include "bootstrap/launch_info.h"

#include <charconv>
#include <cstdlib>
#include <optional>
#include <utility>

#include "bootstrap/hmac.h"
#include "util/env.h"

namespace turnout {

namespace bootstrap {

namespace {

/// Typed access to launcher variables; TURNOUT_* come through the table in util/env.
class Variables {
 public:
  Variables(const Lookup& lookup, const util::Env& env) : turnout(env), lookup_(lookup) {}

  bool has(const char* name) const { return !text(name).empty(); }
  std::string text(const char* name) const {
    const char* value = lookup_(name);
    return value ? value : "";
  }
  std::optional<int> integer(const char* name, int least, int most) const {
    const std::string value = text(name);
    if (value.empty()) return std::nullopt;
    int n = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), n);
    if (error != std::errc() || end != value.data() + value.size() || n < least || n > most) {
      throw InvalidArgument(std::string(name) + " is '" + value + "', but must be an integer from " + std::to_string(least) + " to " +
                            std::to_string(most));
    }
    return n;
  }
  int required(const char* name, const char* because, int least = 0, int most = kMostRanks) const {
    const auto n = integer(name, least, most);
    if (!n) throw InvalidArgument(std::string(because) + " is set but " + name + " is not: export " + name + ", or unset " + because);
    return *n;
  }

  const util::Env& turnout;
  static constexpr int kMostRanks = 1 << 24;

 private:
  const Lookup& lookup_;
};

/// What a launcher said; `one_host` means that its variables prove it.
struct Found {
  LaunchInfo info;
  bool one_host = false;
  std::string root;  ///< of the launcher itself, where it names one
  std::string hint;  ///< how to pass a variable to every rank
};

Found found(const char* launcher, int rank, int num_ranks, int local_rank) {
  Found f;
  f.info.launcher = launcher;
  f.info.rank = rank;
  f.info.num_ranks = num_ranks;
  f.info.local_rank = local_rank;
  return f;
}

std::optional<Found> from_turnout(const Variables& v) {
  const util::Env& e = v.turnout;
  if (!e.rank && !e.num_ranks) return std::nullopt;
  if (!e.rank) throw InvalidArgument("TURNOUT_NUM_RANKS is set but TURNOUT_RANK is not: export both, or neither");
  if (!e.num_ranks) throw InvalidArgument("TURNOUT_RANK is set but TURNOUT_NUM_RANKS is not: export both, or neither");
  Found f = found("turnout", *e.rank, *e.num_ranks, e.local_rank.value_or(*e.rank));
  f.one_host = true;  // unless TURNOUT_ROOT or MASTER_ADDR says otherwise, and then they are used
  f.info.job = v.has("MASTER_PORT") ? "turnout-" + v.text("MASTER_PORT") : "turnout";
  return f;
}

std::optional<Found> from_torchrun(const Variables& v) {
  if (!v.has("RANK") || !v.has("WORLD_SIZE")) return std::nullopt;  // either alone: see refuse_half()
  const int rank = v.required("RANK", "WORLD_SIZE");
  const int num_ranks = v.required("WORLD_SIZE", "RANK", 1);
  Found f = found("torchrun", rank, num_ranks, v.integer("LOCAL_RANK", 0, Variables::kMostRanks).value_or(rank));
  f.one_host = v.integer("LOCAL_WORLD_SIZE", 1, Variables::kMostRanks).value_or(0) == f.info.num_ranks;
  f.hint = "export MASTER_ADDR=<host of rank 0> and MASTER_PORT";
  // A lone torchrun calls every run "none"; the port tells concurrent ones apart.
  f.info.job = "torchrun-" + v.text("TORCHELASTIC_RUN_ID") + "-" + v.text("MASTER_PORT");
  return f;
}

std::optional<Found> from_open_mpi(const Variables& v) {
  if (!v.has("OMPI_COMM_WORLD_RANK")) return std::nullopt;
  const int rank = v.required("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  const int num_ranks = v.required("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", 1);
  Found f = found("openmpi", rank, num_ranks, v.integer("OMPI_COMM_WORLD_LOCAL_RANK", 0, Variables::kMostRanks).value_or(rank));
  f.one_host = v.integer("OMPI_COMM_WORLD_LOCAL_SIZE", 1, Variables::kMostRanks).value_or(0) == f.info.num_ranks;
  f.hint = "mpirun -x TURNOUT_ROOT=<host of rank 0> -x TURNOUT_SECRET";
  const std::string job = v.text("PMIX_NAMESPACE");
  f.info.job = "openmpi-" + (job.empty() ? v.text("OMPI_MCA_ess_base_jobid") : job);
  return f;
}

std::optional<Found> from_mpich(const Variables& v) {
  if (!v.has("PMI_RANK")) return std::nullopt;
  const int rank = v.required("PMI_RANK", "PMI_SIZE");
  const int num_ranks = v.required("PMI_SIZE", "PMI_RANK", 1);
  const auto local = v.integer("MPI_LOCALRANKID", 0, Variables::kMostRanks);
  Found f = found("mpich", rank, num_ranks, local ? *local : v.integer("SLURM_LOCALID", 0, Variables::kMostRanks).value_or(rank));
  f.one_host = v.integer("MPI_LOCALNRANKS", 1, Variables::kMostRanks).value_or(0) == f.info.num_ranks;
  f.hint = "mpirun -genv TURNOUT_ROOT <host of rank 0> -genv TURNOUT_SECRET <secret>";
  f.info.job = "mpich-" + (v.has("PMI_JOBID") ? v.text("PMI_JOBID") : v.text("SLURM_JOB_ID"));
  return f;
}

std::optional<Found> from_slurm(const Variables& v) {
  // The batch script itself has SLURM_PROCID=0 and SLURM_NTASKS too, but it is not a task of a step: it runs alone.
  if (!v.has("SLURM_PROCID") || !(v.has("SLURM_STEP_ID") || v.has("SLURM_STEPID"))) return std::nullopt;
  const int rank = v.required("SLURM_PROCID", "SLURM_STEP_ID");
  const auto step_size = v.integer("SLURM_STEP_NUM_TASKS", 1, Variables::kMostRanks);
  const int num_ranks = step_size ? *step_size : v.required("SLURM_NTASKS", "SLURM_PROCID", 1);
  Found f = found("slurm", rank, num_ranks, v.integer("SLURM_LOCALID", 0, Variables::kMostRanks).value_or(rank));
  const auto step_nodes = v.integer("SLURM_STEP_NUM_NODES", 1, Variables::kMostRanks);
  f.one_host = (step_nodes ? step_nodes : v.integer("SLURM_NNODES", 1, Variables::kMostRanks)).value_or(0) == 1;
  f.root = first_host(v.text(v.has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_NODELIST"));
  if (f.root.empty()) f.root = v.text("SLURM_LAUNCH_NODE_IPADDR");
  f.hint = "export TURNOUT_ROOT=<host of rank 0> before srun";
  f.info.job = "slurm-" + v.text("SLURM_JOB_ID") + "." + v.text(v.has("SLURM_STEP_ID") ? "SLURM_STEP_ID" : "SLURM_STEPID");
  return f;
}

/// Without any launcher, half of what one says is a mistake: each such process would take itself for the whole job.
void refuse_half(const Variables& v) {
  constexpr std::pair<const char*, const char*> kPairs[] = {
      {"RANK", "WORLD_SIZE"}, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, {"PMI_RANK", "PMI_SIZE"}};
  for (const auto& [rank, size] : kPairs) {
    if (v.has(rank)) v.required(size, rank, 1);
    if (v.has(size)) v.required(rank, size);
  }
}

/// A port below Linux's ephemeral range, the same for all ranks of a job and most likely another one for another job.
int port_of_job(const std::string& job) {
  Sha256 hash;
  hash.update(bytes_of(job));
  const Digest digest = hash.finish();
  const int number = std::to_integer<int>(digest[0]) << 8 | std::to_integer<int>(digest[1]);
  return 20000 + number % 12000;
}

void complete(Found& f, const Variables& v) {
  LaunchInfo& info = f.info;
  if (info.rank >= info.num_ranks) {
    throw InvalidArgument("the environment of " + info.launcher + " says rank " + std::to_string(info.rank) + " of " +
                          std::to_string(info.num_ranks) + " ranks: ranks go from 0 to " + std::to_string(info.num_ranks - 1));
  }
  if (!v.turnout.job.empty()) info.job = v.turnout.job;
  const std::string master = v.text("MASTER_ADDR");
  info.root_address = !v.turnout.root.empty() ? v.turnout.root : !master.empty() ? master : f.one_host ? "127.0.0.1" : f.root;
  if (info.num_ranks == 1 && info.root_address.empty()) info.root_address = "127.0.0.1";
  if (info.root_address.empty()) {
    throw InvalidArgument("the environment of " + info.launcher +
                          " does not say where rank 0 runs, and nothing shows that all ranks share one host: " + f.hint);
  }
  if (info.root_address.size() > 2 && info.root_address.front() == '[' && info.root_address.back() == ']') {
    info.root_address = info.root_address.substr(1, info.root_address.size() - 2);
  }
  if (v.turnout.port) {
    info.port = *v.turnout.port;
  } else if (const auto master_port = v.integer("MASTER_PORT", 1, 65535)) {
    if (*master_port == 65535) throw InvalidArgument("MASTER_PORT is 65535, so MASTER_PORT + 1 is no port: export TURNOUT_PORT");
    info.port = *master_port + 1;
  } else {
    info.port = port_of_job(info.job);
  }
}

}  // namespace

const char* process_environment(const char* name) { return std::getenv(name); }  // NOLINT(concurrency-mt-unsafe)

std::string first_host(std::string_view list) {
  std::string host;
  for (size_t i = 0; i < list.size() && list[i] != ',';) {
    if (list[i] != '[') {
      host += list[i++];
      continue;
    }
    const size_t close = list.find(']', i);
    if (close == std::string_view::npos) return "";
    const std::string_view ranges = list.substr(i + 1, close - i - 1);
    host += ranges.substr(0, ranges.find_first_of("-,"));
    i = close + 1;
  }
  return host;
}

LaunchInfo launch_info(const Lookup& lookup) {
  const util::Env env = util::read_env(lookup);
  const Variables variables(lookup, env);
  for (auto* launcher : {from_turnout, from_torchrun, from_open_mpi, from_mpich, from_slurm}) {
    if (auto f = launcher(variables)) {
      complete(*f, variables);
      return f->info;
    }
  }
  refuse_half(variables);
  Found alone = found("none", 0, 1, 0);
  alone.info.job = "none";
  alone.info.root_address = "127.0.0.1";
  alone.info.port = port_of_job("none");
  return alone.info;
}

}  // namespace bootstrap

inline namespace v0 {
LaunchInfo launch_info_from_env() { return bootstrap::launch_info(bootstrap::process_environment); }
}  // namespace v0

}  // namespace turnout
