// What the files of the row kernels share: one table per instruction set, and the arithmetic of a block's scale.
#pragma once
#include <cstdint>

#include "engine/cpu/rows.h"

namespace turnout::engine {

const RowKernels& plain_rows();
/// Where the compiler's target has no such instruction set these are the plain ones, and processor_has() is false.
const RowKernels& avx2_rows();
const RowKernels& avx512_rows();

bool processor_has(Isa isa);

/// The scale of a block by the rule of core/scale.h, to `*scale` (fp32) or `*ue8m0`, whichever is given; returns 1 / scale. Compiled
/// once and for any processor: an inline function, compiled for AVX-512 too, could be the copy that the linker keeps.
float write_block_scale(float amax, float* scale, uint8_t* ue8m0);

/// Elements that are added, converted and scaled together.
inline constexpr int64_t kBlock = 128;

/// Below this, or with data that is read again soon, non-temporal stores lose: a fence costs about 0.3 us.
inline constexpr size_t kLeastStreamed = 2048;

}  // namespace turnout::engine
