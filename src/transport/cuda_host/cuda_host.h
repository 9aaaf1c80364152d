// Memory of the host that every GPU maps, for GPUs that cannot reach each other.
#pragma once
#include <memory>
#include <vector>

#include "transport/device/gpu.h"
#include "transport/device_window.h"

namespace turnout::transport::device {

/// Collective. Throws alike on all ranks: Refused; InvalidArgument; PeerTimeout.
std::unique_ptr<DeviceWindow> open_cuda_host(Bootstrap& bootstrap, const std::vector<RankGpu>& gpus, size_t num_bytes);

}  // namespace turnout::transport::device
