// What calls give to Python: results whose arrays are made when they are first asked for, and pending calls.
#pragma once
#include <array>
#include <memory>
#include <utility>

#include "bindings/array.h"
#include "bindings/lifetime.h"
#include "turnout/buffer.h"

namespace turnout::python {

/// A result of the library, and what its memory may be part of: the array that was given as out, the allocator.
template <class Result>
struct Kept {
  std::shared_ptr<Allocator> allocator;  ///< goes last
  Result result;
  PyObject* out = nullptr;
  explicit Kept(Result made) : result(std::move(made)) {}
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() {
    drop(out);
    if (allocator || result.x.device.kind != DeviceKind::cpu) let_go_unlocked(result);
  }
};

/// What a call needs beside the library's own arguments, from its issue to its result.
struct CallContext {
  Framework framework = Framework::numpy;
  void* stream = nullptr;
  nb::object out;  ///< and the scales', as a pair, if they were given, too
  std::shared_ptr<Allocator> allocator;
};

/// A result as Python has it. Arrays keep the memory, not this object: no cycles.
template <class Result, size_t kArrays>
class ResultHolder {
 public:
  ResultHolder(Result result, CallContext context)
      : framework_(context.framework), stream_(context.stream), kept_("result", std::make_shared<Kept<Result>>(std::move(result))) {
    const auto& kept = kept_.get();
    kept->allocator = std::move(context.allocator);
    kept->out = context.out.release().ptr();
  }

  const Result& result() const { return kept_.get()->result; }
  const std::shared_ptr<Allocator>& allocator() const { return kept_.get()->allocator; }
  /// Array number `index`, made once.
  nb::object array(size_t index, const TensorView& view) {
    nb::object& made = arrays_[index];
    if (!made.is_valid()) made = new_array(view);
    return made;
  }
  nb::object new_array(const TensorView& view) const { return array_of(framework_, view, kept_.get(), stream_); }
  bool is_released() const { return !kept_.is_here(); }
  /// Lets go of the memory; what arrays of it are still there keep it.
  void release() {
    for (nb::object& array : arrays_) array.reset();
    kept_.reset();
  }

 private:
  Framework framework_;
  void* stream_;
  Held<Kept<Result>> kept_;
  std::array<nb::object, kArrays> arrays_;
};

using DispatchHolder = ResultHolder<DispatchResult, 11>;
using CombineHolder = ResultHolder<CombineResult, 3>;

/// A call that was issued: its inputs stay until it is waited for.
template <class Pending>
struct PendingHolder {
  PendingHolder(Pending made, CallContext given, nb::object keep)
      : pending("Pending", std::make_shared<Pending>(std::move(made))), context(std::move(given)), inputs(std::move(keep)) {}
  PendingHolder(PendingHolder&&) = default;
  ~PendingHolder() {
    const Unlocked unlocked;  // one that nobody waited for is waited for now
    pending.reset();
  }

  Held<Pending> pending;
  CallContext context;
  nb::object inputs;
};
using PendingDispatchHolder = PendingHolder<PendingDispatch>;
using PendingCombineHolder = PendingHolder<PendingCombine>;

}  // namespace turnout::python
