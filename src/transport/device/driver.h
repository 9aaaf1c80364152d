// CUDA's driver without linking it: entry points are looked up when first used, so that the library loads where no driver is.
// Errors of the driver and the runtime become TransportError with the call, its place and what could help.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <source_location>
#include <string>
#include <string_view>

namespace turnout::transport::device {

/// The driver's functions that the runtime does not offer.
struct Driver {
  decltype(&::cuCtxPopCurrent) ctx_pop_current;
  decltype(&::cuCtxPushCurrent) ctx_push_current;
  decltype(&::cuDevicePrimaryCtxRetain) device_primary_ctx_retain;
  decltype(&::cuGetErrorName) get_error_name;
  decltype(&::cuGetErrorString) get_error_string;
  decltype(&::cuMemAddressFree) mem_address_free;
  decltype(&::cuMemAddressReserve) mem_address_reserve;
  decltype(&::cuMemCreate) mem_create;
  decltype(&::cuMemExportToShareableHandle) mem_export;
  decltype(&::cuMemGetAllocationGranularity) mem_granularity;
  decltype(&::cuMemImportFromShareableHandle) mem_import;
  decltype(&::cuMemMap) mem_map;
  decltype(&::cuMemRelease) mem_release;
  decltype(&::cuMemSetAccess) mem_set_access;
  decltype(&::cuMemUnmap) mem_unmap;
};

/// Throws: TransportError if there is no driver, or one that lacks a function.
const Driver& driver();

/// Throws: TransportError "cuda: WHAT: reason" if `result` is an error, which is then forgotten by the runtime.
void check(cudaError_t result, std::string_view what, std::source_location place = std::source_location::current());
void check(CUresult result, std::string_view what, std::source_location place = std::source_location::current());

/// Makes a device current in this thread (its primary context), and its calls harmless to a capture that another thread may have
/// under way; puts back what was current before.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  cudaStreamCaptureMode capture_mode_ = cudaStreamCaptureModeRelaxed;
};

/// Sets memory of `device` to zero and waits for it.
void clear(int device, std::byte* data, size_t num_bytes);

}  // namespace turnout::transport::device
