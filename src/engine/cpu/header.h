// The header of a call: what every rank tells every other before rows are used. It carries the facts that must agree,
// what the sender is about to send, and the block that the receiver of this header may write (its lease).
#pragma once
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace turnout::engine {

enum class CallKind : int64_t { dispatch = 1, combine = 2 };

/// Facts that must be the same on all ranks, one line of the table each (fact_names in header.cc).
struct CallFacts {
  int64_t library = 0;  ///< major * 1'000'000 + minor * 1'000 + patch
  int64_t kind = 0;     ///< CallKind
  int64_t epoch = 0;
  int64_t generation = 0;  ///< of the expert map: hash of it
  int64_t mode = 0;
  int64_t layout = 0;
  int64_t dtype = 0;  ///< of x or y
  int64_t hidden = 0;
  int64_t topk = 0;
  int64_t weights = 0;     ///< dispatch: topk_weights given; combine: CombineWeights
  int64_t num_side = 0;    ///< dispatch: side arrays; combine: side given
  int64_t side_bytes = 0;  ///< per row
  int64_t side_hash = 0;   ///< of dtypes and widths
  int64_t capacity = 0;    ///< -1: exact
  int64_t alignment = 0;
  int64_t quantize = 0;
  int64_t wire = 0;
  int64_t handle = 0;  ///< id of the handle used, 0 if none
  int64_t on_failure = 0;
  friend bool operator==(const CallFacts&, const CallFacts&) = default;
};

/// What a rank that refuses a call tells the others in place of its facts: its own error, as far as there is room.
struct Reason {
  alignas(CallFacts) char text[sizeof(CallFacts)] = {};
  static Reason of(const std::exception_ptr& why);
  /// Behind ": "; empty if nothing was told.
  std::string words() const;
};

/// Fixed part of a header; `rows_to[num_ranks]` and, for the addressee, `expert_counts[max local experts]` follow, and the
/// facts themselves (or a Reason) at the end: they are read only where fingerprints differ, so that a small call reads one line or two.
struct Header {
  uint64_t fingerprint = 0;  ///< of the facts
  int32_t refused = 0;       ///< the sender rejected its own arguments: the call fails on all ranks
  int32_t owes_verdict = 0;  ///< only once the sender knows all counts will it say whether it can take its rows (kVerdict)
  int64_t offer_offset = 0;  ///< the block of the sender's receive region that the addressee may write
  int64_t offer_bytes = 0;   ///< 0: none, send through the staging ring
  int64_t pull_offset = -1;  ///< combine: the sender's rows lie in its arena from here on, for the addressee to read in place
  int64_t pull_stride = 0;   ///< bytes between them
  int64_t pull_first = 0;    ///< the addressee's first row
};

/// Room for the facts, and where they lie in a header of `header_bytes`.
constexpr size_t kFactsBytes = (sizeof(CallFacts) + 63) / 64 * 64;
constexpr size_t facts_at(size_t header_bytes) { return header_bytes - kFactsBytes; }

/// Bytes of a header with its two tables and the facts.
constexpr size_t header_bytes(int num_ranks, int max_local_experts) {
  const size_t tables = sizeof(Header) + sizeof(int32_t) * (static_cast<size_t>(num_ranks) + static_cast<size_t>(max_local_experts));
  return (tables + 63) / 64 * 64 + kFactsBytes;
}

/// Equal facts have equal fingerprints; others almost never (64 bits).
uint64_t fingerprint(const CallFacts& facts);

/// Empty if all ranks agree with `facts[0]`; else a table of the facts that differ, a line each, a column per rank.
std::string disagreement(std::span<const CallFacts> facts);

}  // namespace turnout::engine
