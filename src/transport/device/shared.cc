// Agreement and the facts of a group of GPUs.
#include "transport/device/shared.h"

#include <algorithm>

namespace turnout::transport::device {

void require_agreed(const std::vector<Said>& all, int rank, std::string_view step) {
  try {
    check_agreed(all, rank, step);
  } catch (const TransportError& error) {
    // Judged by what all ranks said, not by this rank's own words, so that all go on alike.
    const bool full = std::any_of(all.begin(), all.end(), [](const Said& said) { return said.refusal.find("out of memory") != said.refusal.npos; });
    throw Refused(error.what(), full);
  }
}

bool WindowBase::has_strangers() const {
  for (size_t rank = 0; rank < gpus_.size(); ++rank) {
    if (!in_this_process(rank)) return true;
  }
  return false;
}

std::vector<int> WindowBase::devices_of_this_process() const {
  std::vector<int> devices;
  for (size_t rank = 0; rank < gpus_.size(); ++rank) {
    if (in_this_process(rank) && std::find(devices.begin(), devices.end(), gpus_[rank].device) == devices.end())
      devices.push_back(gpus_[rank].device);
  }
  return devices;
}

DeviceLink WindowBase::link_by_gpu(int rank) const {
  if (rank == rank_) return DeviceLink::self;
  return gpus_[static_cast<size_t>(rank)].uuid == mine().uuid ? DeviceLink::same_device : DeviceLink::peer;
}

}  // namespace turnout::transport::device
