// What windows of all kinds have in common: agreement that says whether another way is worth trying, and memory that ranks of one
// process hold together.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/agree.h"
#include "transport/device/gpu.h"
#include "transport/device_window.h"

namespace turnout::transport::device {

/// A way to share memory was refused by some rank. `is_final`: no other way would do better (memory is full); equal on all ranks.
class Refused : public TransportError {
 public:
  Refused(const std::string& what, bool final) : TransportError(what), is_final(final) {}
  const bool is_final;
};

/// check_agreed, but throws Refused.
void require_agreed(const std::vector<Said>& all, int rank, std::string_view step);

/// Objects that threads of this process find by number. An owner that has gone is not found.
template <class T>
class ProcessTable {
 public:
  std::string publish(const std::shared_ptr<T>& object) {
    const std::lock_guard lock(mutex_);
    for (auto at = objects_.begin(); at != objects_.end();) at = at->second.expired() ? objects_.erase(at) : std::next(at);
    objects_[++last_] = object;
    return std::to_string(last_);
  }
  /// Throws: TransportError if `number` is none, or its owner has gone.
  std::shared_ptr<T> find(const std::string& number, int rank) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(std::stoull(number));
    auto object = found == objects_.end() ? nullptr : found->second.lock();
    if (!object) throw TransportError("cuda: the memory of rank " + std::to_string(rank) + " has gone: that rank gave up");
    return object;
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<T>> objects_;
  uint64_t last_ = 0;
};

/// Addresses and links; the kinds fill `addresses_`.
class WindowBase : public DeviceWindow {
 public:
  size_t num_bytes() const override { return num_bytes_; }
  std::byte* local() override { return addresses_[static_cast<size_t>(rank_)]; }
  std::byte* peer(int rank) override { return addresses_[static_cast<size_t>(rank)]; }

 protected:
  WindowBase(Bootstrap& bootstrap, std::vector<RankGpu> gpus, size_t num_bytes)
      : bootstrap_(bootstrap), rank_(bootstrap.rank()), gpus_(std::move(gpus)), num_bytes_(num_bytes), addresses_(gpus_.size()) {}

  const RankGpu& mine() const { return gpus_[static_cast<size_t>(rank_)]; }
  bool in_this_process(size_t rank) const { return gpus_[rank].process == mine().process; }
  /// Some rank is in another process.
  bool has_strangers() const;
  /// Ordinals, each once, of the GPUs that ranks of this process use.
  std::vector<int> devices_of_this_process() const;
  /// By the GPUs alone.
  DeviceLink link_by_gpu(int rank) const;

  Bootstrap& bootstrap_;
  const int rank_;
  const std::vector<RankGpu> gpus_;
  const size_t num_bytes_;
  std::vector<std::byte*> addresses_;
};

}  // namespace turnout::transport::device
