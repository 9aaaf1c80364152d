// turnout.jax: dispatch and combine as calls of XLA's foreign function interface (xla_ffi.h).
//
// A program that XLA compiled has arrays and constants. So a Buffer goes in by number, the rank's own one is found by the device that the
// program runs on. Handlers run on threads of XLA's without the interpreter's lock, and write into memory of XLA's.
//
// On a CPU a routing comes out as two numbers. XLA frees an array without telling anybody, so the routings of the last calls are kept in a ring.
// On a GPU all of it is work on XLA's stream, the host is ahead and could not read such numbers: there a routing comes out as its bytes
// (turnout/routing_bytes.h), which XLA keeps and copies as it likes.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/buffer.h"
#include "bindings/gpu_stream.h"
#include "bindings/lifetime.h"
#include "bindings/tensor.h"
#include "bindings/xla_ffi.h"
#include "turnout/routing_bytes.h"

namespace turnout::python {

namespace {

/// The rank of one device, and the routings of its last dispatches.
struct Rank {
  std::weak_ptr<Buffer> buffer;
  std::mutex mutex;
  int32_t last = 0;
  std::vector<Handle> ring;
};

/// The ranks of this process, by number of the turnout.jax.Buffer and of the device. Never destroyed: threads of XLA's may look.
struct Registry {
  std::mutex mutex;
  int64_t last = 0;
  std::map<int64_t, std::map<int, std::shared_ptr<Rank>>> there;
};
Registry& registry() {
  static Registry* const all = new Registry;
  return *all;
}

int64_t register_buffers(nb::dict buffers, int num_handles) {
  std::map<int, std::shared_ptr<Rank>> ranks;
  for (const auto [ordinal, buffer] : buffers) {
    auto rank = std::make_shared<Rank>();
    rank->buffer = buffer_of(buffer);
    rank->ring.resize(static_cast<size_t>(num_handles));
    ranks[int_of(ordinal, "device")] = std::move(rank);
  }
  const std::lock_guard lock(registry().mutex);
  registry().there[++registry().last] = std::move(ranks);
  return registry().last;
}

/// Bytes of a routing of a GPU's.
size_t bytes_of_routing(nb::handle buffer, int64_t num_tokens, int num_topk, bool has_weights, int layout, int64_t capacity, int expert_alignment) {
  const std::shared_ptr<Buffer> here = buffer_of(buffer);
  return routing_bytes(*here, {num_tokens, num_topk, has_weights, static_cast<Layout>(layout), capacity, expert_alignment});
}

void forget_buffers(int64_t number) {
  const std::lock_guard lock(registry().mutex);
  registry().there.erase(number);
}

/// A call of a program, by names.
class Call {
 public:
  explicit Call(const xla::Call& call) : call_(call) {}

  int64_t number(std::string_view name) const {
    const xla::Attributes& all = call_.attributes;
    for (int64_t i = 0; i < all.count; ++i) {
      if (all.names[i]->view() != name || all.types[i] != xla::kScalar || all.scalars[i]->dtype != xla::kS64) continue;
      return *static_cast<const int64_t*>(all.scalars[i]->value);
    }
    throw InvalidArgument("turnout.jax: the call has no attribute " + std::string(name) + ": use the functions of turnout.jax, not its targets");
  }
  int small(std::string_view name) const { return static_cast<int>(number(name)); }
  /// XLA's, on a GPU.
  void* stream() const {
    xla::GetStream asked{{sizeof(xla::GetStream), nullptr}, call_.context, nullptr};
    if (call_.api->get_stream(&asked)) throw InvalidArgument("turnout.jax: XLA does not say on which stream the call runs");
    return asked.stream;
  }
  const xla::Array& input(int64_t index) const { return at(call_.inputs, index); }
  const xla::Array& result(int64_t index) const { return at(call_.results, index); }

