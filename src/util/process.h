// Which process runs: a child that fork() made shares memory and descriptors with its parent, but is no rank and has none of its threads.
#pragma once
#include <atomic>
#include <cstdint>
#include <utility>

namespace turnout::util {

namespace internal {
/// Number of forks from the first process to this one.
extern std::atomic<uint32_t> num_forks;
}  // namespace internal

/// Remembers the process that made it. One load tells whether this is another.
class Process {
 public:
  bool is_this() const { return internal::num_forks.load(std::memory_order_relaxed) == number_; }

 private:
  const uint32_t number_ = internal::num_forks.load(std::memory_order_relaxed);
};

/// Leaves an object of the parent alone for good. In a child to destroy it could wait for ever for threads that only the parent has.
template <class T>
void leave_to_parent(T& object) {
  [[maybe_unused]] const auto* left = new T(std::move(object));  // NOLINT(cppcoreguidelines-owning-memory)
}

}  // namespace turnout::util
