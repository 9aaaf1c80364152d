// The card as the runtime tells of it; UUIDs, because ordinals differ between processes.
#include "transport/device/gpu.h"

#include <sys/random.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <sstream>

#include "transport/device/driver.h"
#include "turnout/error.h"

namespace turnout::transport::device {

namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "asking device " + std::to_string(device));
  return value;
}

cudaDeviceProp properties(int device) {
  cudaDeviceProp found{};
  check(cudaGetDeviceProperties(&found, device), "asking device " + std::to_string(device));
  return found;
}

std::string hex(const char* bytes, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += "0123456789abcdef"[static_cast<unsigned char>(bytes[i]) >> 4];
    text += "0123456789abcdef"[bytes[i] & 15];
  }
  return text;
}

/// CUDA does not survive a fork, so no two processes that use it share this: it is made after the driver was started.
std::string process_token() {
  static const std::string token = [] {
    char bits[16];
    if (getrandom(bits, sizeof bits, 0) != sizeof bits) throw TransportError("cuda: no random bits to tell processes apart");
    return hex(bits, sizeof bits);
  }();
  return token + "-" + std::to_string(getpid());
}

std::string bus_of(const cudaDeviceProp& p) {
  char text[32];
  std::snprintf(text, sizeof text, "%04x:%02x:%02x", static_cast<unsigned>(p.pciDomainID), static_cast<unsigned>(p.pciBusID),
                static_cast<unsigned>(p.pciDeviceID));
  return text;
}

CUmemAllocationProp pinned_on(int device) {
  CUmemAllocationProp where{};
  where.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  where.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  where.location.id = device;
  return where;
}

/// The ordinal in this process of the GPU that another process describes; -1 if it is not visible here.
int ordinal_of(const std::string& uuid) {
  const int count = num_devices();
  for (int device = 0; device < count; ++device) {
    if (hex(properties(device).uuid.bytes, sizeof(cudaUUID_t)) == uuid) return device;
  }
  return -1;
}

}  // namespace

std::string pack(const RankGpu& gpu) {
  std::ostringstream out;
  out << gpu.uuid << '\n' << gpu.name << '\n' << gpu.bus << '\n' << gpu.process << '\n';
  out << gpu.device << ' ' << gpu.has_vmm << ' ' << gpu.has_fd << ' ' << gpu.granularity;
  return out.str();
}

RankGpu unpack(const std::string& text) {
  std::istringstream in(text);
  RankGpu gpu;
  std::getline(in, gpu.uuid);
  std::getline(in, gpu.name);
  std::getline(in, gpu.bus);
  std::getline(in, gpu.process);
  in >> gpu.device >> gpu.has_vmm >> gpu.has_fd >> gpu.granularity;
  if (!in) throw TransportError("cuda: a rank's description of its GPU is cut short");
  return gpu;
}

RankGpu this_rank(int device) {
  const cudaDeviceProp p = properties(device);
  RankGpu gpu;
  gpu.uuid = hex(p.uuid.bytes, sizeof p.uuid.bytes);
  gpu.name = p.name;
  gpu.bus = bus_of(p);
  gpu.process = process_token();
  gpu.device = device;
  int has_vmm = 0, has_fd = 0;
  const auto get = [&](CUdevice_attribute which) {
    // cudaDeviceGetAttribute takes the driver's numbers, but names only some of them.
    int value = 0;
    const cudaError_t result = cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(which), device);
    if (result != cudaSuccess) (void)cudaGetLastError();
    return result == cudaSuccess ? value : 0;
  };
  has_vmm = get(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  has_fd = get(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  if (has_vmm) {
    const CUmemAllocationProp where = pinned_on(device);
    check(driver().mem_granularity(&gpu.granularity, &where, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), "asking for the granularity of memory");
  }
  gpu.has_vmm = has_vmm != 0;
  gpu.has_fd = has_fd != 0;
  return gpu;
}

std::string reason() {
  int driver_version = 0, runtime_version = 0, count = 0;
  (void)cudaDriverGetVersion(&driver_version);
  (void)cudaRuntimeGetVersion(&runtime_version);
  if (driver_version == 0) return "no NVIDIA driver: libcuda.so.1 cannot be loaded";
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result == cudaSuccess && count > 0) return "";
  (void)cudaGetLastError();
  if (result == cudaSuccess || result == cudaErrorNoDevice) {
    return "the NVIDIA driver sees no GPU (is CUDA_VISIBLE_DEVICES set to nothing, or the device not passed to this container?)";
  }
  const auto text = [](int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); };
  if (result == cudaErrorInsufficientDriver) {
    return "the NVIDIA driver is for CUDA " + text(driver_version) + ", but this library was built with CUDA " + text(runtime_version) +
           ": install a newer driver, or build with an older toolkit";
  }
  return std::string("CUDA does not start: ") + cudaGetErrorString(result) + " (" + cudaGetErrorName(result) + ")";
}

