// The table, and typed readers that say what is wrong with a value.
#include "util/env.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <numeric>

extern "C" char** environ;  // NOLINT: POSIX gives the environment no other name

namespace turnout::util {

/// The text of one variable, and what can be made of it. Empty: the variable is absent.
class EnvValue {
 public:
  /// `name`: the variable that it is of, the row's own or its alias.
  EnvValue(const EnvVariable& row, std::string_view name, std::string text) : row_(row), name_(name), text_(std::move(text)) {}

  const std::string& text() const { return text_; }

  template <class T>
  std::optional<T> integer(T least, T most = std::numeric_limits<T>::max()) const {
    if (text_.empty()) return std::nullopt;
    T n = 0;
    const char* last = text_.data() + text_.size();
    const auto [end, error] = std::from_chars(text_.data(), last, n);
    if (error == std::errc() && end == last && n >= least && n <= most) return n;
    throw wrong(most == std::numeric_limits<T>::max() ? fmt::format("an integer of at least {}", least)
                                                      : fmt::format("an integer from {} to {}", least, most));
  }
  int64_t milliseconds() const {
    constexpr int64_t kYear = int64_t{1000} * 3600 * 24 * 365;
    const EnvValue& given = text_.empty() ? EnvValue(row_, name_, std::string(row_.default_value)) : *this;
    return *given.integer<int64_t>(1, kYear);
  }
  /// The position of the value among `choices`.
  size_t choice(std::initializer_list<std::string_view> choices) const {
    const std::string_view value = text_.empty() ? row_.default_value : std::string_view(text_);
    const auto* found = std::find(choices.begin(), choices.end(), value);
    if (found == choices.end()) throw wrong(std::string(row_.type));
    return static_cast<size_t>(found - choices.begin());
  }
  std::string choice_text(std::initializer_list<std::string_view> choices) const { return std::string(choices.begin()[choice(choices)]); }

 private:
  InvalidArgument wrong(const std::string& wanted) const { return InvalidArgument(fmt::format("{} is '{}', but must be {}", name_, text_, wanted)); }

