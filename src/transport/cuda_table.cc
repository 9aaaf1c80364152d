// The one function that libturnout_cuda.so shows.
#include "transport/cuda_table.h"

#include "transport/build_identity.h"
#include "transport/cuda_open.h"
#include "transport/device/gpu.h"
#include "transport/device/maker.h"
#include "transport/device/stream.h"

extern "C" __attribute__((visibility("default"))) const turnout::transport::CudaTable* turnout_cuda() {
  namespace device = turnout::transport::device;
  static const turnout::transport::CudaTable table = [] {
    turnout::transport::CudaTable t;
    t.built = TURNOUT_VERSION;
    t.headers = turnout::transport::kSharedHeaders;
    t.layout = turnout::transport::layout_digest();
    t.reason = device::reason;
    t.num_devices = device::num_devices;
    t.describe = device::describe;
    t.device_reason = device::device_reason;
    t.num_sms = device::num_sms;
    t.open_stream = device::open_stream;
    t.copy_GBps = device::copy_GBps;
    t.make_engine = turnout::transport::engine_maker();
    t.open_device_window = device::open;
    t.set_log_callback = [](turnout::util::LogCallback callback) {
      turnout::util::set_log_callback(std::move(callback), turnout::util::LogLevel::debug);  // whoever gets them drops what is not admitted
    };
    return t;
  }();
  return &table;
}