int num_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

std::string describe(int device) {
  const cudaDeviceProp p = properties(device);
  char memory[32];
  std::snprintf(memory, sizeof memory, "%.1f GiB", static_cast<double>(p.totalGlobalMem) / (1 << 30));
  return std::string(p.name) + " (sm_" + std::to_string(p.major) + std::to_string(p.minor) + ", " + std::to_string(p.multiProcessorCount) + " SMs, " +
         memory + ", " + bus_of(p) + ")";
}

int num_sms(int device) { return attribute(cudaDevAttrMultiProcessorCount, device); }

bool has_code(const std::string& built, int major, int minor) {
  std::istringstream words(built);
  for (std::string word; words >> word;) {
    int number = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (error != std::errc()) return true;  // "native" or "all": the build machine knew
    const std::string rest = word.substr(static_cast<size_t>(end - word.data()));
    const bool exact = rest.starts_with("a"), family = rest.starts_with("f");
    const int code_major = number / 10, code_minor = number % 10;
    const bool is_virtual = !exact && !family && !rest.ends_with("-real");  // plain "90" gives both
    if (exact ? code_major == major && code_minor == minor : code_major == major && code_minor <= minor) return true;
    if (is_virtual && (code_major < major || (code_major == major && code_minor <= minor))) return true;
  }
  return false;
}

std::string code_reason(const std::string& built, int device, int major, int minor) {
  if (has_code(built, major, minor)) return "";
  const std::string number = std::to_string(major) + std::to_string(minor);
  return "device " + std::to_string(device) + " is sm_" + number + ", but this library has code for " + built +
         " only: build with -DCMAKE_CUDA_ARCHITECTURES=" + number + " (or TORCH_CUDA_ARCH_LIST=" + std::to_string(major) + "." +
         std::to_string(minor) + ")";
}

std::string device_reason(int device) {
  if (std::string none = reason(); !none.empty()) return none;
  const int count = num_devices();
  if (device < 0 || device >= count) {
    return "there is no CUDA device " + std::to_string(device) + ": this process sees " + std::to_string(count) + ", from 0";
  }
  return code_reason(TURNOUT_CUDA_ARCHITECTURES, device, attribute(cudaDevAttrComputeCapabilityMajor, device),
                     attribute(cudaDevAttrComputeCapabilityMinor, device));
}

std::string peer_reason(const std::vector<RankGpu>& gpus, int rank, int peer) {
  const RankGpu &mine = gpus[static_cast<size_t>(rank)], &theirs = gpus[static_cast<size_t>(peer)];
  if (mine.uuid == theirs.uuid) return "";
  const int ordinal = ordinal_of(theirs.uuid);
  if (ordinal < 0) return "";
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, mine.device, ordinal), "asking for peer access");
  if (can) return "";
  return "the " + mine.to_string() + " (rank " + std::to_string(rank) + ") cannot reach the memory of the " + theirs.to_string() + " (rank " +
         std::to_string(peer) + "): no NVLink joins them and the platform has no peer access over PCIe; cuda_host goes through pinned memory";
}

}  // namespace turnout::transport::device
