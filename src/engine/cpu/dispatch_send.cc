// The send side of a dispatch: the offer, rows put in place, rows put into rings.
#include <algorithm>
#include <cstring>

#include "core/bytes.h"
#include "engine/cpu/dispatch_call.h"
#include "engine/cpu/mutation.h"

namespace turnout::engine {

using core::BufferLayout;
using internal::Routing;

namespace {
/// In low_latency mode at most so many bytes to one rank travel with the header; more are worth a look at all headers
/// first, because they can then be put in place in one pass: a signal is faster than a second copy.
constexpr int64_t kEagerBytes = 1 << 10;
}  // namespace

/// Room that the caller asks for is a matter of the arguments where the rows are known beforehand (a capacity, a handle): too
/// little is refused like any other, and so is an allocator that fails. With size=exact only the counts tell, and the header announces a verdict.
void DispatchCall::check_room() {
  if (!args_.out.defined() && args_.result != ResultKind::lease) return;
  const Routing& r = routing();
  mine_.owes_verdict = !cached_ && r.capacity < 0;
  if (mine_.owes_verdict || !args_.out.defined()) return;
  const int64_t needed = r.layout == Layout::expert_slab ? r.experts->num_local(context_->rank) * r.capacity : r.result_rows();
  if (std::string text = no_room(needed); !text.empty()) throw InvalidArgument(text);
}

/// Empty if `needed` rows fit in the caller's `out`.
std::string DispatchCall::no_room(int64_t needed) const {
  const int64_t room = args_.out.num_elements() / args_.out.shape[static_cast<size_t>(args_.out.ndim - 1)];
  if (room >= needed) return {};
  return "dispatch: out has room for " + std::to_string(room) + " rows, but the result has " + std::to_string(needed) +
         "; nothing was delivered on any rank";
}

std::string DispatchCall::no_lease(size_t needed) const {
  return "dispatch: result=lease, but the result needs " + std::to_string(needed) + " bytes and the largest gap of the receive region has " +
         std::to_string(context_->pool.largest_gap()) + " of " + std::to_string(context_->pool.num_bytes()) +
         "; release earlier results, raise receive_bytes, or use result=auto; nothing was delivered on any rank";
}

std::shared_ptr<ResultMemory> DispatchCall::memory_of(const std::optional<BlockPool::Block>& block) const {
  return block ? new_memory(context_->shared_from_this(), *block) : nullptr;
}

/// The lowest gap of the receive region that fits, or nothing.
std::shared_ptr<ResultMemory> DispatchCall::lease_of(size_t num_bytes) const { return memory_of(context_->pool.take(num_bytes)); }

/// Memory of the caller's allocator.
std::shared_ptr<ResultMemory> DispatchCall::fresh_memory(size_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  auto memory = new_memory(context_->shared_from_this(), num_bytes);
  if (wants_lease()) context_->count_fresh_result(num_bytes);
  return memory;
}

void DispatchCall::make_offer() {
  const Routing& r = routing();
  const bool by_rank = r.layout == Layout::rank_major;
  if (cached_ || r.capacity >= 0) {
    const int64_t n = r.layout == Layout::expert_slab ? r.experts->num_local(context_->rank) * r.capacity : r.result_rows();
    const size_t needed = format_.block(n, by_rank && format_.idx_bytes > 0).num_bytes;
    if (wants_lease()) offer_ = lease_of(needed);
    if (!offer_ && needed > 0 && args_.result == ResultKind::lease) throw InvalidArgument(no_lease(needed));
    if (!offer_) memory_ = fresh_memory(format_.block(n, false).num_bytes);
  } else if (by_rank && wants_lease()) {
    const int64_t most = context_->num_ranks * context_->config.max_tokens_per_rank;
    offer_ = memory_of(context_->pool.take_largest(format_.block(most, format_.idx_bytes > 0).num_bytes));
  }
  if (!offer_ || !by_rank) return;  // nobody but this rank writes blocks of the other layouts
  mine_.offer_offset = static_cast<int64_t>(offer_->lease().offset);
  mine_.offer_bytes = static_cast<int64_t>(offer_->lease().num_bytes);
}

/// Whether rows to `peer` may leave before its header is here: they go to its ring whatever the header says.
bool DispatchCall::early(int peer) const {
  if (!low_latency_) return false;
  const int64_t rows = my_rows_[static_cast<size_t>(peer)];
  return routing().layout != Layout::rank_major || rows * static_cast<int64_t>(format_.record_bytes) <= kEagerBytes;
}

int64_t DispatchCall::block_rows(int rank) const { return routing().capacity >= 0 ? routing().capacity : total_[static_cast<size_t>(rank)]; }

int64_t DispatchCall::admitted(int source, int destination) const {
  return admitted_[static_cast<size_t>(source) * static_cast<size_t>(context_->num_ranks) + static_cast<size_t>(destination)];
}

/// Both ends decide alike, from the headers that all ranks see.
DispatchCall::Path DispatchCall::choose_path(int source, int destination, bool block_fits) const {
  const int64_t count = rows(source, destination);
  if (count == 0 || source == destination) return Path::none;
  const bool eager = low_latency_ && count * static_cast<int64_t>(format_.record_bytes) <= kEagerBytes;
  return !eager && block_fits ? Path::direct : Path::streamed;
}

bool DispatchCall::send() {
  if (sends_left_ == 0 && planned_) return false;
  bool moved = false;
  for (int step = 1; step < context_->num_ranks; ++step) {
    const int peer = (context_->rank + step) % context_->num_ranks;
    if (!header_sent(peer)) continue;
    if (planned_ ? path_to(peer) == Path::streamed : early(peer)) moved |= send_stream(peer);
  }
  if (planned_) moved |= send_direct();
  return moved;
}

/// A slice of the tokens, each to all its direct destinations while it is in cache.
bool DispatchCall::send_direct() {
  const internal::Routing& r = routing();
  if (next_token_ >= r.num_tokens) return false;
  const PerRank<int>& peers = direct_peers_;
  if (peers.empty()) {
    next_token_ = r.num_tokens;
    return false;
  }
  struct Job {
    int peer;
    int64_t row, token;
  };
  const int64_t end = std::min(r.num_tokens, next_token_ + std::max<int64_t>(256, r.num_tokens / 8));
  const bool alone = context_->threads.num_threads() == 1;
  std::vector<Job> jobs;
  for (size_t i = 0; i < peers.size() && mutated(Mutation::rows_raised_before_written); ++i) {
    const int64_t all = targets_[static_cast<size_t>(peers[i])].admitted;
    raise(peers[i], BufferLayout::kRows, progress_value(epoch_, static_cast<uint64_t>(all)));
  }
  for (int64_t token = next_token_; token < end; ++token) {
    for (int peer : peers) {
      const auto at = static_cast<size_t>(peer);
      int64_t& next = next_[at];
      if (next >= my_rows_[at] || r.send_tokens[static_cast<size_t>(r.send_begin[at] + next)] != token) continue;
      const Target& target = targets_[at];
      const int64_t row = target.first_row + next;
      if (next < target.admitted && alone) write_direct(peer, row, token);
      else if (next < target.admitted) jobs.push_back({peer, row, token});
      ++next;
      --sends_left_;
    }
  }
  context_->parallel_for(static_cast<int64_t>(jobs.size()), 8, [&](int64_t from, int64_t to) {
    for (int64_t j = from; j < to; ++j) {
      const Job& job = jobs[static_cast<size_t>(j)];
      write_direct(job.peer, job.row, job.token);
    }
  });
  next_token_ = end;
  for (int peer : peers) {
    const int64_t there = std::min(next_[static_cast<size_t>(peer)], targets_[static_cast<size_t>(peer)].admitted);
    if (sums_ && next_[static_cast<size_t>(peer)] >= my_rows_[static_cast<size_t>(peer)]) [[unlikely]]
      send_total(peer);
    raise(peer, BufferLayout::kRows, progress_value(epoch_, static_cast<uint64_t>(there)));
  }
  return true;
}

bool DispatchCall::send_stream(int peer) {
  const internal::Routing& r = routing();
  const auto at = static_cast<size_t>(peer);
  const int64_t count = my_rows_[at];
  int64_t& next = next_[at];
  if (next >= count) return false;
  const int64_t taken = count_of(peer, BufferLayout::kSpace);
  const int64_t slots = static_cast<int64_t>(context_->layout.ring_bytes / format_.record_bytes) + mutated(Mutation::one_record_too_many);
  const int64_t batch = std::min({count - next, slots - (next - std::min(taken, next)),
                                  std::max<int64_t>(1, std::min(kBytesPerSignal / static_cast<int64_t>(format_.record_bytes), slots / 4))});
  if (batch <= 0) return false;
  const int64_t first = next;
  if (mutated(Mutation::records_raised_before_written)) {
    raise(peer, BufferLayout::kProduced, progress_value(epoch_, static_cast<uint64_t>(next + batch)));
  }
  context_->parallel_for(batch, 2, [&](int64_t from, int64_t to) {
    for (int64_t i = first + from; i < first + to; ++i) write_record(peer, i, r.send_tokens[static_cast<size_t>(r.send_begin[at] + i)]);
  });
  next += batch;
  sends_left_ -= batch;
  if (sums_ && next == count) [[unlikely]]
    send_total(peer);
  raise(peer, BufferLayout::kProduced, progress_value(epoch_, static_cast<uint64_t>(next)));
  return true;
}

const std::byte* DispatchCall::quantised_row(int64_t token, const std::byte*& scales) const {
  thread_local std::vector<std::byte> row;
  const size_t scales_at = static_cast<size_t>(core::align_up(static_cast<int64_t>(format_.x_bytes), 16));
  if (row.size() < scales_at + format_.scale_bytes) row.resize(scales_at + format_.scale_bytes);
  std::byte* s = row.data() + scales_at;
  const bool fp32 = args_.quantize == Quantize::fp8_e4m3;
  context_->kernels.quantize_row(args_.x.row(token), args_.x.dtype, args_.x.shape[1], reinterpret_cast<uint8_t*>(row.data()),
                                 fp32 ? reinterpret_cast<float*>(s) : nullptr, fp32 ? nullptr : reinterpret_cast<uint8_t*>(s));
  scales = s;
  return row.data();
}

/// What `peer` has to know of the token: its own experts among the k, and their weights.
void DispatchCall::fill_meta(int peer, int64_t token, int32_t* idx, float* weights) const {
  const internal::Routing& r = routing();
  const int topk = r.num_topk;
  const int *const owner = r.experts->owners().data(), *const local = r.experts->locals().data();
  const int32_t* const expert = r.topk_idx.data() + token * topk;
  for (int k = 0; k < topk; ++k) idx[k] = expert[k] >= 0 && owner[expert[k]] == peer ? local[expert[k]] : -1;
  if (!weights) return;
  const float* const weight = r.topk_weights.data() + token * topk;
  for (int k = 0; k < topk; ++k) weights[k] = idx[k] >= 0 ? weight[k] : 0.0f;
}

void DispatchCall::write_record(int peer, int64_t i, int64_t token) {
  const auto slots = static_cast<int64_t>(context_->layout.ring_bytes / format_.record_bytes);
  const size_t offset = context_->layout.ring_at(lane_, copy_, context_->rank) + static_cast<size_t>(i % slots) * format_.record_bytes;
  check_address(Region::ring, peer, i, offset, format_.record_bytes);
  std::byte* there = context_->peer(peer);
  std::byte* record = there ? there + offset : nullptr;
  if (!record) {
    thread_local std::vector<std::byte> assembled;
    assembled.assign(format_.record_bytes, std::byte{0});
    record = assembled.data();
  }
  if (format_.idx_bytes) {
    fill_meta(peer, token, reinterpret_cast<int32_t*>(record), format_.weight_bytes ? reinterpret_cast<float*>(record + format_.idx_bytes) : nullptr);
  }
  const std::byte* scales = nullptr;
  const std::byte* x = token_row(token, scales);
  // Past the caches: the lines are in those of their reader, and to own each of them first costs ten times the copy.
  context_->kernels.copy_row_streaming(record + format_.x_at, x, format_.x_bytes);
  util::probe::at(util::probe::Step::copy);
  if (scales) std::memcpy(record + format_.scales_at, scales, format_.scale_bytes);
  for (size_t s = 0; s < args_.side.size(); ++s) core::copy_bytes(record + format_.side_at[s], args_.side[s].row(token), format_.side_bytes[s]);
  if (!there) context_->window->put(peer, offset, record, format_.record_bytes);
  if (sums_) [[unlikely]]
    send_sum(peer, context_->layout.ring_sum_at(lane_, copy_, context_->rank, i % slots), sum_of_token(peer, Region::ring, i, token));
}

void DispatchCall::write_direct(int peer, int64_t row, int64_t token) {
  const Target& target = targets_[static_cast<size_t>(peer)];
  const auto at = static_cast<size_t>(row);
  std::byte* there = context_->peer(peer);
  check_address(Region::block, peer, row, target.x + at * format_.x_stride, format_.x_bytes);
  auto write = [&](size_t offset, const void* data, size_t bytes) {
    check_address(Region::block, peer, row, offset, bytes);
    if (there) core::copy_bytes(there + offset, data, bytes);
    else context_->window->put(peer, offset, data, bytes);
  };
  const std::byte* scales = nullptr;
  const std::byte* x = token_row(token, scales);
  if (there) store_row(there + target.x + at * format_.x_stride, x, format_.x_bytes);
  else write(target.x + at * format_.x_stride, x, format_.x_bytes);
  util::probe::at(util::probe::Step::copy);
  if (scales) write(target.scales + at * format_.scale_bytes, scales, format_.scale_bytes);
  if (!args_.side.empty()) {
    const BlockFormat block = format_.block(target.block_rows, format_.idx_bytes > 0);
    for (size_t s = 0; s < args_.side.size(); ++s) {
      write(target.x - block.x + block.side[s] + at * format_.side_bytes[s], args_.side[s].row(token), format_.side_bytes[s]);
    }
  }
  if (format_.idx_bytes) {
    int32_t idx[kMaxTopk];
    float weights[kMaxTopk];
    fill_meta(peer, token, idx, format_.weight_bytes ? weights : nullptr);
    write(target.topk_idx + at * format_.idx_bytes, idx, format_.idx_bytes);
    if (format_.weight_bytes) write(target.topk_weights + at * format_.weight_bytes, weights, format_.weight_bytes);
  }
  if (sums_) [[unlikely]] {
    const size_t sum_at = context_->layout.row_sum_at(target.x + at * format_.x_stride);
    send_sum(peer, sum_at, sum_of_token(peer, Region::block, row - target.first_row, token));
  }
}

}  // namespace turnout::engine
