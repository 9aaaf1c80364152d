// Processors other than x86-64: plain C++ for everything.
#include "engine/cpu/rows_isa.h"

namespace turnout::engine {

bool has_isa(Isa isa) { return isa == Isa::plain; }
const RowKernels& row_kernels_avx2() { return row_kernels_plain(); }
const RowKernels& row_kernels_avx512() { return row_kernels_plain(); }

}  // namespace turnout::engine
