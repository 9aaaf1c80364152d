// The expert side of a combine: partial sums, streamed back to the sources of their rows.
#include <algorithm>
#include <cstring>

#include "engine/cpu/combine_call.h"
#include "engine/cpu/mutation.h"

namespace turnout::engine {

using core::BufferLayout;
using internal::Routing;

bool CombineCall::send() {
  if (sends_left_ == 0) return false;
  bool moved = false;
  for (int step = 1; step < context_->num_ranks; ++step) moved |= send_to((context_->rank + step) % context_->num_ranks);
  return moved;
}

bool CombineCall::send_to(int source) {
  const auto at = static_cast<size_t>(source);
  const auto count = static_cast<int64_t>(outgoing_[at].size());
  int64_t& next = next_[at];
  if (next >= count || !header_sent(source)) return false;
  const int64_t taken = std::min(count_of(source, BufferLayout::kSpace), next);
  const int64_t batch = std::min(
      {count - next, slots_ - (next - taken), std::max<int64_t>(1, std::min(kBytesPerSignal / static_cast<int64_t>(record_bytes_), slots_ / 4))});
  if (batch <= 0) return false;
  const size_t ring = context_->layout.ring_at(lane_, copy_, context_->rank);
  std::byte* there = context_->peer(source);
  const int64_t first = next;
  if (mutated(Mutation::sums_raised_before_written)) {
    raise(source, BufferLayout::kProduced, progress_value(epoch_, static_cast<uint64_t>(next + batch)));
  }
  context_->parallel_for(batch, 2, [&](int64_t from, int64_t to) {
    thread_local std::vector<std::byte> assembled;
    for (int64_t i = first + from; i < first + to; ++i) {
      const size_t offset = ring + static_cast<size_t>(i % slots_) * record_bytes_;
      check_address(Region::ring, source, i, offset, record_bytes_);
      if (sums_) [[unlikely]] {
        put_checked(source, i);
      } else if (there) {
        write_record(source, i, there + offset);
      } else {
        assembled.assign(record_bytes_, std::byte{0});
        write_record(source, i, assembled.data());
        context_->window->put(source, offset, assembled.data(), record_bytes_);
      }
    }
  });
  next += batch;
  sends_left_ -= batch;
  if (sums_ && next == count) [[unlikely]]
    send_total(source);
  raise(source, BufferLayout::kProduced, progress_value(epoch_, static_cast<uint64_t>(next)));
  return true;
}

void CombineCall::write_record(int source, int64_t i, std::byte* record) const {
  const Routing& r = *routing_;
  const Outgoing& out = outgoing_[static_cast<size_t>(source)][static_cast<size_t>(i)];
  Meta meta{static_cast<int32_t>(out.row - r.recv_begin[static_cast<size_t>(source)]), out.k, 0.0f, 0.0f};
  auto* side = reinterpret_cast<float*>(record + sizeof(Meta));
  if (out.k >= 0) {
    const int64_t position = r.position[static_cast<size_t>(out.row * r.num_topk + out.k)];
    context_->kernels.copy_row_streaming(record + row_at_, y_row(position), wire_bytes_);
    if (args_.apply == CombineWeights::rows) meta.weight = weight_at(position);
    if (side_floats_) side[0] = side_of(out.row, out.k);
  } else {
    meta.lost_or_k = send_partial(out.row, record);
    for (size_t k = 0; k < side_floats_; ++k) side[k] = side_of(out.row, static_cast<int>(k));
  }
  util::probe::at(util::probe::Step::copy);
  std::memcpy(record, &meta, sizeof meta);
}

/// The partial sum of a row, written past the caches: the lines of a record are in those of its reader, and to own each of
/// them first costs ten times the copy.
int32_t CombineCall::send_partial(int64_t row, std::byte* record) const {
  auto* scales = reinterpret_cast<float*>(record + scales_at_);
  if (routing_->layout == Layout::rank_major && args_.apply == CombineWeights::none && wire_dtype() == args_.y.dtype) {
    context_->kernels.copy_row_streaming(record + row_at_, y_row(row), wire_bytes_);
    return 0;
  }
  thread_local std::vector<std::byte> sum;
  if (sum.size() < wire_bytes_) sum.resize(wire_bytes_);
  const int32_t lost = partial_sum(row, sum.data(), scales);
  context_->kernels.copy_row_streaming(record + row_at_, sum.data(), wire_bytes_);
  return lost;
}

/// Adds the terms of a row of this rank in k order, weighted if asked, rounded once to the wire's form. Returns how many
/// terms the capacity dropped.
int32_t CombineCall::partial_sum(int64_t row, void* out, float* out_scales) const {
  const Routing& r = *routing_;
  RowRef terms[kMaxTopk];
  float weights[kMaxTopk];
  int n = 0;
  int32_t lost = 0;
  if (r.layout == Layout::rank_major) {
    terms[0].data = y_row(row);
    if (args_.apply == CombineWeights::rows) weights[0] = weight_at(row);
    n = 1;
    if (args_.apply == CombineWeights::none && wire_dtype() == args_.y.dtype) {
      context_->kernels.copy_row(out, terms[0].data, wire_bytes_);
      return 0;
    }
  } else {
    for (int k = 0; k < r.num_topk; ++k) {
      const auto at = static_cast<size_t>(row * r.num_topk + k);
      if (r.recv_idx[at] < 0) continue;
      if (r.position[at] < 0) {
        ++lost;
        continue;
      }
      terms[n].data = y_row(r.position[at]);
      if (args_.apply == CombineWeights::source) weights[n] = r.recv_weights[at];
      if (args_.apply == CombineWeights::rows) weights[n] = weight_at(r.position[at]);
      ++n;
    }
  }
  context_->kernels.sum_rows(terms, args_.apply == CombineWeights::none ? nullptr : weights, n, args_.y.dtype, hidden_, out, out_scales, wire_dtype(),
                             in_double());
  return lost;
}

/// Row of y at a position of the result: slabs are flat here.
const std::byte* CombineCall::y_row(int64_t position) const {
  if (args_.y.ndim == 2) return args_.y.row(position);
  const int64_t capacity = args_.y.shape[1];
  return args_.y.row(position / capacity) + position % capacity * args_.y.strides[1] * static_cast<int64_t>(size_of(args_.y.dtype));
}

float CombineCall::weight_at(int64_t at) const {
  if (args_.weights.dtype == DType::fp32) return args_.weights.as<const float>()[at];
  const uint32_t bits = static_cast<uint32_t>(args_.weights.as<const uint16_t>()[at]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float CombineCall::side_of(int64_t row, int k) const {
  const Routing& r = *routing_;
  const auto at = static_cast<size_t>(row * r.num_topk + k);
  if (r.recv_idx[at] < 0) return 0.0f;
  if (r.layout == Layout::rank_major) return args_.side.as<const float>()[at];
  return r.position[at] < 0 ? 0.0f : args_.side.as<const float>()[r.position[at]];
}

}  // namespace turnout::engine
