#include "tools/file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "turnout/error.h"

namespace turnout::tools {

std::string read_file(const std::string& path, const std::string& what) {
  constexpr uintmax_t kMost = uintmax_t{1} << 30;
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  const auto refuse = [&](const std::string& why) { throw InvalidArgument("cannot read the " + what + " file '" + path + "': " + why); };
  if (!std::filesystem::exists(status)) refuse(error ? error.message() : "there is no such file");
  // Every rank reads it, and some more than once: a pipe would give each a part.
  if (!std::filesystem::is_regular_file(status)) refuse("it is not a regular file");
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (!error && size > kMost) refuse("it has " + std::to_string(size) + " bytes, and " + std::to_string(kMost) + " are the most");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(std::strerror(errno));
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace turnout::tools
