// Files that hold a secret, with any content: read, or refused in words; a maker of a new one replaces what no living process owns.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "bootstrap/secret.h"
#include "turnout/error.h"

namespace {

/// Of this process, on the memory disk if there is one.
const std::string& folder() {
  static const struct Folder {
    std::string path = (std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : "/tmp") + std::string("/turnout_fuzz_XXXXXX");
    Folder() {
      if (!mkdtemp(path.data())) std::abort();
    }
    ~Folder() { std::filesystem::remove_all(path); }
  } it;
  return it.path;
}

void write_file(const std::string& path, const uint8_t* data, size_t size, unsigned mode) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
  if (fd < 0 || fchmod(fd, mode) != 0 || write(fd, data, size) != static_cast<ssize_t>(size)) std::abort();
  close(fd);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace turnout;
  if (size == 0) return 0;
  const unsigned mode = data[0] % 8 == 7 ? 0640 : 0600;
  const std::string path = folder() + "/secret";
  write_file(path, data + 1, size - 1, mode);
  for (const bool of_host : {false, true}) {
    try {
      const auto secret = of_host ? bootstrap::read_host_secret(path) : bootstrap::read_secret_file(path);
      if (mode != 0600 || (secret && (secret->empty() || secret->size() > 4096))) std::abort();
    } catch (const InvalidArgument& e) {
      if (std::string(e.what()).find(path) == std::string::npos) std::abort();
    }
  }
  try {
    bootstrap::HostSecret mine(path);
    const auto read_again = bootstrap::read_host_secret(path);
    if (!read_again || read_again->size() < 32) std::abort();
  } catch (const Error& e) {
    if (std::string(e.what()).find(path) == std::string::npos) std::abort();
  }
  unlink(path.c_str());
  return 0;
}
