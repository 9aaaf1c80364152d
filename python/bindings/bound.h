// Calls whose arguments are read once and used many times.
#pragma once
#include <initializer_list>

#include "bindings/calls.h"

namespace turnout::python {

/// Arguments that were read, and all that they point into. A call changes nothing here: threads may make it side by side.
template <class Args>
struct Bound {
  const BufferHolder* buffer;
  nb::object owner;  ///< of `buffer`
  Call<Args> call;
  bool is_current;  ///< in order of whatever stream is the current one when it is made
};
using BoundDispatch = Bound<DispatchArgs>;
using BoundCombine = Bound<CombineArgs>;

/// Local: what is wrong with an argument is told here only. Throws: InvalidArgument.
BoundDispatch bound_dispatch(BufferHolder& buffer, const DispatchGiven& given, std::initializer_list<nb::handle> arrays);
BoundCombine bound_combine(BufferHolder& buffer, const CombineGiven& given, std::initializer_list<nb::handle> arrays);

}  // namespace turnout::python