  const EnvVariable& row_;
  std::string_view name_;
  std::string text_;
};

namespace {

using V = const EnvValue&;

// clang-format off
constexpr EnvVariable kTable[] = {
    {"TURNOUT_LOG", "error, warn, info or debug", "warn", "Lines of this level and above are written to stderr, or given to a program's logging (docs/logging.md).",
     [](Env& e, V v) { e.log_level = static_cast<LogLevel>(v.choice({"error", "warn", "info", "debug"})); }},
    {"TURNOUT_TRANSPORT", "auto, inproc or shm", "auto", "Transport of Communicators that do not name one.",
     [](Env& e, V v) { e.transport = v.choice_text({"auto", "inproc", "shm"}); }},
    {"TURNOUT_NODE_ID", "integer", "", "Label of this rank's node, for the order of sums: ranks of one label are one node. Nodes are added in the order of their lowest ranks, whatever the labels.",
     [](Env& e, V v) { e.node_id = v.integer(0); }},
    {"TURNOUT_RANK", "integer", "", "Rank of this process; set by `turnout launch`, goes before other launchers' variables.",
     [](Env& e, V v) { e.rank = v.integer(0, 1 << 24); }},
    {"TURNOUT_NUM_RANKS", "integer", "", "Number of ranks; set by `turnout launch`.",
     [](Env& e, V v) { e.num_ranks = v.integer(1, 1 << 24); }},
    {"TURNOUT_LOCAL_RANK", "integer", "TURNOUT_RANK", "Index of this rank on its machine; set by `turnout launch`.",
     [](Env& e, V v) { e.local_rank = v.integer(0, 1 << 24); }},
    {"TURNOUT_ROOT", "host name or address", "MASTER_ADDR, else what the launcher says (docs/launch.md)", "Where rank 0 serves the rendezvous.",
     [](Env& e, V v) { e.root = v.text(); }},
    {"TURNOUT_PORT", "1 to 65535", "MASTER_PORT + 1, else from the name of the job", "TCP port of the rendezvous.",
     [](Env& e, V v) { e.port = v.integer(1, 65535); }},
    {"TURNOUT_JOB", "text", "the launcher's job id", "Names the job on this host: keys the secret file.",
     [](Env& e, V v) { e.job = v.text(); }},
    {"TURNOUT_SECRET", "text", "", "Secret that all ranks of the job share; needed beyond one host.",
     [](Env& e, V v) { e.secret = v.text(); }},
    {"TURNOUT_SECRET_FILE", "path", "", "File that holds the secret, readable by its owner only (mode 0600).",
     [](Env& e, V v) { e.secret_file = v.text(); }},
    {"TURNOUT_INTERFACE", "name", "", "Network interface whose addresses the rendezvous binds.",
     [](Env& e, V v) { e.interface = v.text(); }},
    {"TURNOUT_BOOTSTRAP_TIMEOUT_MS", "milliseconds", "60000", "Deadline of each bootstrap step where the program does not give one.",
     [](Env& e, V v) { e.bootstrap_timeout_ms = v.milliseconds(); }},
    {"TURNOUT_TIMEOUT_MS", "milliseconds", "60000", "Default of Timeouts::timeout in the command-line tools.",
     [](Env& e, V v) { e.timeout_ms = v.milliseconds(); }},
    {"TURNOUT_BUSY_TIMEOUT_MS", "milliseconds", "1800000", "Default of Timeouts::busy_timeout in the command-line tools.",
     [](Env& e, V v) { e.busy_timeout_ms = v.milliseconds(); }},
    {"TURNOUT_SPIN_US", "microseconds", "50, or 2 where ranks outnumber cores", "How long a wait spins before it sleeps.",
     [](Env& e, V v) { e.spin_us = v.integer<int64_t>(0, 1'000'000); }},
    {"TURNOUT_NUM_THREADS", "1 to 256", "1", "Threads per rank in the command-line tools.",
     [](Env& e, V v) { e.num_threads = v.integer(1, 256); }},
    {"TURNOUT_CPU_ISA", "auto, avx512, avx2 or plain", "auto", "Instruction set of row copies, conversions and sums.",
     [](Env& e, V v) { e.cpu_isa = v.choice_text({"auto", "avx512", "avx2", "plain"}); }},
    {"TURNOUT_CUDA_LIBRARY", "path", "beside libturnout.so", "The file libturnout_cuda.so, which is loaded when a GPU is first asked for.",
     [](Env& e, V v) { e.cuda_library = v.text(); }},
    {"TURNOUT_DEVICE_TRANSPORT", "auto, cuda_p2p or cuda_host", "auto", "How GPUs reach each other's memory, where the program does not say.",
     [](Env& e, V v) { e.device_transport = v.choice_text({"auto", "cuda_p2p", "cuda_host"}); }},
    {"TURNOUT_DEVICE_MEMORY", "auto, vmm or ipc", "auto", "How cuda_p2p shares memory: by the driver's virtual memory, or by cudaIpc where that is not to be had.",
     [](Env& e, V v) { e.device_memory = v.choice_text({"auto", "vmm", "ipc"}); }},
    {"TURNOUT_STAGING_BYTES", "bytes", "from row size and ranks", "Staging per peer, lane and call in flight (CPU) of Buffers that leave staging_bytes at 0.",
     [](Env& e, V v) { e.staging_bytes = v.integer<int64_t>(1, int64_t{1} << 46); }, "DEEP_EP_RDMA_CHUNK_SIZE"},
    {"TURNOUT_TUNED_FILE", "path", "turnout/tuned.json in XDG_CONFIG_HOME, else in ~/.config", "Settings that were found best on a machine, for optimization level 2 (docs/tuned.md).",
     [](Env& e, V v) { e.tuned_file = v.text(); }},
    {"TURNOUT_VERIFY", "0 or 1", "0", "Checksums of headers and rows travel and are compared, and memory that nobody wrote is poison (docs/verify.md). The same on all ranks.",
     [](Env& e, V v) { e.verify = v.choice({"0", "1"}) == 1; }},
    {"TURNOUT_IB_SL", "0 to 15", "", "Service level of InfiniBand, for transports between hosts; no transport of this version has one.",
     [](Env& e, V v) { e.ib_service_level = v.integer(0, 15); }, "NVSHMEM_IB_SL"},
};
// clang-format on

std::string text_of(std::string_view name, const EnvLookup& lookup) {
  const char* text = name.empty() ? nullptr : lookup(name.data());  // a literal, so it ends in 0
  return text ? text : "";
}

EnvValue value_of(const EnvVariable& row, const EnvLookup& lookup) {
  std::string text = text_of(row.name, lookup), by_alias = text_of(row.alias, lookup);
  return text.empty() && !by_alias.empty() ? EnvValue(row, row.alias, std::move(by_alias)) : EnvValue(row, row.name, std::move(text));
}

const char* of_process(const char* name) { return std::getenv(name); }  // NOLINT(concurrency-mt-unsafe)

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t next = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = row[j];
      row[j] = next;
    }
  }
  return row.back();
}

