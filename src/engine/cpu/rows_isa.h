// One table per instruction set; rows.cc chooses.
#pragma once
#include "engine/cpu/rows.h"

namespace turnout::engine {

const RowKernels& row_kernels_plain();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();
/// Whether this processor can run the kernels of `isa`.
bool has_isa(Isa isa);

}  // namespace turnout::engine
