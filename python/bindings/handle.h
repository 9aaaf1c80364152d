// A Handle of Python's.
#pragma once
#include <memory>
#include <utility>

#include "bindings/lifetime.h"
#include "turnout/allocator.h"
#include "turnout/handle.h"

namespace turnout::python {

/// A Handle, and what it needs: on a GPU it keeps the memory of its Buffer, which gives back to the Buffer's allocator when it ends.
struct KeptHandle {
  std::shared_ptr<Allocator> allocator;  ///< goes last
  Handle handle;
  KeptHandle(Handle made, std::shared_ptr<Allocator> of_buffer) : allocator(std::move(of_buffer)), handle(std::move(made)) {}
  KeptHandle(const KeptHandle&) = delete;
  KeptHandle& operator=(const KeptHandle&) = delete;
  ~KeptHandle();
};

struct HandleHolder {
  HandleHolder(Handle made, std::shared_ptr<Allocator> allocator)
      : HandleHolder(std::make_shared<KeptHandle>(std::move(made), std::move(allocator))) {}
  explicit HandleHolder(std::shared_ptr<KeptHandle> made) : kept("Handle", std::move(made)) {}
  const Handle& handle() const { return kept.get()->handle; }
  Held<KeptHandle> kept;
};

}  // namespace turnout::python
