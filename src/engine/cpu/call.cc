// The header exchange, common to dispatch and combine.
#include "engine/cpu/call.h"

#include <algorithm>
#include <cstring>

#include "core/bytes.h"
#include "engine/cpu/mutation.h"
#include "engine/cpu/sums.h"

namespace turnout::engine {

using core::BufferLayout;

namespace {

template <class Predicate>
std::string ranks_where(int num_ranks, Predicate&& is_one) {
  std::string ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (is_one(rank)) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return ranks;
}

}  // namespace

Call::Call(const std::shared_ptr<Context>& context, int lane, uint64_t epoch, uint64_t first_epoch, const KnownFacts& known, int64_t handle)
    : context_(context.get()),
      lane_(lane),
      epoch_(epoch),
      copy_(static_cast<int>(epoch % static_cast<uint64_t>(context_->layout.depth))),
      facts_(known.facts),
      first_use_(epoch < first_epoch + static_cast<uint64_t>(context_->layout.depth)) {
  const auto ranks = static_cast<size_t>(context_->num_ranks);
  facts_.epoch = static_cast<int64_t>(epoch);
  facts_.handle = handle;
  mine_.fingerprint = fingerprint(known, facts_.epoch, handle);
  max_local_ = static_cast<int>((facts_at(context_->layout.header_bytes) - sizeof(Header)) / sizeof(int32_t) - ranks);
  peers_.assign(ranks, Peer());
  headers_.resize_for_overwrite(ranks);
  my_rows_.assign(ranks, 0);
  rows_.resize_for_overwrite(ranks * ranks);
  if (context_->layout.verified) [[unlikely]]
    sums_.reset(new Sums(ranks));  // NOLINT(cppcoreguidelines-owning-memory): its deleter is not the standard one
}

void Call::refuse(const Reason& why) {
  mine_.refused = 1;
  told_ = &why;
  my_rows_.assign(my_rows_.size(), 0);
}

int64_t Call::count_of(int source, BufferLayout::Signal which) const {
  const uint64_t value = read(source, which);
  return value >> 32 == epoch_ || mutated(Mutation::old_counts_are_taken) ? static_cast<int64_t>(value & kAllConsumed) : 0;
}

bool Call::exchange_headers() {
  bool moved = false;
  const int me = context_->rank;
  if (!header_seen(me)) {
    take_header(me);
    moved = true;
  }
  for (int step = 1; step < context_->num_ranks && !all_headers_sent(); ++step) {
    const int peer = (me + step) % context_->num_ranks;
    if (header_sent(peer)) continue;
    // The copy is free once the peer has finished the call that used it last.
    const auto depth = static_cast<uint64_t>(context_->layout.depth);
    if (!first_use_ && !mutated(Mutation::header_before_copy_is_free) &&
        read(peer, BufferLayout::kSpace) < progress_value(epoch_ - depth, kAllConsumed))
      continue;
    send_header(peer);
    moved = true;
  }
  for (int source = 0; source < context_->num_ranks && !all_headers_seen(); ++source) {
    if (header_seen(source) || read(source, BufferLayout::kHeader) < epoch_) continue;
    take_header(source);
    moved = true;
  }
  return moved;
}

void Call::send_header(int peer) {
  if (mutated(Mutation::header_raised_before_written)) raise(peer, BufferLayout::kHeader, epoch_);
  if (!my_pull_first_.empty()) mine_.pull_first = my_pull_first_[static_cast<size_t>(peer)];
  std::byte* const there = context_->peer(peer);
  const auto write = [&](size_t offset, const void* data, size_t num_bytes) {
    if (there) std::memcpy(there + offset, data, num_bytes);
    else context_->window->put(peer, offset, data, num_bytes);
    util::probe::at(util::probe::Step::copy);
  };
  size_t at = context_->layout.header_at(lane_, copy_, context_->rank);
  check_address(Region::header, peer, -1, at, context_->layout.header_bytes);
  write(at, &mine_, sizeof mine_);
  at += sizeof mine_;
  write(at, my_rows_.data(), my_rows_.size() * sizeof(int32_t));
  at += my_rows_.size() * sizeof(int32_t);
  if (!my_expert_rows_.empty()) {
    const auto& counts = my_expert_rows_[static_cast<size_t>(peer)];
    if (!counts.empty()) write(at, counts.data(), counts.size() * sizeof(int32_t));
  }
  write(facts_of(context_->rank), told_, sizeof facts_);
  if (sums_) [[unlikely]]
    seal_header(peer);
  raise(peer, BufferLayout::kHeader, epoch_);
  peers_[static_cast<size_t>(peer)].header_sent = true;
  ++num_headers_sent_;
}

void Call::take_header(int source) {
  const auto at = static_cast<size_t>(source);
  const auto ranks = static_cast<size_t>(context_->num_ranks);
  if (source == context_->rank) {
    headers_[at] = mine_;
    std::copy(my_rows_.begin(), my_rows_.end(), rows_.begin() + at * ranks);
  } else {
    const std::byte* bytes = context_->local + context_->layout.header_at(lane_, copy_, source);
    std::memcpy(&headers_[at], bytes, sizeof(Header));
    util::probe::at(util::probe::Step::copy);
    std::memcpy(rows_.data() + at * ranks, bytes + sizeof(Header), ranks * sizeof(int32_t));
  }
  if (!my_expert_rows_.empty()) {
    const auto& own = my_expert_rows_[static_cast<size_t>(context_->rank)];
    if (expert_rows_.empty()) expert_rows_.assign(ranks * static_cast<size_t>(max_local_), 0);
    int32_t* row = expert_rows_.data() + at * static_cast<size_t>(max_local_);
    if (source == context_->rank) {
      std::copy(own.begin(), own.end(), row);
    } else {
      const std::byte* bytes = context_->local + context_->layout.header_at(lane_, copy_, source);
      core::copy_bytes(row, bytes + sizeof(Header) + ranks * sizeof(int32_t), own.size() * sizeof(int32_t));
    }
  }
  if (sums_ && source != context_->rank) [[unlikely]]
    check_header(source);
  peers_[at].header_seen = true;
  ++num_headers_seen_;
}

void Call::fail_together(const std::string& text) {
  failed_together_ = true;
  throw InvalidArgument(text);
}

void Call::check_headers() {
  const bool agreed =
      std::all_of(headers_.begin(), headers_.end(), [&](const Header& h) { return !h.refused && h.fingerprint == headers_[0].fingerprint; });
  if (agreed) return;
  const auto refuses = [&](int source) { return header(source).refused != 0; };
  const std::string refusers = ranks_where(context_->num_ranks, refuses);
  if (!refusers.empty()) {
    int first = 0;
    while (!refuses(first)) ++first;
    Reason why;  // this rank is not one of them
    std::memcpy(&why, context_->local + facts_of(first), sizeof why);
    fail_together(where() + ": refused by rank " + refusers + ", whose own error says why" + why.words() + "; nothing was delivered on any rank");
  }
  std::vector<CallFacts> facts(headers_.size(), facts_);
  for (int source = 0; source < context_->num_ranks; ++source) {
    if (source != context_->rank) std::memcpy(&facts[static_cast<size_t>(source)], context_->local + facts_of(source), sizeof(CallFacts));
  }
  if (const std::string table = disagreement(facts); !table.empty()) {
    fail_together(where() + ": ranks disagree; nothing was delivered on any rank" + table);
  }
}

void Call::give_verdict(bool fits) {
  for (int peer = 0; peer < context_->num_ranks; ++peer) {
    if (peer != context_->rank) raise(peer, BufferLayout::kVerdict, progress_value(epoch_, static_cast<uint64_t>(fits ? kFits : kMisfit)));
  }
}

bool Call::check_verdicts(const std::string& mine) {
  if (!mine.empty()) fail_together(mine);
  if (std::none_of(headers_.begin(), headers_.end(), [](const Header& h) { return h.owes_verdict != 0; })) return true;
  for (int source = 0; source < context_->num_ranks; ++source) {
    if (source != context_->rank && owes_verdict(source)) return false;
  }
  const std::string misfits = ranks_where(
      context_->num_ranks, [&](int source) { return header(source).owes_verdict && count_of(source, BufferLayout::kVerdict) == kMisfit; });
  if (misfits.empty()) return true;
  fail_together(where() + ": rank " + misfits +
                " has no room for its rows (out or result=lease), and its own error says how many; nothing was delivered on any rank");
}

void Call::consume_all() {
  for (int source = 0; source < context_->num_ranks; ++source) {
    if (source != context_->rank) raise(source, BufferLayout::kSpace, progress_value(epoch_, kAllConsumed));
  }
}

void Call::leave() {
  if (failed_together_) stop();
  else consume_all();
}

void Call::stop() {
  stopped_ = true;
  for (int peer = 0; peer < context_->num_ranks; ++peer) {
    if (peer != context_->rank) raise(peer, BufferLayout::kStopped, epoch_);
  }
}

bool Call::close(bool leaving) {
  bool moved = false;
  for (int peer = 0; peer < context_->num_ranks; ++peer) {
    const auto at = static_cast<size_t>(peer);
    if (peer == context_->rank || peers_[at].closed || (!leaving && read(peer, BufferLayout::kStopped) < epoch_)) continue;
    raise(peer, BufferLayout::kSpace, progress_value(epoch_, kAllConsumed));
    peers_[at].closed = true;
    ++num_closed_;
    moved = true;
  }
  return moved;
}

}  // namespace turnout::engine
