#include "engine/cpu/verify.h"

#include <cstring>

namespace turnout::engine {

namespace {
constexpr unsigned char kPoison[2] = {0xF5, 0xFF};  // 0xFFF5 in every pair of bytes
}

std::string_view name_of(Region region) {
  switch (region) {
    case Region::header: return "header";
    case Region::ring: return "staging ring";
    case Region::block: return "receive block";
    case Region::pulled: return "rows read in place";
    case Region::own: return "own rows";
  }
  return "?";
}

Hash::Hash(const SumKey& key) {
  step(static_cast<uint64_t>(key.region) << 32 | static_cast<uint32_t>(key.lane));
  step(key.epoch);
  step(static_cast<uint64_t>(key.source) << 32 | static_cast<uint32_t>(key.destination));
  step(static_cast<uint64_t>(key.index));
}

/// Four words at a time, each into a state of its own: they are mixed at once. Every step is invertible, so no change of one word is lost.
Hash& Hash::add(const void* bytes, size_t num_bytes) {
  const auto* at = static_cast<const unsigned char*>(bytes);
  size_t left = num_bytes;
  constexpr size_t kWord = sizeof(uint64_t), kLine = 4 * kWord;
  if (left >= kLine) {
    uint64_t lane[4] = {state_, state_ + 1, state_ + 2, state_ + 3};
    for (; left >= kLine; left -= kLine, at += kLine) {
      for (size_t i = 0; i < 4; ++i) {
        uint64_t word;
        std::memcpy(&word, at + i * kWord, kWord);
        lane[i] = mix(lane[i] ^ word);
      }
    }
    for (const uint64_t value : lane) step(value);
  }
  for (; left > 0; left -= left < kWord ? left : kWord, at += kWord) {
    uint64_t word = 0;
    std::memcpy(&word, at, left < kWord ? left : kWord);
    step(word);
  }
  step(num_bytes);
  return *this;
}

uint64_t Hash::value() const {
  uint64_t z = state_;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

void poison(void* data, size_t num_bytes) {
  auto* at = static_cast<unsigned char*>(data);
  for (size_t i = 0; i < num_bytes; ++i) at[i] = kPoison[i % 2];
}

bool is_poison(const void* data, size_t num_bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < num_bytes; ++i) {
    if (at[i] != kPoison[i % 2]) return false;
  }
  return true;
}

std::string outside(const core::BufferLayout& layout, Region region, size_t offset, size_t num_bytes) {
  size_t begin = 0, end = layout.num_bytes;
  switch (region) {
    case Region::header:
      begin = layout.headers;
      end = layout.status;
      break;
    case Region::ring:
      begin = layout.rings;
      end = layout.receive;
      break;
    case Region::block:
      begin = layout.receive;
      end = layout.receive + layout.receive_bytes;
      break;
    case Region::pulled:
    case Region::own: break;
  }
  if (offset >= begin && offset <= end && num_bytes <= end - offset) return {};
  return std::to_string(num_bytes) + " bytes at " + std::to_string(offset) + " do not lie in the " + std::string(name_of(region)) + " region, " +
         std::to_string(begin) + " to " + std::to_string(end) + " of an arena of " + std::to_string(layout.num_bytes);
}

std::string header_problem(const Header& header, std::span<const int32_t> rows, std::span<const int32_t> expert_counts, int64_t most_rows,
                           const core::BufferLayout& layout) {
  const auto number = [](const char* what, size_t index, int64_t value) {
    return std::string(what) + " " + std::to_string(index) + " is " + std::to_string(value);
  };
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    if (rows[rank] < 0 || rows[rank] > most_rows) return number("the number of rows for rank", rank, rows[rank]);
  }
  for (size_t e = 0; e < expert_counts.size(); ++e) {
    if (expert_counts[e] < 0) return number("the count of local expert", e, expert_counts[e]);
  }
  if (header.offer_bytes < 0 || header.offer_offset < 0) return "the lease has " + std::to_string(header.offer_bytes) + " bytes";
  if (header.offer_bytes > 0) {
    const std::string words = outside(layout, Region::block, static_cast<size_t>(header.offer_offset), static_cast<size_t>(header.offer_bytes));
    if (!words.empty()) return "the lease: " + words;
  }
  if (header.pull_offset < 0) return {};
  int64_t first = 0;  // of the addressee's rows; how far they reach only their routing tells
  const bool fits =
      !__builtin_mul_overflow(header.pull_first, header.pull_stride, &first) && !__builtin_add_overflow(first, header.pull_offset, &first);
  const bool good = fits && header.pull_first >= 0 && header.pull_offset < static_cast<int64_t>(layout.num_bytes);
  return good ? std::string() : "rows to be read in place do not lie in the arena: they begin at " + std::to_string(header.pull_offset);
}

}  // namespace turnout::engine
