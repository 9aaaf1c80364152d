// Calls of the C interface that start good and have some fields set to anything. Each is done or refused with a status and
// words; views never reach beyond memory that is there, as a caller's do not.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <vector>

#include "turnout/turnout.h"

namespace {

constexpr int kExperts = 5, kTokens = 6, kHidden = 40, kTopk = 3;
alignas(64) unsigned char memory[size_t{1} << 20];  // what tensors may point to: they begin in its middle
unsigned char* const kMiddle = memory + sizeof memory / 2;

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  bool more() const { return left_ > 0; }
  uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  /// A number that often matters, or eight bytes.
  int64_t number() {
    static constexpr int64_t kOften[] = {
        0,         1,         2,         3,         kTokens, kHidden,          kTopk,     kExperts,  7,         64,    65,   128, -1, -2,
        INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, 1 << 24, int64_t{1} << 31, 1LL << 32, 1LL << 40, 1LL << 62, -1000, 4096, 255, 256};
    const uint8_t which = byte();
    if (which < std::size(kOften)) return kOften[which];
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | byte();
    return static_cast<int64_t>(bits);
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

/// Sets some 4- or 8-byte words of a struct, its size and pointers excepted.
template <class T>
void damage(Input& in, T& value, const std::vector<size_t>& pointers) {
  for (int n = in.byte() % 4; n > 0; --n) {
    const size_t word = in.byte() % (sizeof(T) / 4);
    const int64_t number = in.number();
    const bool wide = word % 2 == 0 && in.byte() % 2 == 0;
    if (word < sizeof(size_t) / 4) continue;
    if (std::any_of(pointers.begin(), pointers.end(), [&](size_t at) { return word * 4 / 8 == at / 8; })) continue;
    std::memcpy(reinterpret_cast<unsigned char*>(&value) + word * 4, &number, wide ? 8 : 4);
  }
}

/// A view whose elements are not all there points nowhere.
void contain(turnout_tensor& t) {
  static constexpr int kSizes[] = {1, 1, 4, 8, 1, 1, 1, 2, 2, 4, 8};
  if (!t.data || t.ndim < 0 || t.ndim > 3) return;
  const int size = t.dtype >= 0 && t.dtype < static_cast<int>(std::size(kSizes)) ? kSizes[t.dtype] : 8;
  double low = 0, high = size;  // does not wrap around, and near the bounds of the memory it is exact
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] < 1) return;
    const double reach = static_cast<double>(t.shape[d] - 1) * static_cast<double>(t.strides[d]) * size;
    (reach < 0 ? low : high) += reach;
  }
  const auto room = static_cast<double>(sizeof memory / 2);
  if (low < -room || high > room) t.data = nullptr;
}

void require(bool good) {
  if (!good) std::abort();
}

void expect_words(turnout_status status) {
  require(status == TURNOUT_OK || status == TURNOUT_INVALID_ARGUMENT);
  if (status != TURNOUT_OK) require(std::strlen(turnout_last_error()) > 10);
}

turnout_buffer_config good_config() {
  turnout_buffer_config c{};
  c.struct_size = sizeof c;
  c.num_experts = kExperts;
  c.dtype = TURNOUT_FP64;
  c.hidden = kHidden;
  c.max_tokens_per_rank = kTokens;
  c.max_side_bytes = 64;
  return c;
}

void configure(Input& in) {
  turnout_buffer_config c = good_config();
  damage(in, c, {offsetof(turnout_buffer_config, expert_to_rank), offsetof(turnout_buffer_config, replica_of)});
  int32_t owners[kExperts], replicas[kExperts];
  for (int32_t& owner : owners) owner = static_cast<int32_t>(in.number());
  for (int32_t& replica : replicas) replica = static_cast<int32_t>(in.number());
  if (c.num_experts <= kExperts && in.byte() % 2) c.expert_to_rank = owners;
  if (c.num_experts <= kExperts && in.byte() % 2) c.replica_of = replicas;
  size_t num_bytes = 0;
  const auto num_ranks = static_cast<int32_t>(in.number());
  const turnout_status status = turnout_required_bytes(&c, num_ranks, &num_bytes);
  expect_words(status);
  if (status == TURNOUT_OK) require(num_bytes >= c.receive_bytes && num_bytes % 4096 == 0 && num_bytes < size_t{1} << 62);
}

turnout_tensor dense(int32_t dtype, int64_t rows, int64_t cols) {
  return turnout_tensor_dense(kMiddle, static_cast<turnout_dtype>(dtype), rows, cols);
}

