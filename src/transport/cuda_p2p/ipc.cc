// For drivers without virtual memory management, and sandboxes that pass no descriptors. Addresses are the driver's choice, so this
// memory cannot be suspended.
#include <algorithm>
#include <cstring>

#include "transport/cuda_p2p/cuda_p2p.h"
#include "transport/device/driver.h"
#include "transport/device/probe.h"
#include "transport/device/shared.h"

namespace turnout::transport::device {

namespace {

/// A handle opens the driver's whole block, so nobody else's memory may lie in it.
constexpr size_t kBlock = size_t{2} << 20;
constexpr size_t round_up(size_t num_bytes) {
  return num_bytes > SIZE_MAX - kBlock ? SIZE_MAX / kBlock * kBlock : (num_bytes + kBlock - 1) / kBlock * kBlock;
}

/// Memory of this process.
class Malloc {
 public:
  Malloc(int device, size_t num_bytes) : device_(device) {
    check(cudaMalloc(&data_, num_bytes), "allocating " + std::to_string(num_bytes) + " bytes of device " + std::to_string(device));
  }
  Malloc(const Malloc&) = delete;
  Malloc& operator=(const Malloc&) = delete;
  ~Malloc() {
    try {
      const CurrentDevice current(device_);
      (void)cudaFree(data_);
    } catch (const TransportError&) {  // the driver is shutting down
    }
  }
  std::byte* address() const { return static_cast<std::byte*>(data_); }

 private:
  const int device_;
  void* data_ = nullptr;
};

/// Memory of another process.
class Opened {
 public:
  Opened(const std::string& handle, int rank, int device) : device_(device) {
    cudaIpcMemHandle_t words{};
    if (handle.size() != sizeof words) throw TransportError("cuda: the handle of rank " + std::to_string(rank) + " is cut short");
    std::memcpy(&words, handle.data(), sizeof words);
    check(cudaIpcOpenMemHandle(&data_, words, cudaIpcMemLazyEnablePeerAccess), "opening the memory of rank " + std::to_string(rank) + " by cudaIpc");
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  ~Opened() {
    try {
      const CurrentDevice current(device_);
      (void)cudaIpcCloseMemHandle(data_);
    } catch (const TransportError&) {  // the driver is shutting down
    }
  }
  std::byte* address() const { return static_cast<std::byte*>(data_); }

 private:
  const int device_;
  void* data_ = nullptr;
};

ProcessTable<Malloc>& memories() {
  static ProcessTable<Malloc> table;
  return table;
}

void enable_peer(int device) {
  const cudaError_t result = cudaDeviceEnablePeerAccess(device, 0);
  if (result == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
  } else {
    check(result, "opening the memory of device " + std::to_string(device));
  }
}

class IpcWindow final : public WindowBase {
 public:
  IpcWindow(Bootstrap& bootstrap, const std::vector<RankGpu>& gpus, size_t num_bytes) : WindowBase(bootstrap, gpus, num_bytes), held_(gpus.size()) {
    const std::string step = "cuda_p2p by ipc: memory", next = "cuda_p2p by ipc: taken";
    const auto made = tell_all(bootstrap_, step, std::to_string(num_bytes) + " bytes", [&] { return make_own(); });
    require_agreed(made, rank_, step);
    const auto taken = tell_all(bootstrap_, next, "", [&] {
      const CurrentDevice current(mine().device);
      for (size_t rank = 0; rank < made.size(); ++rank) take(rank, made[rank].made);
      return std::string();
    });
    require_agreed(taken, rank_, next);
    probe(bootstrap_, "cuda_p2p by ipc", addresses_, mine().device);
  }

  std::string_view transport() const override { return "cuda_p2p"; }
  DeviceLink link(int rank) const override { return link_by_gpu(rank); }
  void suspend() override {
    throw TransportError("cuda_p2p: this window was shared by cudaIpc, which cannot keep addresses without memory, so it cannot be suspended: " +
                         std::string("TURNOUT_LOG=info says why the driver's virtual memory was not used"));
  }
  void resume() override { throw InvalidArgument("device window: resume() of a window that is not suspended"); }

 private:
  /// This rank's memory, zero; returns its number in this process, and its handle for others.
  std::string make_own() {
    const CurrentDevice current(mine().device);
    const size_t size = round_up(std::max(num_bytes_, probe_bytes(static_cast<int>(gpus_.size()))));
    own_ = std::make_shared<Malloc>(mine().device, size);
    addresses_[static_cast<size_t>(rank_)] = own_->address();
    clear(mine().device, own_->address(), size);
    std::string words = memories().publish(own_) + " ";
    if (has_strangers()) {
      cudaIpcMemHandle_t handle{};
      check(cudaIpcGetMemHandle(&handle, own_->address()), "sharing memory by cudaIpc");
      words.append(reinterpret_cast<const char*>(&handle), sizeof handle);
    }
    return words;
  }

  void take(size_t rank, const std::string& words) {
    if (static_cast<int>(rank) == rank_) return;
    const size_t space = words.find(' ');
    if (in_this_process(rank)) {
      auto theirs = memories().find(words.substr(0, space), static_cast<int>(rank));
      if (gpus_[rank].device != mine().device) enable_peer(gpus_[rank].device);
      addresses_[rank] = theirs->address();
      held_[rank] = std::move(theirs);
    } else {
      auto theirs = std::make_shared<Opened>(words.substr(space + 1), static_cast<int>(rank), mine().device);
      addresses_[rank] = theirs->address();
      held_[rank] = std::move(theirs);
    }
  }

  std::shared_ptr<Malloc> own_;
  std::vector<std::shared_ptr<void>> held_;  ///< what peers' addresses need to stay valid
};

}  // namespace

std::unique_ptr<DeviceWindow> open_ipc(Bootstrap& bootstrap, const std::vector<RankGpu>& gpus, size_t num_bytes) {
  return std::make_unique<IpcWindow>(bootstrap, gpus, num_bytes);
}

}  // namespace turnout::transport::device
