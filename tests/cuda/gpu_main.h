// What main() of the tests on GPUs asks after each test: whether this process has lost its GPU, so that the other tests need a new one.
#pragma once
#include <functional>

namespace turnout::testing {

/// Set by a process that uses GPUs.
inline std::function<bool()>& gpu_is_lost() {
  static std::function<bool()> ask;
  return ask;
}

}  // namespace turnout::testing
