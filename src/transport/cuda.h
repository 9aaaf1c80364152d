// The GPU part of the library, loaded when first asked for. Where it is absent, or no GPU or driver is, there is a reason.
#pragma once
#include <memory>
#include <span>
#include <string>

#include "transport/cuda_table.h"

namespace turnout::transport {

/// The loaded table; null if libturnout_cuda.so cannot be had: cuda_reason() says why. Does not start the driver.
const CudaTable* cuda_table();

/// Why CUDA cannot be used in this process; empty if it can. Starts the driver: a process must not fork afterwards.
std::string cuda_reason();
/// 0 where there is a reason. Starts the driver.
int num_cuda_devices();
/// Model, architecture, size and bus of a GPU; the reason where there is none.
std::string describe_cuda_device(int device);
/// Why `device` cannot be used; empty if it can.
std::string cuda_device_reason(int device);

// For tools and tests. Throw: TransportError with the reason where the GPU cannot be used.
/// Multiprocessors of a GPU.
int num_cuda_sms(int device);
std::unique_ptr<DeviceStream> open_device_stream(int device);
/// GB/s of the slowest of the copies when all run at once on the copy engines. REQUIRES: not empty.
double copy_GBps(std::span<const DeviceCopy> copies);

}  // namespace turnout::transport