  std::shared_ptr<Rank> rank() const {
    // The ordinal of the device is asked for by a function that older ones do not have.
    if (call_.api->header.size < sizeof(xla::Api)) throw InvalidArgument("turnout.jax: this JAX cannot tell a call its device: use JAX 0.8 or newer");
    xla::GetDeviceOrdinal asked{{sizeof(xla::GetDeviceOrdinal), nullptr}, call_.context, 0};
    if (call_.api->get_device_ordinal(&asked)) throw InvalidArgument("turnout.jax: XLA does not say on which device the call runs");
    const int64_t which = number("buffer");
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().there.find(which);
    if (found == registry().there.end()) {
      throw InvalidArgument("the turnout.jax.Buffer of this program is gone: keep it as long as what was compiled with it");
    }
    const auto mine = found->second.find(asked.ordinal);
    if (mine != found->second.end()) return mine->second;
    throw InvalidArgument("turnout.jax: the program runs on device " + std::to_string(asked.ordinal) +
                          ", which is none of the Buffer's: call inside shard_map over the Buffer's mesh, or on the device it was made for");
  }

 private:
  static const xla::Array& at(const xla::Arrays& all, int64_t index) {
    if (index >= all.count) throw InvalidArgument("turnout.jax: the call has " + std::to_string(all.count) + " arrays, which is too few");
    return *all.arrays[index];
  }
  const xla::Call& call_;
};

DType dtype_of(xla::DataType dtype) {
  switch (dtype) {
    case xla::kS8: return DType::i8;
    case xla::kS32: return DType::i32;
    case xla::kS64: return DType::i64;
    case xla::kU8: return DType::u8;
    case xla::kF16: return DType::fp16;
    case xla::kF32: return DType::fp32;
    case xla::kF64: return DType::fp64;
    case xla::kBF16: return DType::bf16;
    case xla::kF8E5M2: return DType::fp8_e5m2;
    case xla::kF8E4M3FN: return DType::fp8_e4m3;
    case xla::kF8E8M0FNU: return DType::ue8m0;
  }
  throw InvalidArgument("turnout.jax: an array is of XLA's type " + std::to_string(dtype) + ", but must be of " + dtype_list());
}

TensorView view_of(const xla::Array& array, Device device = {}) {
  const int64_t* const s = array.shape;
  const DType dtype = dtype_of(array.dtype);
  switch (array.rank) {
    case 1: return TensorView::dense(array.data, dtype, {s[0]}, device);
    case 2: return TensorView::dense(array.data, dtype, {s[0], s[1]}, device);
    case 3: return TensorView::dense(array.data, dtype, {s[0], s[1], s[2]}, device);
    default: throw InvalidArgument("turnout.jax: an array has " + std::to_string(array.rank) + " dimensions, but must have 1 to 3");
  }
}

/// Where a call runs, and how it writes small results: those of 64 bits become 32, and what a result does not fill gets a filler.
class Where {
 public:
  Where(const Call& call, const Rank& rank, bool on_gpu) : buffer_(rank.buffer.lock()) {
    if (!buffer_) throw InvalidArgument("the turnout.jax.Buffer of this program is gone: keep it as long as what was compiled with it");
    device_ = buffer_->config().device;
    if ((device_.kind == DeviceKind::cuda) != on_gpu) {
      throw InvalidArgument(std::string("turnout.jax: the program runs on a ") + (on_gpu ? "GPU" : "CPU") +
                            ", but its Buffer was made for another kind of device: make it for the devices that the program runs on");
    }
    if (!on_gpu) return;
    stream_ = {call.stream()};
    gpu_.emplace(stream_.native);
  }
  Buffer& buffer() const { return *buffer_; }
  Stream stream() const { return stream_; }
  GpuStream* gpu() { return gpu_ ? &*gpu_ : nullptr; }
  TensorView view(const xla::Array& array) const { return view_of(array, device_); }

