// Processors other than x86-64: plain C++ for everything.
#include "engine/cpu/rows_tables.h"

namespace turnout::engine {

bool processor_has(Isa isa) { return isa == Isa::plain; }
const RowKernels& avx2_rows() { return plain_rows(); }
const RowKernels& avx512_rows() { return plain_rows(); }

}  // namespace turnout::engine
