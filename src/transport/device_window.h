// Symmetric memory of GPUs: what kernels of one rank load and store of another. Transports move no tokens; an engine takes the
// addresses from here and writes its own kernels. No CUDA header: this page is all that host code sees.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "transport/transport.h"
#include "turnout/bootstrap.h"

namespace turnout::transport {

/// How this device reaches the memory of a peer.
enum class DeviceLink {
  self,         ///< its own
  same_device,  ///< another rank on the same GPU
  peer,         ///< another GPU's memory, over NVLink or PCIe
  host,         ///< pinned memory of the host
};

/// Symmetric device memory: same size and offsets on every rank, peers mapped into this rank's device address space for good.
/// Destroying a window is local and never waits for a peer; who still has the memory mapped keeps it.
/// REQUIRES, for suspend() and the destructor: no work of this process that touches the window is under way or comes later.
class DeviceWindow {
 public:
  virtual ~DeviceWindow() = default;
  virtual std::string_view transport() const = 0;  ///< "cuda_p2p" or "cuda_host"
  virtual size_t num_bytes() const = 0;
  /// Device address of this rank's memory, zero when opened; aligned to a page of the host at least.
  virtual std::byte* local() = 0;
  /// Device address of the peer's memory in this context; for this rank local().
  virtual std::byte* peer(int rank) = 0;
  virtual DeviceLink link(int rank) const = 0;
  /// Collective. Frees physical memory on all ranks, keeps every address. Throws: TransportError where memory was shared by
  /// cudaIpc, which cannot; InvalidArgument if suspended already.
  virtual void suspend() = 0;
  /// Collective. Maps fresh zeroed memory at the same addresses. Throws alike on all ranks: TransportError, and the window
  /// stays suspended; InvalidArgument if it is not suspended.
  virtual void resume() = 0;
};

/// Collective. `name`: "auto" (TURNOUT_DEVICE_TRANSPORT, else cuda_p2p where every GPU reaches every other, else cuda_host),
/// "cuda_p2p", "cuda_host". `device`: CUDA ordinal of this rank. `host`: transport of the same ranks, all on this machine.
/// The calling thread's current device and context stay as they are.
/// `bootstrap` must outlive the window. Throws alike on all ranks: TransportError with each rank's reason, InvalidArgument; PeerTimeout.
std::unique_ptr<DeviceWindow> open_device_window(Bootstrap& bootstrap, Transport& host, const std::string& name, int device, size_t num_bytes);

}  // namespace turnout::transport
