// One sealed memory file per rank, pinned and mapped into every GPU's addresses. Threads of one process share the owner's mapping.
#include "transport/cuda_host/cuda_host.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "transport/descriptor.h"
#include "transport/device/driver.h"
#include "transport/device/probe.h"
#include "transport/device/shared.h"

namespace turnout::transport::device {

namespace {

/// A mapping that GPUs reach. Pinned for all devices of the process.
class Pinned {
 public:
  Pinned(Mapping map, size_t num_bytes, int device) : map_(std::move(map)), num_bytes_(num_bytes), device_(device) {}
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned() {
    try {
      unpin();
    } catch (const TransportError&) {  // the driver is shutting down
    }
  }
  void pin() {
    const CurrentDevice current(device_);
    check(cudaHostRegister(map_.data(), num_bytes_, cudaHostRegisterPortable | cudaHostRegisterMapped),
          "pinning " + std::to_string(num_bytes_) + " bytes of the host's memory");
    is_pinned_ = true;
  }
  void unpin() {
    if (!std::exchange(is_pinned_, false)) return;
    const CurrentDevice current(device_);
    (void)cudaHostUnregister(map_.data());
  }
  /// Gives the pages of the file back; they are zero when touched again. REQUIRES: pinned nowhere.
  void free_pages() {
    if (madvise(map_.data(), num_bytes_, MADV_REMOVE) != 0) fail("cannot free the pages of a memory file", errno);
  }
  std::byte* address_on(int device) const {
    const CurrentDevice current(device);
    void* address = nullptr;
    check(cudaHostGetDevicePointer(&address, map_.data(), 0), "mapping pinned memory into device " + std::to_string(device));
    return static_cast<std::byte*>(address);
  }

 private:
  Mapping map_;
  const size_t num_bytes_;
  const int device_;
  bool is_pinned_ = false;
};

ProcessTable<Pinned>& memories() {
  static ProcessTable<Pinned> table;
  return table;
}

size_t round_up(size_t num_bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return num_bytes > (size_t{1} << 62) ? size_t{1} << 62 : (num_bytes + page - 1) / page * page;
}

class HostWindow final : public WindowBase {
 public:
  HostWindow(Bootstrap& bootstrap, const std::vector<RankGpu>& gpus, size_t num_bytes)
      : WindowBase(bootstrap, gpus, num_bytes), pinned_(gpus.size()) {
    const size_t size = round_up(std::max(num_bytes, probe_bytes(static_cast<int>(gpus.size()))));
    auto memory = share(size);
    const std::string step = "cuda_host: own", next = "cuda_host: others";
    const auto made = tell_all(bootstrap_, step, "", [&] {
      const auto rank = static_cast<size_t>(rank_);
      pinned_[rank] = std::make_shared<Pinned>(std::move(memory[rank].map), size, mine().device);
      pinned_[rank]->pin();
      return memories().publish(pinned_[rank]);
    });
    require_agreed(made, rank_, step);
    const auto taken = tell_all(bootstrap_, next, "", [&] {
      for (size_t rank = 0; rank < made.size(); ++rank) take(rank, made[rank].made, std::move(memory[rank].map), size);
      return std::string();
    });
    require_agreed(taken, rank_, next);
    probe(bootstrap_, "cuda_host", addresses_, mine().device);
  }

  std::string_view transport() const override { return "cuda_host"; }
  DeviceLink link(int rank) const override { return rank == rank_ ? DeviceLink::self : DeviceLink::host; }

  void suspend() override {
    if (is_suspended_) throw InvalidArgument("device window: suspend() of a window that is suspended already");
    bootstrap_.barrier("cuda_host: suspend: quiet");
    unpin();
    is_suspended_ = true;
    bootstrap_.barrier("cuda_host: suspend: unpinned");
    pinned_[static_cast<size_t>(rank_)]->free_pages();
    // A rank that resumes pins everybody's pages: those that are about to go would not be the owner's any more.
    bootstrap_.barrier("cuda_host: suspend: freed");
  }

  void resume() override {
    if (!is_suspended_) throw InvalidArgument("device window: resume() of a window that is not suspended");
    try {
      const auto said = tell_all(bootstrap_, "cuda_host: resume", "", [&] {
        for (size_t rank = 0; rank < pinned_.size(); ++rank) {
          if (is_ours(rank)) pinned_[rank]->pin();
        }
        return std::string();
      });
      check_agreed(said, rank_, "cuda_host: resume");
      const auto kept = tell_all(bootstrap_, "cuda_host: addresses", "", [&] {
        check_addresses();
        return std::string();
      });
      check_agreed(kept, rank_, "cuda_host: addresses");
      probe(bootstrap_, "cuda_host", addresses_, mine().device);
    } catch (...) {
      unpin();
      throw;
    }
    is_suspended_ = false;
  }

 private:
  /// Errors of shared memory are those of this way to reach peers.
  std::vector<PeerMemory> share(size_t size) {
    try {
      return share_memory(bootstrap_, "cuda_host", std::to_string(num_bytes_) + " bytes", size, [](std::byte*) {});
    } catch (const TransportError& error) {
      throw Refused(error.what(), true);  // the last way there is
    }
  }

  /// Mapped by this window, not by that of another rank of this process.
  bool is_ours(size_t rank) const { return static_cast<int>(rank) == rank_ || !in_this_process(rank); }

  void take(size_t rank, const std::string& number, Mapping map, size_t size) {
    if (!is_ours(rank)) {
      pinned_[rank] = memories().find(number, static_cast<int>(rank));
    } else if (static_cast<int>(rank) != rank_) {
      pinned_[rank] = std::make_shared<Pinned>(std::move(map), size, mine().device);
      pinned_[rank]->pin();
    }
    addresses_[rank] = pinned_[rank]->address_on(mine().device);
  }

  void check_addresses() const {
    for (size_t rank = 0; rank < pinned_.size(); ++rank) {
      if (pinned_[rank]->address_on(mine().device) == addresses_[rank]) continue;
      throw TransportError("cuda_host: the driver maps the memory of rank " + std::to_string(rank) + " at another address than before");
    }
  }

  void unpin() {
    for (size_t rank = 0; rank < pinned_.size(); ++rank) {
      if (pinned_[rank] && is_ours(rank)) pinned_[rank]->unpin();
    }
  }

  std::vector<std::shared_ptr<Pinned>> pinned_;
  bool is_suspended_ = false;
};

}  // namespace

std::unique_ptr<DeviceWindow> open_cuda_host(Bootstrap& bootstrap, const std::vector<RankGpu>& gpus, size_t num_bytes) {
  return std::make_unique<HostWindow>(bootstrap, gpus, num_bytes);
}

}  // namespace turnout::transport::device
