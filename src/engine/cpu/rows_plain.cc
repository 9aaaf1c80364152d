// The row kernels for any processor.
#include "engine/cpu/rows_impl.h"
#include "engine/cpu/rows_isa.h"

namespace turnout::engine {

const RowKernels& row_kernels_plain() {
  static constexpr RowKernels kernels = table(Isa::plain);
  return kernels;
}

}  // namespace turnout::engine
