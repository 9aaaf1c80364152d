// What low-latency rows look like on their way: flagged words (three 32-bit words of payload and the epoch), so that neither a
// fence nor a signal is needed. Sizes for host and device.
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "engine/cuda/args.h"

namespace turnout::engine::cuda {

/// The arguments of a dispatch, or a form of them in which some are known when the kernel is compiled.
template <class T>
concept AnyDispatch = std::derived_from<T, DispatchArgs>;

/// Of a kernel that both sends and receives. Constants hide the members of the same name.
struct WholeDispatch : DispatchArgs {
  explicit WholeDispatch(const DispatchArgs& a) : DispatchArgs(a) {}
  static constexpr bool sends = true, receives = true;
};

/// What most low_latency dispatches are: to a slab, with new ids, bf16 to fp8.
struct SlabArgs : WholeDispatch {
  explicit SlabArgs(const DispatchArgs& a) : WholeDispatch(a) {}
  static constexpr bool kAlignedIds = true;
  static constexpr int num_topk = 8, num_side = 0, alignment = 1;
  static constexpr bool cached = false, has_weights = true, weights_are_bf16 = false;
  static constexpr DType dtype = DType::bf16;
  static constexpr Quantize quantize = Quantize::fp8_e4m3;
  static constexpr Layout layout = Layout::expert_slab;
  static constexpr int64_t* arrived = nullptr;
};

/// The same of a combine: rows of a slab, plain sums of eight entries.
template <class T>
concept AnyCombine = std::derived_from<T, CombineArgs>;
struct WholeCombine : CombineArgs {
  explicit WholeCombine(const CombineArgs& a) : CombineArgs(a) {}
  static constexpr bool sends = true, receives = true;
};
struct SlabSums : WholeCombine {
  explicit SlabSums(const CombineArgs& a) : WholeCombine(a) {}
  static constexpr int num_topk = 8;
  static constexpr CombineWeights apply = CombineWeights::none;
  static constexpr Layout layout = Layout::expert_slab;
};

constexpr TURNOUT_HOST_DEVICE int64_t words_for(int64_t bytes) { return core::ceil_div(bytes, static_cast<int64_t>(kWordPayload * 4)); }

/// Where rows travel in whole lines (Common::lines): words of 16 bytes of a line; its payload, in bytes, before 32 bits of epoch.
inline constexpr int kLineWords = 8, kLinePayload = 124;
/// Where in a row the payload of word `w` begins.
constexpr TURNOUT_HOST_DEVICE int line_byte(int w) { return w / kLineWords * kLinePayload + w % kLineWords * 16; }

/// A dispatched row, in bytes: x, scales, side arrays, each from a multiple of 16 on; then, where the routing is new, what its
/// receiver must know of every k.
struct RowFormat {
  int32_t scales, side, meta, num_bytes, num_words;  ///< num_words: of 16 bytes, on its way
  bool lines;

