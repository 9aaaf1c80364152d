// Litmus tests of how stores become visible to another GPU (litmus.cu).
#pragma once
#include <cstdint>
#include <string>

namespace turnout::testing {

/// How a writer stores and a reader loads 16 bytes per thread.
enum class Access : uint8_t {
  word,       ///< store_word / load_word: the flagged words of the protocol
  stream,     ///< store_stream / load_stream: rows
  vector,     ///< st.v4 / ld.v4, both volatile
  bulk,       ///< a bulk copy from shared memory / load_word
  two_halves  ///< two stores of 8 bytes / load_word: the control, which must be seen torn
};
const char* name(Access access);

struct Litmus {
  uint64_t reads = 0;    ///< of a unit
  uint64_t changes = 0;  ///< reads that showed another value than the read before
  uint64_t torn_words = 0, torn_lines = 0;
  /// Lines whose last word (the flag of a line protocol) was newer than another word of the line.
  uint64_t lines_behind_flag = 0;
};

/// A writer on GPU `writer` stores ever new values into lines of 128 bytes of GPU `reader`, a reader there looks at them. Throws if a CUDA
/// call fails. Runs for about `ms` milliseconds.
Litmus run_litmus(Access access, int writer, int reader, int ms);

}  // namespace turnout::testing
