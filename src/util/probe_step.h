// What a test may watch the engine do (probe.h).
#pragma once
#include <cstdint>

namespace turnout::util::probe {

enum class Step : uint8_t {
  load,   ///< a signal is about to be read
  raise,  ///< a signal of a peer is about to be raised
  copy,   ///< some bytes of a header or a row have been written or read, others have not
};

}  // namespace turnout::util::probe
