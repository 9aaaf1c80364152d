// The host file reads "PID START SECRET": who made it and when that process started, so that what a killed job left behind is
// recognised and replaced.
#include "bootstrap/secret.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "bootstrap/hmac.h"
#include "bootstrap/launch_info.h"

namespace turnout::bootstrap {

namespace {

std::string reason() { return std::strerror(errno); }  // NOLINT(concurrency-mt-unsafe)

/// The file's text; nullopt and errno if it cannot be opened. Throws: InvalidArgument if it is not this user's alone.
std::optional<std::string> read_private(const std::string& path, const char* what) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // not even a fifo may hold us up
  if (fd < 0) return std::nullopt;
  struct stat facts {};
  const bool known = fstat(fd, &facts) == 0;
  std::string wrong;
  if (!known || !S_ISREG(facts.st_mode)) {
    wrong = "is not a regular file";
  } else if (facts.st_uid != geteuid()) {
    wrong = "belongs to user " + std::to_string(facts.st_uid) + ", not to " + std::to_string(geteuid());
  } else if ((facts.st_mode & 077) != 0) {
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", static_cast<unsigned>(facts.st_mode & 07777));
    wrong = std::string("has mode ") + mode + ", so others may read it: chmod 600 " + path;
  }
  std::string text;
  if (wrong.empty()) {
    char buffer[4096];
    const ssize_t n = read(fd, buffer, sizeof buffer);
    text.assign(buffer, n > 0 ? static_cast<size_t>(n) : 0);
  }
  close(fd);
  if (!wrong.empty()) throw InvalidArgument(std::string(what) + " " + path + " " + wrong);
  return text;
}

/// When a process started, in clock ticks since boot (field 22 of its stat); empty if there is no such process.
std::string start_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');  // the name may hold spaces and brackets
  if (name_end == std::string::npos) return "";
  std::istringstream fields(line.substr(name_end + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  return field;
}

/// Removes what jobs that were killed before all had joined have left in the folder. A process that cannot be seen here may live
/// behind another view of processes (a container): so only what is older than any rendezvous takes.
void sweep(const std::filesystem::path& folder) noexcept {
  std::error_code error;
  const auto now = std::filesystem::file_time_type::clock::now();
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("turnout-") || name.find(".secret") == std::string::npos || !entry.is_regular_file(error)) continue;
    const auto written = entry.last_write_time(error);
    if (error || now - written < std::chrono::hours(1)) continue;
    std::ifstream file(entry.path());
    std::string pid, start;
    file >> pid >> start;
    if (start.empty() || start_of(pid) != start) unlink(entry.path().c_str());
  }
}

bool is_private_folder(const std::string& path) {
  struct stat facts {};
  return !path.empty() && lstat(path.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode) && facts.st_uid == geteuid() && (facts.st_mode & 077) == 0;
}

}  // namespace

std::string read_secret_file(const std::string& path) {
  auto text = read_private(path, "TURNOUT_SECRET_FILE");
  if (!text) throw InvalidArgument("TURNOUT_SECRET_FILE " + path + " cannot be read: " + reason());
  while (!text->empty() && (text->back() == '\n' || text->back() == '\r')) text->pop_back();
  if (text->empty()) throw InvalidArgument("TURNOUT_SECRET_FILE " + path + " is empty: put at least 16 random characters there");
  return *text;
}

std::string runtime_folder(const std::string& preferred) {
  if (is_private_folder(preferred)) return preferred;
  const char* xdg = process_environment("XDG_RUNTIME_DIR");
  if (xdg && is_private_folder(xdg)) return xdg;
  const std::string run = "/run/user/" + std::to_string(geteuid());
  if (is_private_folder(run)) return run;
  const std::string own = "/tmp/turnout-" + std::to_string(geteuid());
  mkdir(own.c_str(), 0700);
  if (is_private_folder(own)) return own;
  throw TransportError(own + " is not a folder of this user alone (mode 0700): remove it, or set XDG_RUNTIME_DIR or TURNOUT_SECRET");
}

std::string host_secret_path(const std::string& folder, const std::string& job, int port) {
  return folder + "/turnout-" + hex(Bytes(hmac(bytes_of(job), {bytes_of(std::to_string(port))})).first(12)) + ".secret";
}

HostSecret::HostSecret(std::string path) : path_(std::move(path)), secret_(hex(random_digest())) {
  const std::string pid = std::to_string(getpid());
  const std::string text = pid + " " + start_of(pid) + " " + secret_ + "\n";
  const std::string draft = path_ + "." + pid + "." + secret_.substr(0, 8);
  const int fd = open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) throw TransportError("cannot create " + draft + ": " + reason() + "; set XDG_RUNTIME_DIR to a folder of yours, or TURNOUT_SECRET");
  const bool written = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(fd);
  std::string trouble = written ? "" : "cannot write " + draft + ": " + reason();
  for (int attempt = 0; written && !there_ && trouble.empty(); ++attempt) {
    if (link(draft.c_str(), path_.c_str()) == 0) {  // unlike rename, fails if the name is taken
      there_ = true;
    } else if (errno != EEXIST || attempt == 3) {
      trouble = "cannot create " + path_ + ": " + reason();
    } else if (const auto other = read_private(path_, "the secret of this job,")) {
      std::istringstream fields(*other);
      std::string other_pid, other_start;
      fields >> other_pid >> other_start;
      if (!other_start.empty() && start_of(other_pid) == other_start) {
        trouble =
            "process " + other_pid + " of this host is forming a job of the same name and port (" + path_ + "): set TURNOUT_JOB or TURNOUT_PORT";
      } else {
        unlink(path_.c_str());
      }
    }
  }
  unlink(draft.c_str());
  sweep(std::filesystem::path(path_).parent_path());
  if (!trouble.empty()) throw TransportError(trouble);
}

void HostSecret::remove() noexcept {
  if (there_ && process_.is_this()) unlink(path_.c_str());
  there_ = false;
}

std::optional<std::string> read_host_secret(const std::string& path) {
  const auto text = read_private(path, "the secret of this job,");
  if (!text) return std::nullopt;
  std::istringstream fields(*text);
  std::string pid, start, secret;
  fields >> pid >> start >> secret;
  if (secret.empty()) return std::nullopt;
  return secret;
}

}  // namespace turnout::bootstrap
