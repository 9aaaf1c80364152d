// Values of arguments that are not arrays: words for enumerations, numbers, devices, streams.
#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/state.h"
#include "turnout/types.h"

namespace turnout::python {

/// The place of `word` in `words` (which ends with null). Throws: InvalidArgument naming the argument and the words.
int index_of(nb::handle word, const char* const* words, const char* argument);

template <class Enum>
Enum enum_of(nb::handle word, const char* const* words, const char* argument) {
  return static_cast<Enum>(index_of(word, words, argument));
}

/// A whole number. Throws: InvalidArgument naming the argument.
int64_t integer_of(nb::handle number, const char* argument, int64_t least = INT64_MIN, int64_t most = INT64_MAX);
int int_of(nb::handle number, const char* argument);
bool bool_of(nb::handle value, const char* argument);
std::vector<int> ints_of(nb::handle numbers, const char* argument);

/// Seconds, or a timedelta.
std::chrono::milliseconds duration_of(nb::handle seconds, const char* argument);

/// 'bf16', or a dtype of NumPy's or torch's.
DType dtype_argument(nb::handle dtype, const char* argument);

/// 'cpu', 'cuda', 'cuda:1', torch.device(...), or the number of a GPU.
Device device_of(nb::handle device, const char* argument);

/// The current stream of a framework whose arrays are on a GPU; null where it has none, and for a CPU.
void* current_stream(Framework framework, Device device);

/// That of the framework that the program has imported, torch first: for a call whose arguments do not tell.
Stream usual_stream(Device device);

/// None: the current stream of the framework that `inputs` are of, else the default stream. Else an integer, or an object with
/// cuda_stream (torch), ptr (CuPy) or __cuda_stream__.
Stream stream_of(nb::handle stream, Framework inputs, Device device, const char* argument);

}  // namespace turnout::python