 private:
  std::shared_ptr<Buffer> buffer_;
  Device device_;
  Stream stream_;
  std::optional<GpuStream> gpu_;
};

/// The values of a dense view in memory of XLA's, which begins with them and goes on with `filler`. Numbers of 64 bits become 32.
template <class T>
void copy(const TensorView& from, const xla::Array& to, T filler) {
  const TensorView room = view_of(to);
  auto* const out = static_cast<T*>(room.data);
  const int64_t size = room.num_elements(), there = from.defined() ? std::min(size, from.num_elements()) : 0;
  if (from.dtype == DType::i64) std::transform(from.as<int64_t>(), from.as<int64_t>() + there, out, [](int64_t n) { return static_cast<T>(n); });
  else if (there > 0) std::memcpy(out, from.data, static_cast<size_t>(there) * sizeof(T));
  std::fill(out + there, out + size, filler);
}

/// Sets to 0 what lies behind `num_rows` rows, or behind the rows of each expert of a slab.
void clear_tail(const TensorView& rows, const DispatchResult& result) {
  const auto clear = [&](int64_t matrix, int64_t size, int64_t present, int64_t row_bytes) {
    std::byte* const first = static_cast<std::byte*>(rows.data) + (matrix * size + present) * row_bytes;
    if (present < size && row_bytes > 0) std::memset(first, 0, static_cast<size_t>((size - present) * row_bytes));
  };
  const auto bytes = static_cast<int64_t>(size_of(rows.dtype));
  if (result.handle.layout() != Layout::expert_slab) {
    clear(0, rows.shape[0], *result.num_rows.as<int64_t>(), bytes * (rows.ndim == 2 ? rows.shape[1] : 1));
    return;
  }
  for (int64_t expert = 0; expert < rows.shape[0]; ++expert) {
    clear(expert, rows.shape[1], result.expert_counts.as<int32_t>()[expert], bytes * (rows.ndim == 3 ? rows.shape[2] : 1));
  }
}

/// The same on a GPU, where numbers of 64 bits are taken as twice as many of 32: the program drops the upper ones.
void copy(GpuStream& gpu, const TensorView& from, const xla::Array& to) {
  const TensorView room = view_of(to);
  const size_t there = from.defined() ? static_cast<size_t>(from.num_elements()) * size_of(from.dtype) : 0;
  gpu.copy(room.data, from.data, std::min(there, static_cast<size_t>(room.num_elements()) * size_of(room.dtype)));
}

/// Of the dispatch that a call belongs to.
RoutingShape shape_of(const Call& call) {
  RoutingShape shape;
  shape.num_tokens = call.number("num_tokens");
  shape.num_topk = call.small("num_topk");
  shape.has_weights = call.number("routing_has_weights") != 0;
  shape.layout = static_cast<Layout>(call.number("layout"));
  shape.capacity = call.number("capacity");
  shape.expert_alignment = call.small("expert_alignment");
  return shape;
}

void expect_size(Buffer& buffer, const RoutingShape& shape, const xla::Array& array) {
  const auto size = static_cast<size_t>(view_of(array).num_elements()), wanted = routing_bytes(buffer, shape);
  if (size == wanted) return;
  throw InvalidArgument("turnout.jax: the routing of this call has " + std::to_string(size) + " bytes, but such a one has " + std::to_string(wanted));
}

/// Keeps a routing: on a CPU, and writes its two numbers; on a GPU XLA does.
void keep(Rank& rank, Where& where, const Call& call, const Handle& handle, const xla::Array& to) {
  if (where.gpu()) {
    expect_size(where.buffer(), shape_of(call), to);
    return store_routing(where.buffer(), handle, to.data, where.stream());
  }
  const std::lock_guard lock(rank.mutex);
  rank.last = rank.last == INT32_MAX ? 1 : rank.last + 1;
  rank.ring[static_cast<size_t>(rank.last) % rank.ring.size()] = handle;
  auto* const numbers = static_cast<int32_t*>(to.data);
  numbers[0] = rank.last;
  numbers[1] = static_cast<int32_t>(call.number("buffer"));
}

Handle kept(Rank& rank, Where& where, const Call& call, const xla::Array& routing) {
  if (where.gpu()) {
    const RoutingShape shape = shape_of(call);
    expect_size(where.buffer(), shape, routing);
    return load_routing(where.buffer(), shape, routing.data);
  }
  int32_t given[2];
  std::memcpy(given, routing.data, sizeof given);
  if (given[1] != static_cast<int32_t>(call.number("buffer")))
    throw InvalidArgument("turnout.jax: this routing is not one of a dispatch of this Buffer");
  const std::lock_guard lock(rank.mutex);
  const int64_t age = int64_t{rank.last} - given[0], size = std::ssize(rank.ring);
  if (given[0] <= 0 || age < 0 || age >= size) {
    throw InvalidArgument("turnout.jax: the routing of this call was made " + std::to_string(age) + " dispatches ago, but the Buffer keeps " +
                          std::to_string(size) + ": make it with a greater num_handles=");
  }
  return rank.ring[static_cast<size_t>(given[0]) % rank.ring.size()];
}

/// Fills `args` with what all calls have and what `read(args)` adds; what it cannot take is told to all ranks.
template <class Args, class Read>
void with_arguments(const Call& call, const Where& where, Args& args, const Read& read) {
  args.lane = call.small("lane");
  args.mode = static_cast<Mode>(call.number("mode"));
  args.num_sms = call.small("num_sms");
  args.stream = where.stream();
  try {
    read(args);
  } catch (const InvalidArgument&) {
    refuse_quietly<Args>(where.buffer(), args.lane, args.stream);
    throw;
  }
}

void write_results(const Call& call, const DispatchResult& got, Layout layout) {
  if (got.topk_weights.defined()) {
    copy<float>(got.topk_weights, call.result(1), 0);
    clear_tail(view_of(call.result(1)), got);
  }
  copy<int32_t>(got.topk_idx, call.result(2), -1);
  if (layout == Layout::rank_major) {
    const TensorView ids = view_of(call.result(2));
    const int64_t present = *got.num_rows.as<int64_t>() * ids.shape[1];
    std::fill(ids.as<int32_t>() + present, ids.as<int32_t>() + ids.num_elements(), -1);
  }
  copy<int32_t>(got.expert_counts, call.result(3), 0);
  copy<int32_t>(got.expert_offsets, call.result(4), 0);
  copy<int32_t>(got.sorted_rows, call.result(5), -1);
  auto* const numbers = static_cast<int32_t*>(call.result(6).data);
  numbers[0] = static_cast<int32_t>(*got.num_rows.as<int64_t>());
  numbers[1] = static_cast<int32_t>(*got.num_dropped.as<int64_t>());
}

void write_results(GpuStream& gpu, const Call& call, const DispatchResult& got) {
  const TensorView* const arrays[] = {&got.topk_weights, &got.topk_idx, &got.expert_counts, &got.expert_offsets, &got.sorted_rows};
  for (int64_t i = 0; i < 5; ++i) copy(gpu, *arrays[i], call.result(i + 1));
  auto* const numbers = static_cast<int32_t*>(call.result(6).data);
  gpu.copy(numbers, got.num_rows.data, 8);
  gpu.copy(numbers + 2, got.num_dropped.data, 8);
}

/// (x, topk_idx[, weights]) -> rows, weights, topk_idx, counts, offsets, sorted_rows, [num_rows, num_dropped], routing
void dispatch(const Call& call, bool on_gpu) {
  const auto rank = call.rank();
  Where where(call, *rank, on_gpu);
  DispatchArgs args;
  with_arguments(call, where, args, [&](DispatchArgs& a) {
    a.x = where.view(call.input(0));
    a.topk_idx = where.view(call.input(1));
    if (call.number("has_weights")) a.topk_weights = where.view(call.input(2));
    a.layout = static_cast<Layout>(call.number("layout"));
    a.capacity = call.number("capacity");
    a.expert_alignment = call.small("expert_alignment");
    a.out = where.view(call.result(0));
    a.zero_tail = where.gpu() != nullptr;  // only the GPU knows how many rows come
  });
  const DispatchResult got = where.buffer().dispatch(args);
  if (where.gpu()) {
    write_results(*where.gpu(), call, got);
  } else {
    clear_tail(args.out, got);
    write_results(call, got, args.layout);
  }
  keep(*rank, where, call, got.handle, call.result(7));
}

/// (x, routing) -> rows, along a known routing
void dispatch_again(const Call& call, bool on_gpu) {
  const auto rank = call.rank();
  Where where(call, *rank, on_gpu);
  DispatchArgs args;
  Handle handle;
  with_arguments(call, where, args, [&](DispatchArgs& a) {
    a.x = where.view(call.input(0));
    handle = kept(*rank, where, call, call.input(1));
    a.handle = &handle;
    a.layout = handle.layout();
    a.out = where.view(call.result(0));
    a.zero_tail = where.gpu() != nullptr;
  });
  const DispatchResult got = where.buffer().dispatch(args);
  if (!where.gpu()) clear_tail(args.out, got);
}

/// (y, routing[, weights][, side]) -> sums, side
void combine(const Call& call, bool on_gpu) {
  const auto rank = call.rank();
  Where where(call, *rank, on_gpu);
  CombineArgs args;
  Handle handle;
  with_arguments(call, where, args, [&](CombineArgs& a) {
    a.y = where.view(call.input(0));
    handle = kept(*rank, where, call, call.input(1));
    a.handle = &handle;
    const bool has_weights = call.number("has_weights") != 0;
    if (has_weights) a.weights = where.view(call.input(2)), a.apply = CombineWeights::rows;
    if (call.number("has_side")) a.side = where.view(call.input(has_weights ? 3 : 2));
    a.wire = static_cast<Wire>(call.number("wire"));
    a.out = where.view(call.result(0));
  });
  const CombineResult got = where.buffer().combine(args);
  if (!args.side.defined()) return;
  if (where.gpu()) copy(*where.gpu(), got.side, call.result(1));
  else copy<float>(got.side, call.result(1), 0);
}

xla::Error* error_of(const xla::Call& call, xla::ErrorCode code, const char* words) {
  xla::CreateError made{{sizeof(xla::CreateError), nullptr}, words, code};
  return call.api->create_error(&made);
}

/// A handler: answers what XLA asks when it is registered, and does the call.
template <auto body, bool kOnGpu>
xla::Error* handler(xla::Call* call) {
  if (call->header.extension && call->header.extension->type == xla::kMetadata) {
    xla::Metadata& answer = *reinterpret_cast<xla::MetadataExtension*>(call->header.extension)->metadata;
    answer.version = {{sizeof(xla::Version), nullptr}, xla::kMajor, xla::kMinor};
    // Older releases take handlers of their own version only; what is used here has not changed since.
    if (call->api && call->api->version.major == xla::kMajor) answer.version.minor = std::min(xla::kMinor, call->api->version.minor);
    answer.traits = 0;
    return nullptr;
  }
  if (call->stage != xla::kExecute) return nullptr;
  try {
    const UnderWay under_way;
    body(Call(*call), kOnGpu);
    return nullptr;
  } catch (const InvalidArgument& why) {
    return error_of(*call, xla::kInvalidArgument, why.what());
  } catch (const PeerTimeout& why) {
    return error_of(*call, xla::kDeadlineExceeded, why.what());
  } catch (const PeerFailed& why) {
    return error_of(*call, xla::kUnavailable, why.what());
  } catch (const Error& why) {
    return error_of(*call, xla::kFailedPrecondition, why.what());
  } catch (const std::exception& why) {
    return error_of(*call, xla::kInternal, why.what());
  }
}

template <bool kOnGpu>
nb::dict handlers_of() {
  const auto capsule = [](auto* handler) { return nb::capsule(reinterpret_cast<const void*>(handler), "xla._CUSTOM_CALL_TARGET"); };
  nb::dict all;
  all["turnout_dispatch"] = capsule(&handler<&dispatch, kOnGpu>);
  all["turnout_dispatch_again"] = capsule(&handler<&dispatch_again, kOnGpu>);
  all["turnout_combine"] = capsule(&handler<&combine, kOnGpu>);
  return all;
}

nb::dict handlers(bool on_gpu) { return on_gpu ? handlers_of<true>() : handlers_of<false>(); }

}  // namespace

void bind_jax(nb::module_& m) {
  m.def("xla_handlers", &handlers, nb::arg("on_gpu"), nb::sig("def xla_handlers(on_gpu: bool) -> dict[str, Any]"),
        "Handlers for jax.ffi.register_ffi_target, by target.");
  m.def("xla_register", &register_buffers, nb::arg("buffers"), nb::arg("num_handles"),
        nb::sig("def xla_register(buffers: dict[int, Buffer], num_handles: int) -> int"),
        "The number by which programs find these Buffers, one for each device of this process; the last num_handles routings are kept.");
  m.def("xla_routing_bytes", &bytes_of_routing, nb::arg("buffer"), nb::arg("num_tokens"), nb::arg("num_topk"), nb::arg("has_weights"),
        nb::arg("layout"), nb::arg("capacity"), nb::arg("expert_alignment"),
        nb::sig("def xla_routing_bytes(buffer: Buffer, num_tokens: int, num_topk: int, has_weights: bool, layout: int, capacity: int, "
                "expert_alignment: int) -> int"),
        "Bytes that the routing of such a dispatch on a GPU has.");
  m.def("xla_forget", &forget_buffers, nb::arg("number"), "What xla_register() did is undone.");
}

}  // namespace turnout::python
