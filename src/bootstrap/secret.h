// The job's secret: given by the user, or, on one host, a file that rank 0 leaves for the others.
#pragma once
#include <optional>
#include <string>

#include "turnout/bootstrap.h"
#include "util/process.h"

namespace turnout::bootstrap {

/// Content of TURNOUT_SECRET_FILE without trailing line ends. Throws: InvalidArgument if it cannot be read, is empty, belongs
/// to somebody else or may be read by others.
std::string read_secret_file(const std::string& path);

/// Folder for files of this user that nobody else can enter: `preferred` or $XDG_RUNTIME_DIR, else /run/user/UID, else a
/// 0700 folder under /tmp. Throws: TransportError if none can be had.
std::string runtime_folder(const std::string& preferred = "");

/// Where the secret of a job on this host lies: keyed by job and port.
std::string host_secret_path(const std::string& folder, const std::string& job, int port);

/// The file that rank 0 makes for the ranks of its host: mode 0600, complete as soon as it has its name, never written over.
class HostSecret {
 public:
  /// Throws: TransportError if a living process has made one for the same job.
  explicit HostSecret(std::string path);
  ~HostSecret() { remove(); }
  HostSecret(const HostSecret&) = delete;
  HostSecret& operator=(const HostSecret&) = delete;

  const std::string& secret() const { return secret_; }
  /// Idempotent; removes only the file that this object made.
  void remove() noexcept;

 private:
  const util::Process process_;
  std::string path_, secret_;
  bool there_ = false;
};

/// The secret in such a file; nullopt while there is none. Throws: InvalidArgument if the file is not this user's alone.
std::optional<std::string> read_host_secret(const std::string& path);

}  // namespace turnout::bootstrap
