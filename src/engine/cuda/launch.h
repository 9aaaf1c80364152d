// Launches of kernels that follow each other closely.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

namespace turnout::engine::cuda {

/// Loads a kernel, which may take `shared_bytes` of dynamic shared memory: its first launch would load it, and to do that may be to wait
/// for kernels that wait for this very rank.
inline cudaError_t load_kernel(const void* kernel, int shared_bytes = 0) {
  if (shared_bytes > 0) {
    if (const cudaError_t bad = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)) return bad;
  }
  cudaFuncAttributes found;
  return cudaFuncGetAttributes(&found, kernel);
}

/// With `chained` the kernel may start while the one before it in the stream still runs (once all blocks of that one have called
/// let_next_start, or have ended): it must itself wait for what it needs.
template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), int blocks, int threads, size_t shared_bytes, cudaStream_t stream, bool chained,
                          const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = chained ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// A kernel of a whole call, and the same in two parts, which may be launched one by one.
template <class Args>
struct CallKernels {
  void (*whole)(Args), (*sends)(Args), (*receives)(Args);

  cudaError_t launch(const Args& args, bool send, bool receive, int blocks, int threads, cudaStream_t stream) const {
    return launch_kernel(send && receive ? whole : send ? sends : receives, blocks, threads, 0, stream, false, args);
  }
  cudaError_t load() const {
    for (const auto kernel : {whole, sends, receives}) {
      if (const cudaError_t bad = load_kernel(reinterpret_cast<const void*>(kernel))) return bad;
    }
    return cudaSuccess;
  }
};

}  // namespace turnout::engine::cuda
