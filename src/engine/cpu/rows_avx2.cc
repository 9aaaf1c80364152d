// The row kernels for avx2.
#include "engine/cpu/rows_impl.h"
#include "engine/cpu/rows_isa.h"

namespace turnout::engine {

const RowKernels& row_kernels_avx2() {
  static constexpr RowKernels kernels = table(Isa::avx2);
  return kernels;
}

}  // namespace turnout::engine
