// libFuzzer: any bytes are read or refused with InvalidArgument.
#include <cstddef>
#include <cstdint>
#include <span>

#include "tools/npy.h"
#include "turnout/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  try {
    turnout::tools::parse_npy(std::as_bytes(std::span(data, num_bytes)));
  } catch (const turnout::InvalidArgument&) {
    return 0;  // refused in words: as it should be
  }
  return 0;
}
