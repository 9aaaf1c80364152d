// What libturnout_cuda.so offers to tools: transport/device_stream.h over the runtime, and the rate of copies.
#pragma once
#include <memory>
#include <span>

#include "transport/device_stream.h"

namespace turnout::transport::device {

std::unique_ptr<DeviceStream> open_stream(int device);
/// GB/s of the slowest of the copies when the copy engines do all of them at once, the best of a few rounds. REQUIRES: not empty.
double copy_GBps(std::span<const DeviceCopy> copies);

}  // namespace turnout::transport::device
