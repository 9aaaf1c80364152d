// Ways to share memory, best first; each is tried by all ranks together and refused by all alike.
#include "transport/cuda_open.h"

#include <functional>
#include <utility>
#include <vector>

#include "transport/cuda_host/cuda_host.h"
#include "transport/cuda_p2p/cuda_p2p.h"
#include "transport/device/driver.h"
#include "transport/device/gpu.h"
#include "transport/device/shared.h"
#include "util/log.h"

namespace turnout::transport::device {

namespace {

struct Request {
  Bootstrap& bootstrap;
  std::vector<RankGpu> gpus;
  size_t num_bytes;
};

std::vector<RankGpu> gather(Bootstrap& bootstrap, const std::string& facts, int device) {
  const auto said = tell_all(bootstrap, "device window: places", facts, [&] {
    const CurrentDevice current(device);
    return pack(this_rank(device));
  });
  check_agreed(said, bootstrap.rank(), "device window: places");
  std::vector<RankGpu> gpus;
  for (const Said& rank : said) gpus.push_back(unpack(rank.made));
  return gpus;
}

/// Every GPU can load and store memory of every other.
void require_reach(const Request& request) {
  const int rank = request.bootstrap.rank();
  const auto said = tell_all(request.bootstrap, "cuda_p2p: reach", "", [&] {
    for (int peer = 0; peer < request.bootstrap.num_ranks(); ++peer) {
      if (const std::string reason = peer_reason(request.gpus, rank, peer); !reason.empty()) throw TransportError("cuda_p2p: " + reason);
    }
    return std::string();
  });
  require_agreed(said, rank, "cuda_p2p: reach");
}

std::string no_vmm(const std::vector<RankGpu>& gpus) {
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    const std::string who = "the driver of rank " + std::to_string(rank) + " ";
    if (!gpus[rank].has_vmm) return who + "has no virtual memory management";
    if (gpus[rank].process != gpus[0].process && !(gpus[rank].has_fd && gpus[0].has_fd)) return who + "or 0 shares no memory by descriptor";
  }
  return "";
}

std::unique_ptr<DeviceWindow> vmm(const Request& request) {
  if (const std::string reason = no_vmm(request.gpus); !reason.empty()) throw Refused("cuda_p2p by vmm: " + reason, false);
  require_reach(request);
  return open_vmm(request.bootstrap, request.gpus, request.num_bytes);
}

std::unique_ptr<DeviceWindow> ipc(const Request& request) {
  require_reach(request);
  return open_ipc(request.bootstrap, request.gpus, request.num_bytes);
}

std::unique_ptr<DeviceWindow> host(const Request& request) { return open_cuda_host(request.bootstrap, request.gpus, request.num_bytes); }

using Way = std::unique_ptr<DeviceWindow> (*)(const Request&);

std::vector<Way> ways(const std::string& transport, const std::string& memory) {
  std::vector<Way> result;
  if (transport != "cuda_host" && memory != "ipc") result.push_back(vmm);
  if (transport != "cuda_host" && memory != "vmm") result.push_back(ipc);
  if (transport != "cuda_p2p") result.push_back(host);
  return result;
}

}  // namespace

std::unique_ptr<DeviceWindow> open(Bootstrap& bootstrap, const std::string& name, const std::string& memory, int device, size_t num_bytes) {
  if (name != "auto" && name != "cuda_p2p" && name != "cuda_host") {
    throw InvalidArgument("device transport '" + name + "' is unknown; there are auto, cuda_p2p, cuda_host");
  }
  const std::string facts = name + " (TURNOUT_DEVICE_MEMORY=" + memory + ")";
  const Request request{bootstrap, gather(bootstrap, facts, device), num_bytes};
  std::string reasons;
  for (const Way way : ways(name, memory)) {
    try {
      return way(request);
    } catch (const Refused& refused) {
      if (refused.is_final) throw TransportError(refused.what());
      util::log(util::LogLevel::info, refused.what(), bootstrap.rank());
      if (reasons.find(refused.what()) == reasons.npos) reasons += (reasons.empty() ? "" : "\n  ") + std::string(refused.what());
    }
  }
  throw TransportError(reasons);
}

}  // namespace turnout::transport::device
