// The table, and typed readers that say what is wrong with a value.
#include "util/env.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>

extern "C" char** environ;  // NOLINT: POSIX gives the environment no other name

namespace turnout::util {

namespace {

constexpr EnvVariable kTable[] = {
    {"TURNOUT_LOG", "error, warn, info or debug", "warn", "Lines of this level and above are written to stderr."},
    {"TURNOUT_TRANSPORT", "auto, inproc or shm", "auto", "Transport of Communicators that do not name one."},
    {"TURNOUT_NODE_ID", "integer", "", "Node of this rank: overrides what the machine says, for the order of sums."},
    {"TURNOUT_RANK", "integer", "", "Rank of this process; set by `turnout launch`, goes before other launchers' variables."},
    {"TURNOUT_NUM_RANKS", "integer", "", "Number of ranks; set by `turnout launch`."},
    {"TURNOUT_LOCAL_RANK", "integer", "TURNOUT_RANK", "Index of this rank on its machine; set by `turnout launch`."},
    {"TURNOUT_ROOT", "host name or address", "MASTER_ADDR, else what the launcher says (docs/launch.md)", "Where rank 0 serves the rendezvous."},
    {"TURNOUT_PORT", "1 to 65535", "MASTER_PORT + 1, else from the name of the job", "TCP port of the rendezvous."},
    {"TURNOUT_JOB", "text", "the launcher's job id", "Names the job on this host: keys the secret file."},
    {"TURNOUT_SECRET", "text", "", "Secret that all ranks of the job share; needed beyond one host."},
    {"TURNOUT_SECRET_FILE", "path", "", "File that holds the secret, readable by its owner only (mode 0600)."},
    {"TURNOUT_INTERFACE", "name", "", "Network interface whose address the rendezvous binds."},
    {"TURNOUT_BOOTSTRAP_TIMEOUT_MS", "milliseconds", "60000", "Deadline of each bootstrap step of Communicators made from the environment."},
    {"TURNOUT_TIMEOUT_MS", "milliseconds", "60000", "Default of Timeouts::timeout in the command-line tools."},
    {"TURNOUT_BUSY_TIMEOUT_MS", "milliseconds", "1800000", "Default of Timeouts::busy_timeout in the command-line tools."},
    {"TURNOUT_SPIN_US", "microseconds", "", "How long a wait spins before it sleeps; by default 50, or 2 where ranks outnumber cores."},
    {"TURNOUT_NUM_THREADS", "1 to 256", "1", "Threads per rank in the command-line tools."},
    {"TURNOUT_CPU_ISA", "auto, avx512, avx2 or plain", "auto", "Instruction set of row copies, conversions and sums."},
};

std::string wrong(std::string_view name, std::string_view value, std::string_view wanted) {
  return std::string(name) + " is '" + std::string(value) + "', but must be " + std::string(wanted);
}

struct Reader {
  const std::function<const char*(const char*)>& lookup;

  const EnvVariable& row(std::string_view name) const {
    return *std::find_if(std::begin(kTable), std::end(kTable), [&](const EnvVariable& v) { return v.name == name; });
  }
  std::string text(std::string_view name) const {
    const char* value = lookup(std::string(row(name).name).c_str());
    return value ? value : "";
  }
  std::optional<int64_t> integer(std::string_view name, int64_t least, int64_t most) const {
    const std::string value = text(name);
    if (value.empty()) return std::nullopt;
    int64_t n = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), n);
    if (error != std::errc() || end != value.data() + value.size() || n < least || n > most) {
      throw InvalidArgument(wrong(name, value, "an integer from " + std::to_string(least) + " to " + std::to_string(most)));
    }
    return n;
  }
  std::optional<int> small(std::string_view name, int least, int most) const {
    const auto n = integer(name, least, most);
    return n ? std::optional<int>(static_cast<int>(*n)) : std::nullopt;
  }
  std::string choice(std::string_view name, std::initializer_list<std::string_view> choices) const {
    std::string value = text(name);
    if (value.empty()) return std::string(row(name).default_value);
    if (std::find(choices.begin(), choices.end(), value) == choices.end()) throw InvalidArgument(wrong(name, value, row(name).type));
    return value;
  }
};

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

}  // namespace

