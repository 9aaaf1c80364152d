// Memory that all ranks of one machine share, outside the library under test: a barrier with little skew, a place for every
// rank's times, and bytes for the limits. Ranks are processes or threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "turnout/communicator.h"

namespace turnout::tools {

class SharedArena {
 public:
  /// Collective. Memory is on huge pages where the system gives them. Throws: TransportError (ranks on several machines, no memory).
  SharedArena(Communicator& communicator, size_t num_bytes);
  ~SharedArena();
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;

  std::byte* data() { return data_; }
  /// Spins until all ranks are here; yields where ranks outnumber cores. Throws: TransportError after five minutes.
  void barrier();
  /// The largest `value` of all ranks, on all ranks.
  double max(double value);
  /// Element by element. REQUIRES: the same size on all ranks.
  std::vector<double> max(const std::vector<double>& values);

 private:
  struct Control;
  Control* control() { return reinterpret_cast<Control*>(base_); }

  int rank_, num_ranks_;
  bool shares_ = false, yields_;
  uint64_t round_ = 0;
  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
  size_t total_ = 0;
};

/// This rank's own memory, on huge pages where the system gives them, every page touched.
class WarmMemory {
 public:
  explicit WarmMemory(size_t num_bytes);
  ~WarmMemory();
  WarmMemory(const WarmMemory&) = delete;
  WarmMemory& operator=(const WarmMemory&) = delete;
  std::byte* data() { return data_; }

 private:
  std::byte* data_;
  size_t num_bytes_;
};

}  // namespace turnout::tools
