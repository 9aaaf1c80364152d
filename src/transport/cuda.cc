// Loads libturnout_cuda.so once. A process keeps the answer: a library that was absent stays so.
#include "transport/cuda.h"

#include <exception>
#include <utility>

#include "transport/agree.h"
#include "transport/build_identity.h"
#include "util/dynlib.h"
#include "util/env.h"
#include "util/log.h"

namespace turnout::transport {

namespace {

struct Loaded {
  const CudaTable* table = nullptr;
  std::string reason;
};

const CudaTable* load() {
  const util::Dynlib library("libturnout_cuda.so", util::env().cuda_library);
  const auto function = reinterpret_cast<decltype(&turnout_cuda)>(library.symbol(kCudaTableFunction));
  if (!function) throw TransportError(library.path() + " has no function " + kCudaTableFunction + ": it is not of Turnout");
  const CudaTable* table = function();
  if (const std::string why = mismatch_of(*table, library.path()); !why.empty()) throw TransportError(why);
  table->set_log_callback([](util::LogLevel level, std::string_view text, int rank) { util::log(level, text, rank); });
  return table;
}

const Loaded& loaded() {
  static const Loaded instance = [] {
    Loaded result;
    try {
      result.table = load();
    } catch (const TransportError& error) {
      result.reason =
          std::string(error.what()) + " (the package was built with TURNOUT_CUDA=OFF, or without the file; TURNOUT_CUDA_LIBRARY names another)";
    }
    return result;
  }();
  return instance;
}

}  // namespace

std::string mismatch_of(const CudaTable& table, const std::string& path) {
  std::string theirs = "table " + std::to_string(table.version), ours = "table " + std::to_string(CudaTable::kVersion);
  if (table.version == CudaTable::kVersion) {
    const auto described = [](std::string_view version, std::string_view headers, uint64_t layout) {
      return "Turnout " + std::string(version) + ", headers " + std::string(headers) + ", layout " + std::to_string(layout);
    };
    theirs = described(table.built, table.headers, table.layout);
    ours = described(TURNOUT_VERSION, kSharedHeaders, layout_digest());
    if (theirs == ours) return "";
  }
  return path + " and " + util::own_file() + " are of different builds (" + theirs + ", and " + ours +
         "), so one would misread the other's data: " + "install both from one build";
}

const CudaTable* cuda_table() { return loaded().table; }

std::string cuda_reason() { return loaded().table ? loaded().table->reason() : loaded().reason; }

int num_cuda_devices() { return loaded().table ? loaded().table->num_devices() : 0; }

std::string describe_cuda_device(int device) {
  const std::string reason = cuda_reason();
  return reason.empty() ? loaded().table->describe(device) : reason;
}

std::string cuda_device_reason(int device) {
  const std::string reason = cuda_reason();
  return reason.empty() ? loaded().table->device_reason(device) : reason;
}

namespace {
const CudaTable& table_for(int device) {
  if (const std::string reason = cuda_device_reason(device); !reason.empty()) throw TransportError(reason);
  return *loaded().table;
}
}  // namespace

int num_cuda_sms(int device) { return table_for(device).num_sms(device); }

std::unique_ptr<DeviceStream> open_device_stream(int device) { return table_for(device).open_stream(device); }

double copy_GBps(std::span<const DeviceCopy> copies) {
  for (const DeviceCopy& copy : copies) {
    for (const int device : {copy.from, copy.to}) {
      if (device != DeviceCopy::kHost) table_for(device);
    }
  }
  return loaded().table->copy_GBps(copies);
}

std::unique_ptr<DeviceWindow> open_device_window(Bootstrap& bootstrap, Transport& host, const std::string& name, int device, size_t num_bytes) {
  // A rank without the library tells before the others wait for it in a step that it does not know.
  const std::string facts = "transport '" + name + "' and " + std::to_string(num_bytes) + " bytes";
  const auto said = tell_all(bootstrap, "device window: library", facts, [&] {
    if (host.num_ranks() != bootstrap.num_ranks() || host.rank() != bootstrap.rank()) {
      throw InvalidArgument("the bootstrap of a device window is of rank " + std::to_string(bootstrap.rank()) + " of " +
                            std::to_string(bootstrap.num_ranks()) + ", but its host transport of rank " + std::to_string(host.rank()) + " of " +
                            std::to_string(host.num_ranks()));
    }
    const std::string reason = cuda_device_reason(device);
    if (!reason.empty()) throw TransportError(reason);
    return std::string();
  });
  check_agreed(said, bootstrap.rank(), "device window");
  const std::string asked = name == "auto" ? util::env().device_transport : name;
  return loaded().table->open_device_window(bootstrap, asked, util::env().device_memory, device, num_bytes);
}

}  // namespace turnout::transport
