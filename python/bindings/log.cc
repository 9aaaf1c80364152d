// Threads of the library log, also while they hold its locks, and so do calls of Python that hold the interpreter's lock. Whoever logs must
// therefore not wait for the interpreter: lines are put into a queue, and a thread that holds nothing hands them to Python. It is started by
// the first line, so that importing starts none.
#include "bindings/log.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "bindings/bindings.h"
#include "bindings/lifetime.h"
#include "bindings/state.h"
#include "turnout/log.h"
#include "util/env.h"
#include "util/log.h"

namespace turnout::python {

namespace {

struct Line {
  LogLevel level;
  std::string text;
  int rank;
};

/// More lines than these, while Python takes none, are counted and dropped.
constexpr size_t kMostLines = 10000;

/// Never destroyed: threads may log while the process ends.
struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Line> lines;
  size_t num_dropped = 0;
  bool has_thread = false, stops = false;
};
/// A forked child has a queue of its own: the lines in the other are its parent's, and so is the thread.
std::atomic<Queue*> here{nullptr};

LogLevel most_of_environment() {
  static const LogLevel most =
      util::read_log_level([](const char* name) -> const char* { return std::getenv(name); });  // NOLINT(concurrency-mt-unsafe)
  return most;
}

void write_to_stderr(const Line& line) {
  if (line.level > most_of_environment()) return;
  const std::string text = util::line_of(line.level, line.text, line.rank);
  std::fwrite(text.data(), 1, text.size(), stderr);
}

/// With the interpreter's lock. False if logging is not set up, or failed.
bool give_to_python(const nb::object& emit, const Line& line) {
  constexpr int kLevels[] = {40, 30, 20, 10};  // ERROR, WARNING, INFO, DEBUG
  try {
    return nb::cast<bool>(emit(kLevels[static_cast<size_t>(line.level)], nb::str(line.text.data(), line.text.size()), line.rank));
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("turnout: handing a line to logging");
    return false;
  }
}

void hand_on(std::deque<Line>& lines) {
  if (!can_call_python()) {
    for (const Line& line : lines) write_to_stderr(line);
    return;
  }
  const nb::gil_scoped_acquire locked;
  nb::object emit;
  try {
    emit = nb::module_::import_("turnout._log").attr("emit");
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("turnout: importing turnout._log");
  }
  for (const Line& line : lines) {
    if (!emit.is_valid() || !give_to_python(emit, line)) write_to_stderr(line);
  }
  emit.reset();
}

void run(Queue& queue) {
  pthread_setname_np(pthread_self(), "turnout-log");
  std::unique_lock lock(queue.mutex);
  for (;;) {
    queue.changed.wait(lock, [&] { return queue.stops || !queue.lines.empty(); });
    if (queue.lines.empty()) break;
    std::deque<Line> lines;
    lines.swap(queue.lines);
    if (queue.num_dropped > 0) lines.push_back({LogLevel::warn, std::to_string(queue.num_dropped) + " lines were dropped: logging took none", -1});
    queue.num_dropped = 0;
    lock.unlock();
    hand_on(lines);
    lock.lock();
  }
  queue.has_thread = false;
  queue.changed.notify_all();
}

void take(LogLevel level, std::string_view text, int rank) {
  Queue& queue = *here.load();
  const Line line{level, std::string(text), rank};
  const std::lock_guard lock(queue.mutex);
  if (!queue.has_thread && !queue.stops) {
    try {
      std::thread(run, std::ref(queue)).detach();
      queue.has_thread = true;
    } catch (const std::system_error&) {
      // The system has no thread left.
    }
  }
  if (!queue.has_thread) return write_to_stderr(line);
  if (queue.lines.size() >= kMostLines) ++queue.num_dropped;
  else queue.lines.push_back(line);
  queue.changed.notify_all();
}

bool has_stopped() {
  Queue& queue = *here.load();
  const std::lock_guard lock(queue.mutex);
  return queue.stops;
}

}  // namespace

void start_log() {
  if (here.exchange(new Queue)) return;
  pthread_atfork(nullptr, nullptr, [] { here.store(new Queue); });
  set_log_callback(take);
}

void follow_log_level() {
  static LogLevel followed = most_of_environment();  // the interpreter's lock guards it
  const nb::handle logging = imported_module("logging");
  if (!logging.is_valid()) return;
  int level = 30;
  try {
    // Another thread may be importing it just now.
    const nb::object get_logger = nb::getattr(logging, "getLogger", nb::none());
    if (get_logger.is_none()) return;
    level = nb::cast<int>(get_logger("turnout").attr("getEffectiveLevel")());
  } catch (nb::python_error&) {
    return;
  }
  const LogLevel wanted = level <= 10 ? LogLevel::debug : level <= 20 ? LogLevel::info : level <= 30 ? LogLevel::warn : LogLevel::error;
  const LogLevel most = std::max(wanted, most_of_environment());
  if (most == followed || has_stopped()) return;
  followed = most;
  set_log_callback(take, most);
}

void stop_log() {
  const nb::gil_scoped_release unlocked;
  set_log_callback({});
  Queue& queue = *here.load();
  std::unique_lock lock(queue.mutex);
  queue.stops = true;
  queue.changed.notify_all();
  // A handler of the program's that does not come back is not waited for.
  queue.changed.wait_for(lock, std::chrono::seconds(5), [&] { return !queue.has_thread; });
}

}  // namespace turnout::python
