// The engine as libturnout.so asks for it, through the table of libturnout_cuda.so.
#include "engine/cuda/engine.h"
#include "transport/device/maker.h"

namespace turnout::engine::cuda {

namespace {
std::shared_ptr<DeviceEngine> make_engine(DeviceEngineSetup setup) { return std::make_shared<Engine>(std::move(setup)); }
}  // namespace

}  // namespace turnout::engine::cuda

namespace turnout::transport {

void* engine_maker() {
  const engine::MakeDeviceEngine make = engine::cuda::make_engine;
  return reinterpret_cast<void*>(make);
}

}  // namespace turnout::transport
