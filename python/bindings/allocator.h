// An Allocator that Python supplies: any object with allocate and deallocate.
#pragma once
#include <memory>

#include "bindings/bindings.h"
#include "turnout/allocator.h"

namespace turnout::python {

/// Null for None. Throws: InvalidArgument if the object lacks a method.
std::shared_ptr<Allocator> allocator_of(nb::object object);

/// Says for which stream this thread's call allocates.
class AllocatingFor {
 public:
  explicit AllocatingFor(void* stream);
  AllocatingFor(const AllocatingFor&) = delete;
  AllocatingFor& operator=(const AllocatingFor&) = delete;
  ~AllocatingFor();
};

}  // namespace turnout::python
