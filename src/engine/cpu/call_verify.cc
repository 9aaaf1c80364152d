// Checksums of headers and totals, and what a mismatch says.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <utility>

#include "engine/cpu/sums.h"

namespace turnout::engine {

namespace {

std::string hex(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

uint64_t seal_of_total(const SumKey& key, const Seal& seal) {
  return Hash(key).add(&seal.total, sizeof seal.total).add(&seal.num_rows, sizeof seal.num_rows).value();
}

}  // namespace

void Call::DropSums::operator()(Sums* sums) const {
  delete sums;  // NOLINT(cppcoreguidelines-owning-memory): here it is complete
}

void Call::put(int peer, size_t offset, const void* data, size_t num_bytes) {
  if (std::byte* there = context_->peer(peer)) std::memcpy(there + offset, data, num_bytes);
  else context_->window->put(peer, offset, data, num_bytes);
}

/// Of what was meant to be written, not of what lies there.
void Call::seal_header(int peer) {
  Seal seal;
  Hash hash = header_hash(context_->rank, peer);
  hash.add(&mine_, sizeof mine_).add(my_rows_.data(), my_rows_.size() * sizeof(int32_t));
  const std::vector<int32_t> counts = my_expert_rows_.empty() ? std::vector<int32_t>() : my_expert_rows_[static_cast<size_t>(peer)];
  seal.num_counts = static_cast<int64_t>(counts.size());
  hash.add(counts.data(), counts.size() * sizeof(int32_t));
  seal.header = hash.add(told_, sizeof facts_).add(&seal.num_counts, sizeof seal.num_counts).value();
  put(peer, context_->layout.seal_at(lane_, copy_, context_->rank), &seal, offsetof(Seal, total));
}

void Call::check_header(int source) const {
  Seal seal;
  std::memcpy(&seal, context_->local + context_->layout.seal_at(lane_, copy_, source), sizeof seal);
  const auto at = static_cast<size_t>(source), ranks = static_cast<size_t>(context_->num_ranks);
  Hash hash = header_hash(source, context_->rank);
  hash.add(&headers_[at], sizeof(Header)).add(rows_.data() + at * ranks, ranks * sizeof(int32_t));
  // How many counts there are the sender says: ranks that disagree about the layout expect others.
  const int64_t num_counts = seal.num_counts >= 0 && seal.num_counts <= max_local_ ? seal.num_counts : 0;
  const std::byte* counts = context_->local + context_->layout.header_at(lane_, copy_, source) + sizeof(Header) + ranks * sizeof(int32_t);
  hash.add(counts, static_cast<size_t>(num_counts) * sizeof(int32_t));
  const uint64_t found = hash.add(context_->local + facts_of(source), sizeof facts_).add(&seal.num_counts, sizeof seal.num_counts).value();
  check_sum(Region::header, source, -1, "", seal.header, found);
  const std::span<const int32_t> expert_counts(reinterpret_cast<const int32_t*>(counts), static_cast<size_t>(num_counts));
  const int64_t most = context_->config.max_tokens_per_rank * std::max(1, context_->config.max_topk);
  const std::string wrong = header_problem(headers_[at], {rows_.data() + at * ranks, ranks}, expert_counts, most, context_->layout);
  if (!wrong.empty()) throw TransportError("the header of rank " + std::to_string(source) + " in " + where() + " cannot be: " + wrong);
}

void Call::send_sum(int peer, size_t offset, const RowSum& sum) {
  put(peer, offset, &sum, sizeof sum);
  Sums::Peer& to = sums_->peers[static_cast<size_t>(peer)];
  // Threads of one loop write rows of one peer.
  std::atomic_ref(to.sent).fetch_add(total_of(sum), std::memory_order_relaxed);
  std::atomic_ref(to.num_sent).fetch_add(1, std::memory_order_relaxed);
}

void Call::send_total(int peer) {
  Sums::Peer& to = sums_->peers[static_cast<size_t>(peer)];
  if (std::exchange(to.total_sent, true)) return;
  Seal seal;
  seal.total = to.sent;
  seal.num_rows = to.num_sent;
  seal.check = seal_of_total(key(Region::ring, context_->rank, peer, -1), seal);
  put(peer, context_->layout.seal_at(lane_, copy_, context_->rank) + offsetof(Seal, total), &seal.total, sizeof seal - offsetof(Seal, total));
}

void Call::count_sum(int source, const RowSum& sum) {
  Sums::Peer& from = sums_->peers[static_cast<size_t>(source)];
  from.got += total_of(sum);
  ++from.num_got;
}

void Call::check_total(Region region, int source, int64_t num_rows) const {
  if (num_rows == 0 || source == context_->rank) return;
  const Sums::Peer& from = sums_->peers[static_cast<size_t>(source)];
  Seal seal;
  std::memcpy(&seal, context_->local + context_->layout.seal_at(lane_, copy_, source), sizeof seal);
  check_sum(region, source, -1, "the total", seal.check, seal_of_total(key(Region::ring, source, context_->rank, -1), seal));
  check_sum(region, source, -1, "the number of rows", static_cast<uint64_t>(seal.num_rows), static_cast<uint64_t>(from.num_got));
  check_sum(region, source, -1, "all rows", seal.total, from.got);
}

void Call::fail_sum(Region region, int source, int64_t row, const char* part, uint64_t sent, uint64_t found) const {
  const std::string which = row >= 0 ? ", row " + std::to_string(row) + ", " + part : *part ? std::string(", ") + part : "";
  throw TransportError("TURNOUT_VERIFY: rank " + std::to_string(context_->rank) + " got other bytes than rank " + std::to_string(source) +
                       " sent in " + where() + ": region " + std::string(name_of(region)) + which + ": checksum " + hex(sent) + " sent, " +
                       hex(found) +
                       " found. Memory or a link changed them, or something wrote where it must not; nothing of this call is to be used");
}

void Call::check_inside(Region region, int peer, int64_t row, size_t offset, size_t num_bytes) const {
  const std::string words = outside(context_->layout, region, offset, num_bytes);
  if (words.empty()) return;
  throw TransportError("rank " + std::to_string(context_->rank) + " would reach into the arena of rank " + std::to_string(peer) +
                       " where it must not, in " + where() + ", row " + std::to_string(row) + ": " + words);
}

}  // namespace turnout::engine
