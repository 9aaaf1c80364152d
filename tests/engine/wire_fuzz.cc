// What peers write into an arena: headers with their tables, facts, reasons of refusals, notes of aborts. Whatever the bytes are, a header
// passes only if what it says can be, and the rest is made into words.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "engine/cpu/context.h"
#include "engine/cpu/header.h"
#include "engine/cpu/known_facts.h"
#include "engine/cpu/verify.h"

namespace {

using namespace turnout;
using namespace turnout::engine;

constexpr int kRanks = 3, kExperts = 5;
constexpr int64_t kMostRows = 1000;

void require(bool good) {
  if (!good) std::abort();
}

/// The next T of the input, or zeros.
template <class T>
T take(const uint8_t*& data, size_t& left) {
  T value{};
  const size_t n = std::min(left, sizeof value);
  if (n > 0) std::memcpy(reinterpret_cast<void*>(&value), data, n);
  data += n;
  left -= n;
  return value;
}

void check_header(const uint8_t* data, size_t left) {
  static const core::BufferLayout layout = core::BufferLayout::of({.num_ranks = kRanks,
                                                                   .header_bytes = header_bytes(kRanks, kExperts),
                                                                   .least_staging_bytes = 4096,
                                                                   .receive_bytes = 1 << 16,
                                                                   .verified_rows = 8});
  const auto header = take<Header>(data, left);
  std::vector<int32_t> rows(kRanks), counts(kExperts);
  for (int32_t& n : rows) n = take<int32_t>(data, left);
  for (int32_t& n : counts) n = take<int32_t>(data, left);
  const std::string wrong = header_problem(header, rows, counts, kMostRows, layout);
  if (!wrong.empty()) return require(wrong.size() > 10);
  for (const int32_t n : rows) require(n >= 0 && n <= kMostRows);
  for (const int32_t n : counts) require(n >= 0);
  if (header.offer_bytes > 0) {
    require(header.offer_bytes <= static_cast<int64_t>(layout.receive_bytes) && header.offer_offset >= static_cast<int64_t>(layout.receive));
    require(header.offer_offset + header.offer_bytes <= static_cast<int64_t>(layout.receive + layout.receive_bytes));
  }
  if (header.pull_offset >= 0) require(header.pull_offset < static_cast<int64_t>(layout.num_bytes) && header.pull_first >= 0);
}

void check_facts(const uint8_t* data, size_t left) {
  std::vector<CallFacts> facts(kRanks);
  for (CallFacts& f : facts) f = take<CallFacts>(data, left);
  const bool all_alike = facts[0] == facts[1] && facts[0] == facts[2];
  require(disagreement(facts).empty() == all_alike);
  KnownFacts known = KnownFacts::of(facts[1]);
  require(fingerprint(known, facts[1].epoch, facts[1].handle) == fingerprint(facts[1]));
}

void check_words(const uint8_t* data, size_t left) {
  const auto reason = take<Reason>(data, left);
  require(reason.words().size() <= sizeof reason.text + 2);
  std::vector<std::byte> note(core::BufferLayout::kNoteBytes);
  const size_t n = std::min(left, note.size());
  if (n > 0) std::memcpy(note.data(), data, n);
  const Abort why = abort_of_note(note.data(), 1);
  require(why.text.starts_with("rank 1 aborted: ") && why.record.rank == 1 && why.record.peers.size() <= 64);
  require(why.kind >= Abort::Kind::timeout && why.kind <= Abort::Kind::invalid_argument);
  require(!why.record.to_string().empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  switch (data[0] % 3) {
    case 0: check_header(data + 1, size - 1); break;
    case 1: check_facts(data + 1, size - 1); break;
    default: check_words(data + 1, size - 1); break;
  }
  return 0;
}
