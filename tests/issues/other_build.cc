// A libturnout_cuda.so of another build: the same version, other headers.
#include "transport/build_identity.h"
#include "transport/cuda_table.h"

extern "C" __attribute__((visibility("default"))) const turnout::transport::CudaTable* turnout_cuda() {
  static const turnout::transport::CudaTable table = [] {
    turnout::transport::CudaTable t;
    t.built = TURNOUT_VERSION;
    t.headers = "0123456789abcdef";
    t.layout = turnout::transport::layout_digest();
    t.reason = [] { return std::string("used all the same"); };
    return t;
  }();
  return &table;
}
