// Arrays that Python gives: NumPy by its buffer, torch by its methods, all others by DLPack.
#pragma once
#include <string>

#include "bindings/bindings.h"
#include "bindings/state.h"
#include "turnout/tensor.h"

namespace turnout::python {

/// A view of an array, and what must live as long as the view is used.
struct Input {
  TensorView view;
  nb::object keep;
  Framework framework = Framework::none;
};

/// An array by DLPack whose elements are said to be of another type of the same size.
struct Tagged {
  nb::object base;
  DType dtype;
};

/// How elements lie in memory: rows whose own elements are adjacent, all one after the other, or as they like.
enum class Form : uint8_t { rows, dense, any };

/// What is asked of an array.
struct Wanted {
  const char* call = "";  ///< "dispatch"
  const char* name = "";  ///< "topk_idx"
  Form form = Form::rows;
  bool is_written = false;       ///< an output
  void* stream = nullptr;        ///< that orders a foreign array's contents before the call
  std::optional<DType> dtype{};  ///< what its elements are said to be
};

/// The view of `array`. Throws: InvalidArgument naming the argument, what came and what would do.
Input input_of(nb::handle array, const Wanted& wanted);

/// What an object is, in words: "int16[4, 2] of numpy", "a list".
std::string describe(nb::handle object);

}  // namespace turnout::python