  TURNOUT_HOST_DEVICE static RowFormat of(const DispatchArgs& a) {
    RowFormat f{};
    f.scales = static_cast<int32_t>(core::align_up(a.x_bytes, 16));
    f.side = f.scales + static_cast<int32_t>(core::align_up(a.scale_bytes, 16));
    f.meta = f.side;
    for (int s = 0; s < a.num_side; ++s) f.meta += static_cast<int32_t>(core::align_up(a.side[s].bytes, 16));
    f.num_bytes = f.meta + (a.cached ? 0 : a.num_topk * 12);  // id, earlier pairs of it, weight
    f.lines = a.common.lines;
    f.num_words = static_cast<int32_t>(f.lines ? core::ceil_div(int64_t{f.num_bytes}, int64_t{kLinePayload}) * kLineWords : words_for(f.num_bytes));
    return f;
  }
  /// What all its words carry, in bytes.
  TURNOUT_HOST_DEVICE int32_t payload() const { return lines ? num_words / kLineWords * kLinePayload : num_words * kWordPayload * 4; }
};
/// The same, where it is known how rows travel when the kernel is compiled.
template <bool kLines>
struct FormatOf : RowFormat {
  explicit FormatOf(const RowFormat& f) : RowFormat(f) {}
  static constexpr bool lines = kLines;
};
/// Enough, with lines or without, for any dispatch of rows of `row_bytes` (before quantisation) and side arrays of `side_bytes` in all.
constexpr size_t ll_dispatch_bytes(int64_t row_bytes, int64_t side_bytes, int num_topk) {
  const int64_t side = side_bytes ? side_bytes + 15 * int64_t{kMaxSide} : 0;
  return static_cast<size_t>(words_for(core::align_up(row_bytes, 16) + 32 + core::align_up(side, 16) + num_topk * 12) * 16);
}

/// A partial sum: a unit is three chunks of eight channels, which one thread adds. Word j of unit u is at j * units + u, so that
/// neighbours write side by side. Behind them the mask of the k's in the sum, then one scalar per k.
/// Where a row has lines (Arena::ll_combine_lines), the units of eight threads are lines of 128 bytes, and what is still in words comes
/// first: mask, scalars, and of each line the four bytes that the epoch has taken. Where lines begin is the same for all rows of a Buffer,
/// so that no payload ever lies where another call looks for an epoch.
struct PartialFormat {
  static constexpr int kUnit = 24, kLineUnits = 8;
  int32_t units, words_per_unit, mask, num_words;
  int32_t rest, num_flagged, lines;  ///< lines: 0: none; else these are words of 16 bytes as the others are

  TURNOUT_HOST_DEVICE static constexpr PartialFormat of(int64_t hidden, int element_bytes, int num_topk, bool side, size_t lines_at) {
    PartialFormat f{};
    f.units = static_cast<int32_t>(core::ceil_div(core::ceil_div(hidden, int64_t{8}), int64_t{3}));
    const int scalars = side ? (num_topk + kWordPayload - 1) / kWordPayload : 0;
    if (lines_at == 0) {
      f.words_per_unit = kUnit * element_bytes / (kWordPayload * 4);
      f.mask = f.units * f.words_per_unit;
      f.num_words = f.mask + 1 + scalars;
    } else {
      f.units = (f.units + kLineUnits - 1) / kLineUnits * kLineUnits;
      f.words_per_unit = kUnit * element_bytes / 16;
      f.rest = 1 + scalars;
      f.num_flagged = f.rest + f.units / kLineUnits * (f.words_per_unit / kWordPayload);
      f.lines = static_cast<int32_t>(lines_at / 16);
      f.num_words = f.lines + f.units * f.words_per_unit;
    }
    return f;
  }
  TURNOUT_HOST_DEVICE constexpr bool fits(size_t row_bytes) const {
    return static_cast<size_t>(num_words) * 16 <= row_bytes && (lines == 0 || num_flagged <= lines);
  }
};
/// Where lines begin in a staged partial sum, in bytes, if the Buffer has them: behind the words of any sum.
constexpr size_t ll_combine_lines_at(int64_t row_bytes, int num_topk) {
  const PartialFormat two = PartialFormat::of(core::ceil_div(row_bytes, int64_t{2}), 2, num_topk, true, 128);
  const PartialFormat four = PartialFormat::of(core::ceil_div(row_bytes, int64_t{4}), 4, num_topk, true, 128);
  return static_cast<size_t>(core::align_up(int64_t{two.num_flagged > four.num_flagged ? two.num_flagged : four.num_flagged} * 16, int64_t{128}));
}
/// Enough with lines and without.
constexpr size_t ll_combine_bytes(int64_t row_bytes, int num_topk) {
  int32_t most = 0;
  for (const size_t lines_at : {size_t{0}, ll_combine_lines_at(row_bytes, num_topk)}) {
    for (const int element : {2, 4}) {
      const PartialFormat f = PartialFormat::of(core::ceil_div(row_bytes, int64_t{element}), element, num_topk, true, lines_at);
      most = f.num_words > most ? f.num_words : most;
    }
  }
  return static_cast<size_t>(most) * 16;
}

}  // namespace turnout::engine::cuda