std::span<const EnvVariable> env_table() { return kTable; }

Env read_env(const std::function<const char*(const char*)>& lookup) {
  const Reader read{lookup};
  constexpr int64_t kMostMs = int64_t{1000} * 3600 * 24 * 365;
  Env e;
  const std::string level = read.choice("TURNOUT_LOG", {"error", "warn", "info", "debug"});
  e.log_level = level == "error" ? LogLevel::error : level == "warn" ? LogLevel::warn : level == "info" ? LogLevel::info : LogLevel::debug;
  e.transport = read.choice("TURNOUT_TRANSPORT", {"auto", "inproc", "shm"});
  e.node_id = read.small("TURNOUT_NODE_ID", 0, INT32_MAX);
  e.rank = read.small("TURNOUT_RANK", 0, 1 << 24);
  e.num_ranks = read.small("TURNOUT_NUM_RANKS", 1, 1 << 24);
  e.local_rank = read.small("TURNOUT_LOCAL_RANK", 0, 1 << 24);
  e.root = read.text("TURNOUT_ROOT");
  e.port = read.small("TURNOUT_PORT", 1, 65535);
  e.job = read.text("TURNOUT_JOB");
  e.secret = read.text("TURNOUT_SECRET");
  e.secret_file = read.text("TURNOUT_SECRET_FILE");
  e.interface = read.text("TURNOUT_INTERFACE");
  e.bootstrap_timeout_ms = read.integer("TURNOUT_BOOTSTRAP_TIMEOUT_MS", 1, kMostMs).value_or(60'000);
  e.timeout_ms = read.integer("TURNOUT_TIMEOUT_MS", 1, kMostMs).value_or(60'000);
  e.busy_timeout_ms = read.integer("TURNOUT_BUSY_TIMEOUT_MS", 1, kMostMs).value_or(1'800'000);
  e.spin_us = read.integer("TURNOUT_SPIN_US", 0, 1'000'000);
  e.num_threads = read.small("TURNOUT_NUM_THREADS", 1, 256);
  e.cpu_isa = read.choice("TURNOUT_CPU_ISA", {"auto", "avx512", "avx2", "plain"});
  return e;
}

std::vector<std::string> unknown_variables(const std::vector<std::string>& given) {
  std::vector<std::string> lines;
  for (const std::string& name : given) {
    if (!name.starts_with("TURNOUT_")) continue;
    if (std::any_of(std::begin(kTable), std::end(kTable), [&](const EnvVariable& v) { return v.name == name; })) continue;
    const auto* nearest = std::min_element(std::begin(kTable), std::end(kTable), [&](const EnvVariable& a, const EnvVariable& b) {
      return edit_distance(a.name, name) < edit_distance(b.name, name);
    });
    lines.push_back(name + " is not a variable of Turnout; did you mean " + std::string(nearest->name) + "?");
  }
  return lines;
}

const Env& env() {
  static const Env instance = [] {
    Env e = read_env([](const char* name) -> const char* { return std::getenv(name); });  // NOLINT(concurrency-mt-unsafe)
    std::vector<std::string> names;
    for (char** entry = environ; entry && *entry; ++entry) {
      const char* equals = std::strchr(*entry, '=');
      if (equals) names.emplace_back(std::string_view(*entry, static_cast<size_t>(equals - *entry)));
    }
    for (const std::string& line : unknown_variables(names)) {
      if (e.log_level >= LogLevel::warn) std::fprintf(stderr, "turnout warn: %s\n", line.c_str());
    }
    return e;
  }();
  return instance;
}

std::string env_page() {
  std::string page =
      "# Environment variables\n\nPrinted from the table in `src/util/env.cc` by `./dev docs`; a test fails when this page differs.\n"
      "A malformed value is an error that names the variable; an unknown `TURNOUT_` variable is reported once.\n\n"
      "| variable | value | default | meaning |\n|---|---|---|---|\n";
  for (const EnvVariable& v : kTable) {
    page += "| `" + std::string(v.name) + "` | " + std::string(v.type) + " | " + (v.default_value.empty() ? "none" : std::string(v.default_value)) +
            " | " + std::string(v.sentence) + " |\n";
  }
  return page;
}

}  // namespace turnout::util
