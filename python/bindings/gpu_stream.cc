#include "bindings/gpu_stream.h"

#include <dlfcn.h>

#include <string>

#include "turnout/error.h"

namespace turnout::python {

namespace {

using Result = int;
using Address = uint64_t;

/// The part of the driver's interface that is used here, by its names since CUDA 4.
struct Driver {
  Result (*error_words)(Result, const char**);
  Result (*context_of)(void* stream, void** context);
  Result (*push)(void* context);
  Result (*pop)(void** context);
  Result (*copy)(Address, Address, size_t, void*);

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!library) throw TransportError(std::string("turnout.jax: the program runs on a GPU, but its driver cannot be loaded: ") + dlerror());
    find(library, "cuGetErrorString", error_words);
    find(library, "cuStreamGetCtx", context_of);
    find(library, "cuCtxPushCurrent_v2", push);
    find(library, "cuCtxPopCurrent_v2", pop);
    find(library, "cuMemcpyDtoDAsync_v2", copy);
  }
  template <class Function>
  static void find(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    if (!function) throw TransportError(std::string("turnout.jax: the GPU's driver has no ") + name + ": it is too old");
  }
};

const Driver& driver() {
  static const Driver& loaded = *new Driver;  // for good: threads of XLA's may look while the process ends
  return loaded;
}

void expect(Result result, const char* step) {
  if (result == 0) return;
  const char* words = nullptr;
  driver().error_words(result, &words);
  throw TransportError(std::string("turnout.jax: ") + step + ": " + (words ? words : "error " + std::to_string(result)));
}

Address address_of(const void* data) { return reinterpret_cast<Address>(data); }

}  // namespace

GpuStream::GpuStream(void* stream) : stream_(stream) {
  void* context = nullptr;
  expect(driver().context_of(stream, &context), "asking for the context of a stream");
  expect(driver().push(context), "making a context current");
}

GpuStream::~GpuStream() {
  void* context = nullptr;
  driver().pop(&context);
}

void GpuStream::copy(void* to, const void* from, size_t num_bytes) {
  if (num_bytes > 0) expect(driver().copy(address_of(to), address_of(from), num_bytes, stream_), "copying in memory of a GPU");
}

}  // namespace turnout::python
