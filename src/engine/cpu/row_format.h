// How one row of a dispatch looks: as a record in a staging ring, and as a row of the arrays of a result.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/math.h"
#include "engine/cpu/inline_vector.h"
#include "turnout/types.h"

namespace turnout::engine {

/// Byte offsets of the arrays of a result with some number of rows; in the receive region and in fresh memory alike.
struct BlockFormat {
  size_t x = 0, scales = 0, topk_idx = 0, topk_weights = 0, num_bytes = 0;
  PerSide<size_t> side;
};

struct RowFormat {
  // What a row consists of, in bytes; 0 where it has none.
  size_t x_bytes = 0;      ///< after quantisation
  size_t scale_bytes = 0;  ///< of fused quantisation
  PerSide<size_t> side_bytes;
  size_t idx_bytes = 0;     ///< K local experts, int32; 0 if a handle knows them
  size_t weight_bytes = 0;  ///< K weights, fp32

  // Derived.
  size_t x_stride = 0;                               ///< between rows of a result: a multiple of 128
  size_t x_at = 0, scales_at = 0, record_bytes = 0;  ///< in a record; idx at 0, weights behind them
  PerSide<size_t> side_at;

  void derive() {
    x_stride = up(x_bytes, 128);
    x_at = up(idx_bytes + weight_bytes, 64);
    size_t at = up(x_at + x_bytes, 16);
    scales_at = at;
    at = up(at + scale_bytes, 16);
    side_at.clear();
    for (size_t bytes : side_bytes) {
      side_at.push_back(at);
      at = up(at + bytes, 16);
    }
    record_bytes = up(at, 64);
  }

  /// `with_meta`: room for ids and weights as well (rows that their source puts in place).
  BlockFormat block(int64_t rows, bool with_meta) const {
    const auto n = static_cast<size_t>(rows);
    BlockFormat b;
    size_t at = 0;
    auto take = [&](size_t bytes) {
      const size_t here = at;
      at = up(at + bytes, 128);
      return here;
    };
    b.x = take(n * x_stride);
    b.scales = take(n * scale_bytes);
    for (size_t bytes : side_bytes) b.side.push_back(take(n * bytes));
    if (with_meta) {
      b.topk_idx = take(n * idx_bytes);
      b.topk_weights = take(n * weight_bytes);
    }
    b.num_bytes = at;
    return b;
  }

 private:
  static size_t up(size_t n, int64_t to) { return static_cast<size_t>(core::align_up(static_cast<int64_t>(n), to)); }
};

/// Most side arrays of a call.
constexpr size_t kMaxSideArrays = 16;

/// Most bytes of a record of any call that a configuration allows: a dispatched row, or a partial sum in its widest form.
constexpr size_t max_record_bytes(int64_t hidden, DType dtype, int max_topk, size_t max_side_bytes) {
  const auto elements = static_cast<size_t>(hidden);
  const size_t widest = elements * (size_of(dtype) > 4 ? size_of(dtype) : 4);
  const size_t scales = (elements + 127) / 128 * 4;
  const size_t meta = 16 + static_cast<size_t>(max_topk) * 8;
  const size_t padding = 64 + 64 + 16 * (kMaxSideArrays + 2);
  return (meta + widest + scales + max_side_bytes + padding + 63) / 64 * 64;
}

}  // namespace turnout::engine
