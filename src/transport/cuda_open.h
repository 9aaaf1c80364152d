// How libturnout_cuda.so opens device windows.
#pragma once
#include <memory>
#include <string>

#include "transport/device_window.h"

namespace turnout::transport::device {

/// open_device_window() once every rank has the library and its GPU is known to be there.
std::unique_ptr<DeviceWindow> open(Bootstrap& bootstrap, const std::string& name, const std::string& memory, int device, size_t num_bytes);

}  // namespace turnout::transport::device
