// Checksums of partial sums on their way back. Which token and term a record is of is compared before it is used; its row once it has been
// added, when its slot is about to be given back, so that nothing can have changed it in between. Rows read in place have theirs in the
// arena of their rank, made before the header says where they lie.
#include <algorithm>
#include <cstring>

#include "engine/cpu/combine_call.h"
#include "engine/cpu/sums.h"

namespace turnout::engine {

using internal::Routing;

RowSum CombineCall::record_sum(const SumKey& of, const std::byte* record) const {
  return {Hash(of).add(record, sizeof(Meta) + side_floats_ * sizeof(float)).value(),
          Hash(of).add(record + row_at_, wire_bytes_).add(record + scales_at_, scale_bytes_).value()};
}

/// Made here, so that the checksum is of what was meant to be put.
void CombineCall::put_checked(int source, int64_t i) {
  thread_local std::vector<std::byte> assembled;
  assembled.resize(record_bytes_ + 64);
  std::byte* const record = assembled.data() + (64 - reinterpret_cast<uintptr_t>(assembled.data()) % 64) % 64;  // as aligned as a slot
  std::memset(record, 0, record_bytes_);
  write_record(source, i, record);
  const int64_t slot = i % slots_;
  put(source, context_->layout.ring_at(lane_, copy_, context_->rank) + static_cast<size_t>(slot) * record_bytes_, record, record_bytes_);
  send_sum(source, context_->layout.ring_sum_at(lane_, copy_, context_->rank, slot),
           record_sum(key(Region::ring, context_->rank, source, i), record));
}

/// Of a row that this rank reads in place.
uint64_t CombineCall::pulled_sum(int rank, int64_t ordinal, const std::byte* row) const {
  return Hash(key(Region::pulled, rank, context_->rank, ordinal)).add(row, wire_bytes_).value();
}

void CombineCall::seal_pulled_rows() {
  const Routing& r = *routing_;
  for (int source = 0; source < context_->num_ranks; ++source) {
    if (source == context_->rank) continue;
    const auto at = static_cast<size_t>(source);
    for (int64_t row = r.recv_begin[at]; row < r.recv_begin[at + 1]; ++row) {
      const SumKey of = key(Region::pulled, context_->rank, source, row - r.recv_begin[at]);
      const RowSum sum{0, Hash(of).add(y_row(row), wire_bytes_).value()};
      std::memcpy(context_->local + context_->layout.pull_sum_at(lane_, copy_, row), &sum, sizeof sum);
    }
  }
}

/// A record that has come from `source`, the next to be taken.
const CombineCall::Meta* CombineCall::checked(int source, const std::byte* record) const {
  const int64_t i = taken_[static_cast<size_t>(source)];
  const RowSum sent = sum_at(context_->layout.ring_sum_at(lane_, copy_, source, i % slots_));
  const RowSum found = record_sum(key(Region::ring, source, context_->rank, i), record);
  check_sum(Region::ring, source, i, "its token, term and weight", sent.meta, found.meta);
  return reinterpret_cast<const Meta*>(record);
}

/// Rows that were added in this round.
void CombineCall::check_taken() {
  const core::BufferLayout& layout = context_->layout;
  for (int source = 0; source < context_->num_ranks; ++source) {
    const auto at = static_cast<size_t>(source);
    if (source == context_->rank || !header_seen(source)) continue;
    for (int64_t i = released_[at]; i < taken_[at]; ++i) {
      const RowSum sent = sum_at(layout.ring_sum_at(lane_, copy_, source, i % slots_));
      const std::byte* record = context_->local + layout.ring_at(lane_, copy_, source) + static_cast<size_t>(i % slots_) * record_bytes_;
      check_sum(Region::ring, source, i, "data", sent.data, record_sum(key(Region::ring, source, context_->rank, i), record).data);
      count_sum(source, sent);
    }
    if (header(source).pull_offset < 0) continue;
    int64_t& next = sums_->peers[at].num_got;
    for (; next < std::min(ordinal_[at], routing_->sent[at]); ++next) {
      RowSum sent;
      std::memcpy(&sent, context_->peer(source) + layout.pull_sum_at(lane_, copy_, header(source).pull_first + next), sizeof sent);
      check_sum(Region::pulled, source, next, "data", sent.data, pulled_sum(source, next, pulled_row(source, next)));
    }
  }
}

void CombineCall::check_totals() const {
  for (int source = 0; source < context_->num_ranks; ++source) {
    if (source != context_->rank && header(source).pull_offset < 0) check_total(Region::ring, source, rows(source, context_->rank));
  }
}

}  // namespace turnout::engine
