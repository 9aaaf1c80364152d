// Entry points, errors, and the current device.
#include "transport/device/driver.h"

#include <map>
#include <mutex>

#include "transport/device/resources.h"
#include "turnout/error.h"

namespace turnout::transport::device {

namespace {

[[noreturn]] void fail(std::string_view what, std::string_view reason, bool out_of_memory, const std::source_location& place) {
  std::string_view file = place.file_name();
  if (const size_t slash = file.rfind('/'); slash != file.npos) file.remove_prefix(slash + 1);
  std::string text = "cuda: " + std::string(what) + ": " + std::string(reason) + " (" + std::string(file) + ":" + std::to_string(place.line()) + ")";
  if (out_of_memory) {
    text +=
        "; free memory of the GPU, leave more to this process (torch: set_per_process_memory_fraction, or empty_cache before), or make the "
        "Buffer smaller (receive_bytes, max_tokens_per_rank)";
  }
  throw TransportError(text);
}

cudaError_t look_up(const char* name, void** found, cudaDriverEntryPointQueryResult* status) {
#if CUDART_VERSION >= 12050
  return cudaGetDriverEntryPointByVersion(name, found, 12000, cudaEnableDefault, status);
#else  // asks for the form of the toolkit's own release; none of ours has changed between 12.0 and 12.4
  return cudaGetDriverEntryPoint(name, found, cudaEnableDefault, status);
#endif
}

/// Every function of CUDA 12.0 or older, in the form it had then.
template <class Function>
void find(Function& function, const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
  check(look_up(name, &found, &status), "looking up " + std::string(name));
  if (status != cudaDriverEntryPointSuccess || !found) {
    throw TransportError("cuda: the driver has no " + std::string(name) + ": install a newer one");
  }
  function = reinterpret_cast<Function>(found);
}

Driver look_up() {
  Driver d{};
  find(d.ctx_pop_current, "cuCtxPopCurrent");
  find(d.ctx_push_current, "cuCtxPushCurrent");
  find(d.device_primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  find(d.get_error_name, "cuGetErrorName");
  find(d.get_error_string, "cuGetErrorString");
  find(d.mem_address_free, "cuMemAddressFree");
  find(d.mem_address_reserve, "cuMemAddressReserve");
  find(d.mem_create, "cuMemCreate");
  find(d.mem_export, "cuMemExportToShareableHandle");
  find(d.mem_granularity, "cuMemGetAllocationGranularity");
  find(d.mem_import, "cuMemImportFromShareableHandle");
  find(d.mem_map, "cuMemMap");
  find(d.mem_release, "cuMemRelease");
  find(d.mem_set_access, "cuMemSetAccess");
  find(d.mem_unmap, "cuMemUnmap");
  return d;
}

/// The primary context, retained for the life of the process: the runtime keeps it as long, and would not survive its end.
CUcontext primary_context(int device) {
  static std::mutex mutex;
  static std::map<int, CUcontext> contexts;
  const std::lock_guard lock(mutex);
  const auto found = contexts.find(device);
  if (found != contexts.end()) return found->second;
  CUcontext context = nullptr;
  // The runtime numbers devices as the driver does.
  check(driver().device_primary_ctx_retain(&context, device), "retaining the context of device " + std::to_string(device));
  return contexts[device] = context;
}

}  // namespace

const Driver& driver() {
  static const Driver instance = look_up();
  return instance;
}

void check(cudaError_t result, std::string_view what, std::source_location place) {
  if (result == cudaSuccess) return;
  (void)cudaGetLastError();  // else a later, innocent call of the program would report it
  fail(what, std::string(cudaGetErrorString(result)) + " (" + cudaGetErrorName(result) + ")", result == cudaErrorMemoryAllocation, place);
}

void check(CUresult result, std::string_view what, std::source_location place) {
  if (result == CUDA_SUCCESS) return;
  const char *name = nullptr, *text = nullptr;
  driver().get_error_name(result, &name);
  driver().get_error_string(result, &text);
  fail(what, std::string(text ? text : "unknown error") + " (" + (name ? name : std::to_string(result)) + ")", result == CUDA_ERROR_OUT_OF_MEMORY,
       place);
}

CurrentDevice::CurrentDevice(int device) {
  thread_local int last = -1;
  thread_local CUcontext context = nullptr;  // of `last`: every call of a Buffer comes here
  if (last != device) context = primary_context(device), last = device;
  const CUresult pushed = driver().ctx_push_current(context);
  if (pushed != CUDA_SUCCESS) [[unlikely]]
    check(pushed, "making device " + std::to_string(device) + " current");
  (void)cudaThreadExchangeStreamCaptureMode(&capture_mode_);
}

CurrentDevice::~CurrentDevice() {
  (void)cudaThreadExchangeStreamCaptureMode(&capture_mode_);
  CUcontext ours = nullptr;
  driver().ctx_pop_current(&ours);
}

void clear(int device, std::byte* data, size_t num_bytes) {
  const cudaStream_t stream = side_stream(device);
  const auto held = hold_side_streams();
  check(cudaMemsetAsync(data, 0, num_bytes, stream), "clearing memory");
  check(cudaStreamSynchronize(stream), "clearing memory");
}

}  // namespace turnout::transport::device
