#include "util/standard_streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace turnout::util {

int above_standard_streams(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int other = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  close(fd);
  errno = error;
  return other;
}

}  // namespace turnout::util
