#include "bindings/lifetime.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "turnout/error.h"

namespace turnout::python {

namespace {

std::atomic<uint64_t> forks{0};
std::atomic<int> calls{0};
std::atomic<bool> ends{false};  ///< set with the interpreter's lock

/// What is open in this process.
struct Open {
  std::mutex mutex;
  std::condition_variable idle;
  struct Entry {
    std::weak_ptr<void> owner;
    std::function<void()> close, let_go;
  };
  std::vector<Entry> entries;
  size_t swept = 0;  ///< entries after the last sweep
};

/// Never destroyed: threads may look at it while the process ends. A forked child begins anew.
std::atomic<Open*> here{new Open};

}  // namespace

namespace {

/// What the stable interface of Python 3.12 leaves out, though every interpreter has it: asked for by name.
using Question = int (*)();
Question question(const char* name) { return reinterpret_cast<Question>(dlsym(RTLD_DEFAULT, name)); }

bool is_finalizing() noexcept {
  static const Question now = question("Py_IsFinalizing"), before = question("_Py_IsFinalizing");  // its name until 3.13
  return (now && now()) || (!now && before && before());
}

}  // namespace

bool holds_interpreter() noexcept {
  static const Question check = question("PyGILState_Check");
  return check && check();
}

void watch_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    forks.fetch_add(1, std::memory_order_relaxed);
    calls.store(0);
    here.store(new Open);
  });
  static_cast<void>(registered);
}

uint64_t num_forks() { return forks.load(std::memory_order_relaxed); }

void close_at_exit(const std::shared_ptr<void>& owner, std::function<void()> close, std::function<void()> let_go) {
  Open& open = *here.load();
  std::lock_guard lock(open.mutex);
  if (open.entries.size() > 2 * open.swept + 16) {
    std::erase_if(open.entries, [](const auto& entry) { return entry.owner.expired(); });
    open.swept = open.entries.size();
  }
  open.entries.push_back({owner, std::move(close), std::move(let_go)});
}

void close_all() {
  Open& open = *here.load();
  std::vector<Open::Entry> entries;
  {
    const nb::gil_scoped_release unlocked;
    std::unique_lock lock(open.mutex);
    entries.swap(open.entries);
    lock.unlock();
    for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
      if (const auto owner = entry->owner.lock()) entry->close();
    }
    // A closed Buffer ends the waits of its calls.
    lock.lock();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    const auto wait = [&] {
      while (calls.load() > 0 && std::chrono::steady_clock::now() < deadline) open.idle.wait_for(lock, std::chrono::milliseconds(10));
    };
    wait();
    lock.unlock();
    {
      const nb::gil_scoped_acquire locked;
      ends = true;
    }
    lock.lock();
    wait();  // for those that gave the lock away before
  }
  if (calls.load() > 0) return;  // a thread that does not come back keeps what it uses
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) entry->let_go();
}

UnderWay::UnderWay() { calls.fetch_add(1, std::memory_order_relaxed); }
UnderWay::~UnderWay() {
  if (calls.fetch_sub(1) == 1) here.load()->idle.notify_all();
}

Unlocked::Unlocked() {
  if (!ends.load()) released_.emplace();
}

bool can_call_python() noexcept { return Py_IsInitialized() && (holds_interpreter() || !is_finalizing()); }

void drop(PyObject* object) noexcept {
  if (!object || !can_call_python()) return;
  const nb::gil_scoped_acquire locked;
  Py_DECREF(object);
}

void refuse_held(const char* what, bool forked) {
  if (!forked) throw InvalidArgument(std::string(what) + ": this object was closed, or its process is about to end; make a new one");
  throw InvalidArgument(std::string(what) +
                        ": this process was forked after the object was made, and its memory, threads and peers are the parent's. Make it in the "
                        "child, or start children without fork: multiprocessing.get_context('spawn')");
}

}  // namespace turnout::python
