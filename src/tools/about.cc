// The GPU part is asked through its loader, so this prints a reason everywhere.
#include "tools/about.h"

#include "transport/cuda.h"
#include "turnout/communicator.h"

namespace turnout::tools {

std::string about() {
  std::string text = "turnout " + std::string(version()) + "\n";
  const std::string reason = transport::cuda_reason();
  if (!reason.empty()) return text + "cuda: " + reason + "\n";
  for (int device = 0; device < transport::num_cuda_devices(); ++device) {
    const std::string unusable = transport::cuda_device_reason(device);
    text += "cuda: " + std::to_string(device) + ": " + transport::describe_cuda_device(device) + (unusable.empty() ? "" : ": " + unusable) + "\n";
  }
  return text;
}

}  // namespace turnout::tools
