// GPUs as a rank describes them to its peers, and why one cannot be used.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace turnout::transport::device {

/// What each rank says of its GPU and process, so that all choose alike.
struct RankGpu {
  std::string uuid;        ///< names the GPU (or the MIG slice) on this machine, in every process
  std::string name;        ///< "NVIDIA H200"
  std::string bus;         ///< "0000:1a:00"
  std::string process;     ///< equal for ranks that are threads of one process
  int device = 0;          ///< its ordinal in that process
  bool has_vmm = false;    ///< the driver's virtual memory management
  bool has_fd = false;     ///< ... shared between processes by descriptors
  size_t granularity = 0;  ///< of allocations, where there is VMM

  std::string to_string() const { return name + " at " + bus; }
};

std::string pack(const RankGpu& gpu);
RankGpu unpack(const std::string& text);

/// REQUIRES: `device` exists.
RankGpu this_rank(int device);

/// Why no GPU can be used; empty if some can.
std::string reason();
int num_devices();
std::string describe(int device);
/// Multiprocessors. REQUIRES: `device` exists.
int num_sms(int device);
/// Why this library cannot run on `device`: it is not there, or no code for its architecture is.
std::string device_reason(int device);
/// Whether code built for `built` ("80-real 90a-real 100") runs on a GPU of compute capability major.minor.
bool has_code(const std::string& built, int major, int minor);
/// What to do where it does not; empty if it does.
std::string code_reason(const std::string& built, int device, int major, int minor);

/// Why the GPU of `rank` cannot load and store memory of the GPU of `peer`, both seen from the process of `rank`; empty if it can,
/// or if this process does not see the other GPU and only trying tells.
std::string peer_reason(const std::vector<RankGpu>& gpus, int rank, int peer);

}  // namespace turnout::transport::device
