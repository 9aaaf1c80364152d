// Memory of a GPU that the other GPUs of the host load and store directly, over NVLink or PCIe; no multicast.
#pragma once
#include <memory>
#include <vector>

#include "transport/device/gpu.h"
#include "transport/device_window.h"

namespace turnout::transport::device {

/// Collective. By the driver's virtual memory management: one reserved address range per peer for the life of the window,
/// memory shared between processes by descriptors. Throws alike on all ranks: Refused; InvalidArgument; PeerTimeout.
std::unique_ptr<DeviceWindow> open_vmm(Bootstrap& bootstrap, const std::vector<RankGpu>& gpus, size_t num_bytes);

/// Collective. By cudaMalloc and cudaIpc, which cannot suspend. Throws as open_vmm.
std::unique_ptr<DeviceWindow> open_ipc(Bootstrap& bootstrap, const std::vector<RankGpu>& gpus, size_t num_bytes);

}  // namespace turnout::transport::device
