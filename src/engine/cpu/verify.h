// TURNOUT_VERIFY=1: what a rank writes for another has a checksum, made from what it was asked to send and compared with what lies
// where it is used. Memory that nobody wrote is poison: as floating point of any type NaN, as an index negative. docs/verify.md.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/buffer_layout.h"
#include "engine/cpu/header.h"

namespace turnout::engine {

/// Where something lies on its way, in words (name_of).
enum class Region : uint32_t { header, ring, block, pulled, own };
std::string_view name_of(Region region);

/// Whose a checksum is: what is right but belongs elsewhere, or to another call, does not match.
struct SumKey {
  Region region;
  int lane;
  uint64_t epoch;
  int source, destination;
  int64_t index;  ///< of the row or record; -1: of all of them, or of the header
};

/// A 64-bit hash. A change of eight bytes that lie together is always found, any other but once in 2^64.
class Hash {
 public:
  explicit Hash(const SumKey& key);
  Hash& add(const void* bytes, size_t num_bytes);
  uint64_t value() const;

 private:
  void step(uint64_t word) { state_ = mix(state_ ^ word); }
  static constexpr uint64_t mix(uint64_t x) {
    x *= 0x9E3779B97F4A7C15ull;
    return x ^ x >> 29;
  }
  uint64_t state_ = 0x243F6A8885A308D3ull;
};

/// Of a row: what is used as an index or a count, which is looked at before it is used, and what is only data, looked at where it stays.
struct RowSum {
  uint64_t meta = 0, data = 0;
};
static_assert(sizeof(RowSum) == core::BufferLayout::kSumBytes);

/// What a source writes once per call: of its header with the tables and facts, and of all its rows together.
struct Seal {
  uint64_t header = 0;
  int64_t num_counts = 0;  ///< of experts in the header
  uint64_t total = 0;      ///< sum over its rows of total_of()
  int64_t num_rows = 0;
  uint64_t check = 0;  ///< of the two above
};
static_assert(sizeof(Seal) <= core::BufferLayout::kSealBytes);
inline uint64_t total_of(const RowSum& sum) { return sum.meta * 0x9E3779B97F4A7C15ull + sum.data; }

void poison(void* data, size_t num_bytes);
bool is_poison(const void* data, size_t num_bytes);

/// Whether writes are compared with the bounds of their region in every build; with checksums they are anyway.
inline constexpr bool kChecked = TURNOUT_CHECKED != 0;

/// Empty if [offset, offset + num_bytes) lies in the region of an arena that `region` is written to; else what is wrong, in words.
std::string outside(const core::BufferLayout& layout, Region region, size_t offset, size_t num_bytes);

/// Empty if what a header says can be: rows and counts that are not negative nor more than `most_rows`, a lease and rows to read that
/// lie in the arena of its sender. Else what is wrong, in words. A header whose checksum is right and that is wrong all the same was made so.
std::string header_problem(const Header& header, std::span<const int32_t> rows, std::span<const int32_t> expert_counts, int64_t most_rows,
                           const core::BufferLayout& layout);

}  // namespace turnout::engine
