// The table that tells all ranks in what they disagree.
#include "engine/cpu/header.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "engine/cpu/known_facts.h"
#include "turnout/types.h"

namespace turnout::engine {

namespace {

constexpr size_t kNumFacts = sizeof(CallFacts) / sizeof(int64_t);
constexpr std::array<std::string_view, kNumFacts> kFactNames = {
    "library",        "call",          "epoch",         "expert map",        "mode",
    "layout",         "dtype of x",    "hidden of x",   "top-k of topk_idx", "topk_weights",
    "arrays in side", "bytes of side", "types of side", "capacity",          "expert_alignment",
    "quantize",       "wire",          "handle",        "on_failure"};

constexpr size_t index_of(size_t offset) { return offset / sizeof(int64_t); }
constexpr size_t kEpoch = index_of(offsetof(CallFacts, epoch)), kExpertMap = index_of(offsetof(CallFacts, generation)),
                 kSideTypes = index_of(offsetof(CallFacts, side_hash));

std::array<int64_t, kNumFacts> values_of(const CallFacts& facts) {
  std::array<int64_t, kNumFacts> values;
  std::memcpy(values.data(), &facts, sizeof facts);
  return values;
}

/// The fingerprint is a sum of products with odd numbers that have nothing to do with each other: the multiplications overlap, and
/// what a fact gives to it can be added later.
constexpr auto kFactors = [] {
  std::array<uint64_t, kNumFacts> factors{};
  uint64_t state = 0;
  for (uint64_t& factor : factors) {
    state += 0x9E3779B97F4A7C15ull;
    uint64_t z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    factor = (z ^ z >> 31) | 1;
  }
  return factors;
}();

/// Of a hash: enough to tell two apart.
std::string short_hash(int64_t value) {
  char text[10];
  std::snprintf(text, sizeof text, "#%08x", static_cast<unsigned>(value >> 8));
  return text;
}

/// Facts are called as the arguments of a dispatch; a combine has other ones for some.
std::string_view name_of(size_t fact, int64_t kind) {
  if (kind == static_cast<int64_t>(CallKind::dispatch)) return kFactNames[fact];
  switch (fact) {
    case 6: return "dtype of y";
    case 7: return "hidden of y";
    case 9: return "apply";
    case 10: return "side";
    default: return kFactNames[fact];
  }
}

/// How a fact's value reads in the table: names for the closed sets.
std::string fact_text(size_t fact, const CallFacts& facts) {
  const int64_t value = values_of(facts)[fact];
  const auto small = static_cast<uint8_t>(value);
  const bool dispatch = facts.kind == static_cast<int64_t>(CallKind::dispatch);
  switch (fact) {
    case 0: return std::to_string(value / 1'000'000) + "." + std::to_string(value / 1000 % 1000) + "." + std::to_string(value % 1000);
    case 1: return value == 1 ? "dispatch" : value == 2 ? "combine" : std::to_string(value);
    case 3:
    case 12: return short_hash(value);
    case 4: return std::string(name(static_cast<Mode>(small)));
    case 5: return std::string(name(static_cast<Layout>(small)));
    case 6: return std::string(name(static_cast<DType>(small)));
    case 9: return dispatch ? (value ? "given" : "none") : value == 0 ? "none" : value == 1 ? "source" : value == 2 ? "rows" : std::to_string(value);
    case 13: return value < 0 ? "exact" : std::to_string(value);
    case 15: return std::string(name(static_cast<Quantize>(small)));
    case 16: return std::string(name(static_cast<Wire>(small)));
    case 17: return value == 0 ? "none" : std::to_string(value >> 48) + "." + std::to_string(value & ((int64_t{1} << 48) - 1));
    case 18: return value == 0 ? "raise" : value == 1 ? "mask" : std::to_string(value);
    default: return std::to_string(value);
  }
}

}  // namespace

Reason Reason::of(const std::exception_ptr& why) {
  constexpr std::string_view kCut = "...";
  Reason reason;
  try {
    std::rethrow_exception(why);
  } catch (const std::exception& e) {
    std::string_view words = e.what();
    for (const std::string_view call : {"dispatch: ", "combine: "}) {
      if (words.starts_with(call)) words.remove_prefix(call.size());
    }
    const bool fits = words.size() < sizeof reason.text;
    words = words.substr(0, fits ? words.size() : sizeof reason.text - 1 - kCut.size());
    std::copy(words.begin(), words.end(), reason.text);
    if (!fits) std::copy(kCut.begin(), kCut.end(), reason.text + words.size());
  } catch (...) {
    // The refuser alone knows.
  }
  return reason;
}

std::string Reason::words() const {
  const std::string words(text, strnlen(text, sizeof text));
  return words.empty() ? words : ": " + words;
}

uint64_t fingerprint(const CallFacts& facts) {
  const auto values = std::bit_cast<std::array<uint64_t, kNumFacts>>(facts);
  uint64_t sum = 0;
  for (size_t fact = 0; fact < kNumFacts; ++fact) sum += values[fact] * kFactors[fact];
  return sum;
}

uint64_t fingerprint(const KnownFacts& known, int64_t epoch, int64_t handle) {
  return known.sum + static_cast<uint64_t>(epoch) * kFactors[offsetof(CallFacts, epoch) / sizeof(int64_t)] +
         static_cast<uint64_t>(handle) * kFactors[offsetof(CallFacts, handle) / sizeof(int64_t)];
}

std::string disagreement(std::span<const CallFacts> facts) {
  std::string table;
  const auto all_alike = [&](int64_t CallFacts::*fact) {
    return std::all_of(facts.begin(), facts.end(), [&](const CallFacts& f) { return f.*fact == facts[0].*fact; });
  };
  const bool one_kind = all_alike(&CallFacts::kind), same_number_of_sides = all_alike(&CallFacts::num_side);
  if (std::all_of(facts.begin(), facts.end(), [&](const CallFacts& f) { return f == facts[0]; })) return table;
  for (size_t fact = 0; fact < kNumFacts; ++fact) {
    const int64_t first = values_of(facts[0])[fact];
    const bool same = std::all_of(facts.begin(), facts.end(), [&](const CallFacts& f) { return values_of(f)[fact] == first; });
    if (same) continue;
    // What dispatch and combine say of themselves is not to be compared, nor are the types of more and of fewer arrays.
    if (!one_kind && fact > kEpoch) break;
    if (fact == kSideTypes && !same_number_of_sides) continue;
    table += "\n  " + std::string(name_of(fact, facts[0].kind)) + ":";
    for (size_t rank = 0; rank < facts.size(); ++rank) {
      table += (rank ? ", " : " ") + ("rank " + std::to_string(rank) + " = ") + fact_text(fact, facts[rank]);
    }
    if (fact == kExpertMap) table += " (hashes: set_expert_to_rank was given different maps, or before different calls)";
  }
  return table;
}

}  // namespace turnout::engine
