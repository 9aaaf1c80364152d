// What is done to a result after its call: the tail, rows of a capacity that nothing came for, and scales by columns.
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

/// Scales of rows, to columns (DispatchArgs::ScaleColumns), after the call: for the kernels that do not lay them out so themselves.
struct TurnArgs {
  const std::byte* rows = nullptr;
  int64_t scale_bytes = 0;
  uint32_t* columns = nullptr;
  int64_t words = 0, length = 0, num_groups = 1, group_rows = 0;
  const int32_t* counts = nullptr;    ///< as in TailArgs
  const int64_t* num_rows = nullptr;  ///< as in TailArgs; both null: all rows
};
cudaError_t launch_turn_scales(const TurnArgs& args, int num_sms, cudaStream_t stream);

cudaError_t prepare_zero_tail();
cudaError_t launch_zero_tail(const TailArgs& args, int num_sms, cudaStream_t stream);

}  // namespace turnout::engine::cuda
