// What a line of a shell prints, and its status.
#pragma once
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace turnout::support {

struct Answer {
  int status;
  std::string text;  ///< standard output, and what the line sends there
};

/// Runs `line`. A status above 128 is that of a signal; -1: there is no shell.
inline Answer answer_of(const std::string& line) {
  FILE* pipe = popen(line.c_str(), "r");
  if (!pipe) return {-1, "no shell"};
  Answer answer{0, ""};
  std::array<char, 4096> buffer;
  for (size_t n = 0; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) answer.text.append(buffer.data(), n);
  const int status = pclose(pipe);
  answer.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return answer;
}

}  // namespace turnout::support
