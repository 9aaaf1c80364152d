// Stands in for src/util/probe.h where the engine is built to be watched: a thread that has a hook goes through it at every step.
#pragma once
#include <chrono>

#include "util/probe_step.h"

namespace turnout::util::probe {

class Hook {
 public:
  virtual ~Hook() = default;
  virtual void at(Step step) = 0;
  /// As probe::idle().
  virtual bool idle() = 0;
  virtual std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }
};

inline thread_local Hook* hook = nullptr;

inline void at(Step step) {
  if (hook) hook->at(step);
}
inline bool idle() { return hook && hook->idle(); }
inline std::chrono::steady_clock::time_point now() { return hook ? hook->now() : std::chrono::steady_clock::now(); }

}  // namespace turnout::util::probe