std::vector<std::string> names_of_environment() {
  std::vector<std::string> names;
  for (char** entry = environ; entry && *entry; ++entry) {
    if (const char* equals = std::strchr(*entry, '=')) names.emplace_back(*entry, static_cast<size_t>(equals - *entry));
  }
  return names;
}

}  // namespace

std::span<const EnvVariable> env_table() { return kTable; }

Env read_env(const EnvLookup& lookup) {
  Env e;
  for (const EnvVariable& row : kTable) row.read(e, value_of(row, lookup));
  return e;
}

LogLevel read_log_level(const EnvLookup& lookup) {
  Env e;
  try {
    kTable[0].read(e, value_of(kTable[0], lookup));
  } catch (const InvalidArgument&) {
    return Env().log_level;  // env() throws; a line that is being written must not
  }
  return e.log_level;
}
static_assert(kTable[0].name == "TURNOUT_LOG");

std::vector<std::string> unknown_variables(const std::vector<std::string>& names) {
  std::vector<std::string> lines;
  for (const std::string& name : names) {
    if (!name.starts_with("TURNOUT_") || name.starts_with("TURNOUT_TEST_")) continue;  // tests have variables of their own
    if (std::any_of(std::begin(kTable), std::end(kTable), [&](const EnvVariable& v) { return v.name == name; })) continue;
    if (name == "TURNOUT_CUDA") continue;  // an option of the build, which ./dev takes from the environment
    const auto* nearest = std::min_element(std::begin(kTable), std::end(kTable), [&](const EnvVariable& a, const EnvVariable& b) {
      return edit_distance(a.name, name) < edit_distance(b.name, name);
    });
    // A slip of a finger or two; what is further away was meant for something else.
    constexpr size_t kPrefix = std::string_view("TURNOUT_").size();
    const bool is_near = edit_distance(nearest->name, name) <= std::min<size_t>(3, (name.size() - kPrefix) / 3);
    lines.push_back(is_near ? fmt::format("{} is not a variable of Turnout; did you mean {}?", name, nearest->name)
                            : fmt::format("{} is not a variable of Turnout; docs/env.md lists those that are", name));
  }
  return lines;
}

const Env& env() {
  static const Env instance = read_env(&of_process);
  return instance;
}

void report_unknown_variables() {
  for (const std::string& line : unknown_variables(names_of_environment())) log_once(LogLevel::warn, line);
  for (const std::string& line : aliases_in_use(&of_process)) log_once(LogLevel::warn, line);
}

std::vector<std::string> aliases_in_use(const EnvLookup& lookup) {
  std::vector<std::string> lines;
  for (const EnvVariable& row : kTable) {
    const std::string text = text_of(row.alias, lookup);
    if (!text.empty() && text_of(row.name, lookup).empty()) lines.push_back(fmt::format("{}={} is read as {}={}", row.alias, text, row.name, text));
  }
  return lines;
}

std::string env_page() {
  std::string page =
      "# Environment variables\n\nPrinted from the table in `src/util/env.cc` by `./dev docs`; a test fails when this page differs.\n"
      "A malformed value is an error that names the variable; a variable set to nothing counts as absent; an unknown `TURNOUT_` variable is\n"
      "reported once, by rank 0 (`TURNOUT_TEST_` ones, which are the tests' own, are not).\n\n"
      "| variable | value | default | meaning |\n|---|---|---|---|\n";
  for (const EnvVariable& v : kTable) {
    const std::string_view by_default = v.default_value.empty() ? "none" : v.default_value;
    const std::string alias = v.alias.empty() ? "" : fmt::format(" Where it is absent `{}` is read.", v.alias);
    page += fmt::format("| `{}` | {} | {} | {}{} |\n", v.name, v.type, by_default, v.sentence, alias);
  }
  return page;
}

}  // namespace turnout::util
