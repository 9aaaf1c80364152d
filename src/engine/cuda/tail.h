// The tail of a result: rows of a capacity that nothing came for.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace turnout::engine::cuda {

/// Arrays with a row per row of a result, whose tail becomes 0.
struct TailArgs {
  static constexpr int kMost = 19;  ///< rows, scales, weights, side arrays
  struct Rows {
    std::byte* data = nullptr;
    int64_t stride = 0, bytes = 0;
  };
  Rows arrays[kMost];
  int num_arrays = 0;
  int64_t num_groups = 1, group_rows = 0;  ///< slab: experts and their capacity; else one group
  const int32_t* counts = nullptr;         ///< slab: rows of each group
  const int64_t* num_rows = nullptr;       ///< else: rows
  void add(void* data, int64_t stride, int64_t bytes) {
    if (data && bytes > 0) arrays[num_arrays++] = {static_cast<std::byte*>(data), stride, bytes};
  }
};

cudaError_t prepare_zero_tail();
cudaError_t launch_zero_tail(const TailArgs& args, int num_sms, cudaStream_t stream);

}  // namespace turnout::engine::cuda
