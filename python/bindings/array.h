// Arrays that Python gets: views of results that keep the memory alive, as the framework of the inputs has them.
#pragma once
#include <memory>

#include "bindings/bindings.h"
#include "bindings/state.h"
#include "turnout/tensor.h"

namespace turnout::python {

/// A view of memory that `owner` keeps. Any library takes it by DLPack, NumPy also by __array__.
struct Array {
  TensorView view;
  std::shared_ptr<void> owner;
  void* stream = nullptr;  ///< on a GPU: what is in the memory is there in order of this stream
};

/// An array of NumPy's, of torch's, or an Array; None if the view was not given.
nb::object array_of(Framework framework, const TensorView& view, const std::shared_ptr<void>& owner, void* stream);

}  // namespace turnout::python
