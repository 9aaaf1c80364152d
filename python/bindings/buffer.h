// What other files see of a Buffer of Python's.
#pragma once
#include <memory>

#include "bindings/bindings.h"
#include "turnout/buffer.h"

namespace turnout::python {

/// The Buffer of a turnout.Buffer. Throws: InvalidArgument if `object` is none, or is closed.
std::shared_ptr<Buffer> buffer_of(nb::handle object);

/// Tells all ranks that this one does not make the call: a call that was given nothing uses up its epoch. Without the interpreter's lock.
template <class Args>
void refuse_quietly(Buffer& buffer, int lane, Stream stream) {
  Args nothing;
  nothing.lane = lane;
  nothing.stream = stream;
  try {
    if constexpr (std::is_same_v<Args, DispatchArgs>) buffer.dispatch(nothing);
    else buffer.combine(nothing);
  } catch (const InvalidArgument&) {
    // Its own error makes way for the one that says why.
  }
}

}  // namespace turnout::python
