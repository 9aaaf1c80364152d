// What libturnout_cuda.so offers to libturnout.so: one C function returns this table. C++ types pass, so both must be of one build.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transport/device_stream.h"
#include "transport/device_window.h"
#include "util/log.h"

namespace turnout::transport {

struct CudaTable {
  static constexpr uint32_t kVersion = 3;  ///< counts changes of this struct; nothing else is read where it is another one
  uint32_t version = kVersion;
  const char* built = "";    ///< version of Turnout
  const char* headers = "";  ///< kSharedHeaders
  uint64_t layout = 0;       ///< layout_digest()

  /// Why no GPU can be used; empty if some can. Starts the driver.
  std::string (*reason)() = nullptr;
  int (*num_devices)() = nullptr;
  /// "NVIDIA H200 (sm_90, 132 SMs, 139.8 GiB, 0000:1a:00)".
  std::string (*describe)(int device) = nullptr;
  /// Why this library cannot run on `device`; empty if it can.
  std::string (*device_reason)(int device) = nullptr;
  int (*num_sms)(int device) = nullptr;
  std::unique_ptr<DeviceStream> (*open_stream)(int device) = nullptr;
  double (*copy_GBps)(std::span<const DeviceCopy> copies) = nullptr;
  /// `name`: "auto", "cuda_p2p" or "cuda_host"; `memory`: "auto", "vmm" or "ipc".
  std::unique_ptr<DeviceWindow> (*open_device_window)(Bootstrap& bootstrap, const std::string& name, const std::string& memory, int device,
                                                      size_t num_bytes) = nullptr;
  /// The library has a log of its own: its lines go to this one.
  void (*set_log_callback)(util::LogCallback callback) = nullptr;
  /// Of the engine, which knows its signature (engine/device_engine.h: MakeDeviceEngine).
  void* make_engine = nullptr;
};

/// Why a table that came from the file `path` cannot be used by this library; empty if it can.
std::string mismatch_of(const CudaTable& table, const std::string& path);

}  // namespace turnout::transport

/// Name of the one function that libturnout_cuda.so shows.
inline constexpr const char* kCudaTableFunction = "turnout_cuda";
extern "C" const turnout::transport::CudaTable* turnout_cuda();
