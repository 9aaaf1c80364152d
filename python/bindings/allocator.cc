#include "bindings/allocator.h"

#include <utility>

#include "bindings/errors.h"
#include "bindings/lifetime.h"
#include "bindings/tensor.h"

namespace turnout::python {

namespace {

thread_local void* stream_of_call = nullptr;

class PythonAllocator final : public Allocator {
 public:
  PythonAllocator(nb::object allocate, nb::object deallocate, bool is_stream_ordered)
      : allocate_(allocate.release().ptr()), deallocate_(deallocate.release().ptr()), is_stream_ordered_(is_stream_ordered) {}
  ~PythonAllocator() override {
    drop(allocate_);
    drop(deallocate_);
  }

  void* allocate(size_t num_bytes) override {
    const nb::gil_scoped_acquire locked;
    try {
      const nb::object address = nb::borrow(allocate_)(num_bytes, reinterpret_cast<uintptr_t>(stream_of_call));
      return reinterpret_cast<void*>(nb::cast<uintptr_t>(address));
    } catch (nb::python_error& error) {
      throw TransportError("the allocator's allocate(" + std::to_string(num_bytes) + ", stream) raised: " + words_of(error));
    } catch (const nb::cast_error&) {
      throw TransportError("the allocator's allocate(" + std::to_string(num_bytes) + ", stream) must return the address, an integer");
    }
  }
  void deallocate(void* data, size_t num_bytes) noexcept override {
    if (!can_call_python()) return;
    const nb::gil_scoped_acquire locked;
    const nb::error_scope kept;  // an array may go while an exception travels
    try {
      nb::borrow(deallocate_)(reinterpret_cast<uintptr_t>(data), num_bytes);
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("turnout: deallocate of an allocator");
    }
  }
  bool is_stream_ordered() const noexcept override { return is_stream_ordered_; }

 private:
  PyObject *const allocate_, *const deallocate_;  ///< the methods, looked up once
  const bool is_stream_ordered_;
};

}  // namespace

std::shared_ptr<Allocator> allocator_of(nb::object object) {
  if (object.is_none()) return nullptr;
  if (!nb::hasattr(object, "allocate") || !nb::hasattr(object, "deallocate")) {
    throw InvalidArgument("Buffer: allocator is " + describe(object) +
                          ", but must have allocate(num_bytes, stream), which returns an address, and deallocate(address, num_bytes)");
  }
  const bool is_stream_ordered = nb::hasattr(object, "stream_ordered") && nb::cast<bool>(object.attr("stream_ordered"));
  return std::make_shared<PythonAllocator>(object.attr("allocate"), object.attr("deallocate"), is_stream_ordered);
}

AllocatingFor::AllocatingFor(void* stream) { stream_of_call = stream; }
AllocatingFor::~AllocatingFor() { stream_of_call = nullptr; }

}  // namespace turnout::python
