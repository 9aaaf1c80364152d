// What holds C++ objects for Python: they are let go in any order, at exit, and in a child process that was forked.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "bindings/bindings.h"

namespace turnout::python {

/// Counts forks from here on.
void watch_forks();
/// Number of forks between the process that imported the module and this one.
uint64_t num_forks();

/// At the exit of the interpreter: closes everything that was registered, newest first, waits a moment for calls that threads are in, and
/// lets go of it. Idempotent.
void close_all();
/// `close` (without the interpreter's lock) and `let_go` (with it) are called once by close_all(), unless `owner` is gone by then.
void close_at_exit(const std::shared_ptr<void>& owner, std::function<void()> close, std::function<void()> let_go);

/// A call that is under way: no interpreter ends in the middle of it. Made before the interpreter's lock is released, so that it lasts until
/// the lock is held again: who asks an interpreter that has ended for its lock is ended itself, in a destructor, which ends the process.
class UnderWay {
 public:
  UnderWay();
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;
  ~UnderWay();
};

/// Inside, other Python threads run: for destructors and what else may wait a moment. Once close_all() has begun its last part, the lock is
/// kept: nothing waits for a peer any more, and whoever gives it away may not get it back.
class Unlocked {
 public:
  Unlocked();

 private:
  UnderWay under_way_;
  std::optional<nb::gil_scoped_release> released_;
};

/// Whether this thread has the interpreter's lock.
bool holds_interpreter() noexcept;
/// Lets go of what may be the last reference to memory of a GPU, whose end waits for the streams of its calls: they may wait for another rank,
/// which may be a thread that wants the interpreter's lock. And whoever waits for a lock of the library must not hold the interpreter's: an
/// allocator's turn may come meanwhile.
template <class T>
void let_go_unlocked(T& value) {
  if (!holds_interpreter()) return static_cast<void>(value = T());
  const Unlocked unlocked;
  value = T();
}
/// Whether this thread may take the interpreter's lock, or has it: once the interpreter ends, nobody else gets it any more.
bool can_call_python() noexcept;
/// Lets go of a reference from any thread, with or without the interpreter's lock; once the interpreter is gone, not at all.
void drop(PyObject* object) noexcept;

[[noreturn]] void refuse_held(const char* what, bool forked);

/// Owns a T of this process. In a forked child nothing of it works: use raises InvalidArgument, and the T is not destroyed,
/// because its threads, its memory and its peers are the parent's.
template <class T>
class Held {
 public:
  Held(const char* what, std::shared_ptr<T> value) : what_(what), value_(std::move(value)) {}
  Held(Held&&) noexcept = default;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (value_ && made_ != num_forks()) new std::shared_ptr<void>(std::move(value_));  // left to the parent
  }

  bool is_here() const { return value_ && made_ == num_forks(); }
  const std::shared_ptr<T>& get() const {
    if (!is_here()) [[unlikely]]
      refuse_held(what_, value_ != nullptr);
    return value_;
  }
  /// What get() gave before may go on; nothing if this is a forked child.
  void reset() {
    if (value_ && made_ == num_forks()) value_.reset();
  }

 private:
  const char* what_;
  uint64_t made_ = num_forks();
  std::shared_ptr<T> value_;
};

/// The same of what the exit of the interpreter lets go of from afar.
template <class T>
class HeldToExit {
 public:
  HeldToExit(const char* what, std::shared_ptr<T> value) : what_(what), value_(std::make_shared<std::shared_ptr<T>>(std::move(value))) {}
  HeldToExit(HeldToExit&&) noexcept = default;
  HeldToExit(const HeldToExit&) = delete;
  HeldToExit& operator=(const HeldToExit&) = delete;
  ~HeldToExit() {
    if (value_ && made_ != num_forks()) new std::shared_ptr<void>(std::move(value_));  // left to the parent
  }

  bool is_here() const { return *value_ && made_ == num_forks(); }
  const std::shared_ptr<T>& get() const {
    if (!is_here()) [[unlikely]]
      refuse_held(what_, *value_ != nullptr);
    return *value_;
  }
  /// What get() gave before may go on; nothing if this is a forked child.
  void reset() {
    if (value_ && made_ == num_forks()) value_->reset();
  }
  /// Does the same, from afar.
  std::function<void()> let_go() const {
    return [value = std::weak_ptr(value_)] {
      if (const auto there = value.lock()) there->reset();
    };
  }

 private:
  const char* what_;
  uint64_t made_ = num_forks();
  std::shared_ptr<std::shared_ptr<T>> value_;
};
}  // namespace turnout::python
