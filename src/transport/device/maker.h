// What the engine adds to the table of libturnout_cuda.so.
#pragma once

namespace turnout::transport {

/// CudaTable::make_engine; the engine defines it.
void* engine_maker();

}  // namespace turnout::transport
