#include "util/process.h"

#include <pthread.h>

namespace turnout::util {

namespace internal {
constinit std::atomic<uint32_t> num_forks{0};
}

namespace {
extern "C" void turnout_count_fork() { internal::num_forks.fetch_add(1, std::memory_order_relaxed); }
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, turnout_count_fork);
}  // namespace

}  // namespace turnout::util
