// The row kernels for avx512.
#include "engine/cpu/rows_impl.h"
#include "engine/cpu/rows_isa.h"

namespace turnout::engine {

const RowKernels& row_kernels_avx512() {
  static constexpr RowKernels kernels = table(Isa::avx512);
  return kernels;
}

}  // namespace turnout::engine
