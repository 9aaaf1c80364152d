// Which GPU a rank of bench, demo and selftest runs on, what the GPUs of all ranks are, and how fast copies between them can be.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "tools/report.h"
#include "turnout/buffer.h"
#include "turnout/communicator.h"

namespace turnout::tools {

/// "cpu", "cuda" (GPUs in turn) or "cuda:N".
struct DeviceChoice {
  DeviceKind kind = DeviceKind::cpu;
  std::optional<int> index{};
};
/// Throws: InvalidArgument naming --device.
DeviceChoice device_from(const std::string& text);

/// What can be known before a rank starts. Call it before threads are: it prepares the process for ranks that share a GPU.
/// Throws: InvalidArgument (a word, or a GPU that is not there), TransportError with the reason why there is no GPU at all.
DeviceChoice check_device(const std::string& text);

/// --num-sms. Throws: InvalidArgument if the GPU has not as many, or there is none.
void check_num_sms(const DeviceChoice& choice, int num_sms);

/// Of this rank: rank r of a node has GPU r modulo their number.
Device device_of(const DeviceChoice& choice, const Communicator& communicator);

/// The GPUs of all ranks, each once.
struct Gpus {
  std::vector<std::string> words;  ///< "NVIDIA H200 (sm_90, 132 SMs, 139.8 GiB, 0000:1a:00)"; empty where ranks are on the CPU
  std::vector<int> ordinals;       ///< in this process, of each of `words`; -1: not visible here
  bool shared = false;             ///< several ranks on one

  /// "2 x NVIDIA H200, driver 570.124.06"; empty on the CPU.
  std::string summary() const;
};
/// Collective.
Gpus gather_gpus(Communicator& communicator, Device device);

/// "cuda_p2p" or "cuda_host"; of a Buffer on the CPU, that of its ranks.
std::string transport_of(const Buffer& buffer, const Communicator& communicator);

/// What a link carries per direction, GB/s, every GPU sending and receiving at once; null where there is no such link: ranks share a
/// GPU, there is one rank, or rank 0 does not see all GPUs. `transport`: cuda_host is measured through pinned memory. Collective.
std::optional<double> link_GBps(Communicator& communicator, const Gpus& gpus, const std::string& transport);

}  // namespace turnout::tools