void combine(Input& in, turnout_buffer* buffer, const turnout_dispatch_result* rows) {
  turnout_dispatch_view view{};
  view.struct_size = sizeof view;
  require(turnout_dispatch_result_view(rows, &view) == TURNOUT_OK);
  turnout_handle* handle = nullptr;
  require(turnout_dispatch_result_handle(rows, &handle) == TURNOUT_OK);
  turnout_combine_args back{};
  back.struct_size = sizeof back;
  back.handle = handle;
  back.y = view.x.ndim == 3 ? dense(TURNOUT_FP32, view.x.shape[0] * view.x.shape[1], kHidden) : dense(TURNOUT_FP32, view.x.shape[0], kHidden);
  if (view.x.ndim == 3) {
    back.y.ndim = 3;
    for (int d = 0; d < 3; ++d) back.y.shape[d] = d == 2 ? kHidden : view.x.shape[d];
    back.y.strides[0] = view.x.shape[1] * kHidden;
    back.y.strides[1] = kHidden;
    back.y.strides[2] = 1;
  }
  damage(in, back, {offsetof(turnout_combine_args, handle)});
  for (turnout_tensor* t : {&back.y, &back.weights, &back.side, &back.out}) {
    if (t->data || t->ndim > 0) t->data = kMiddle;
    contain(*t);
  }
  turnout_combine_result* sum = nullptr;
  expect_words(turnout_combine(buffer, &back, &sum));
  turnout_combine_result_destroy(sum);
  turnout_handle_destroy(handle);
}

void call(Input& in, turnout_buffer* buffer) {
  auto* ids = reinterpret_cast<int64_t*>(kMiddle);  // rows are read from the same bytes: any will do
  for (int i = 0; i < kTokens * kTopk; ++i) ids[i] = in.byte() % 8 == 7 ? in.number() : in.byte() % (kExperts + 1) - 1;
  turnout_dispatch_args args{};
  args.struct_size = sizeof args;
  args.x = dense(in.byte() % 11, kTokens, kHidden);
  args.topk_idx = dense(TURNOUT_I64, kTokens, kTopk);
  if (in.byte() % 2) args.topk_weights = dense(TURNOUT_FP32, kTokens, kTopk);
  args.layout = in.byte() % 3;
  args.has_capacity = args.layout == TURNOUT_EXPERT_SLAB || in.byte() % 2;
  args.capacity = in.byte() % 20;
  args.quantize = in.byte() % 4 ? 0 : in.byte() % 3;
  turnout_tensor side[2] = {dense(TURNOUT_FP32, kTokens, 4), dense(TURNOUT_U8, kTokens, 3)};
  args.side = side;
  args.num_side = in.byte() % 3;
  damage(in, args, {offsetof(turnout_dispatch_args, side), offsetof(turnout_dispatch_args, num_side), offsetof(turnout_dispatch_args, handle)});
  damage(in, side[0], {});
  for (turnout_tensor* t : {&args.x, &args.topk_idx, &args.topk_weights, &args.out, &side[0]}) {
    if (t->data || t->ndim > 0) t->data = kMiddle;
    contain(*t);
  }
  // What is allowed and only costs memory: pages that a result has are written.
  if (args.capacity > 4096 && args.capacity <= INT32_MAX) args.capacity = 4096;
  if (args.expert_alignment > 64 && args.expert_alignment <= 1 << 20) args.expert_alignment = 64;
  turnout_dispatch_result* rows = nullptr;
  const turnout_status status = turnout_dispatch(buffer, &args, &rows);
  expect_words(status);
  if (status == TURNOUT_OK) combine(in, buffer, rows);
  turnout_dispatch_result_destroy(rows);
}

/// One for all inputs: arguments that are refused harm nothing.
turnout_buffer* the_buffer() {
  static turnout_buffer* const buffer = [] {
    turnout_communicator* communicator = nullptr;
    require(turnout_communicator_from_env(nullptr, &communicator) == TURNOUT_OK);  // one rank
    const turnout_buffer_config c = good_config();
    turnout_buffer* made = nullptr;
    require(turnout_buffer_create(communicator, &c, nullptr, &made) == TURNOUT_OK);
    turnout_communicator_destroy(communicator);
    return made;
  }();
  return buffer;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  if (in.byte() % 4 == 0) {
    configure(in);
  } else {
    for (int n = 0; n < 4 && in.more(); ++n) call(in, the_buffer());
    require(turnout_buffer_check(the_buffer()) == TURNOUT_OK);
  }
  return 0;
}
