// Random problems from a seed: shapes, routings, rows and the choices of a dispatch and a combine. The same seed gives the same
// problem on every machine and rank, so each rank of a test makes the whole problem and takes its own part.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "core/reference.h"

namespace turnout::testing {

/// SplitMix64: small, seedable, the same everywhere (the distributions of <random> are not).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  /// In [0, n).
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  /// In [low, high], both included.
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  bool chance(double p) { return unit() < p; }
  template <class Choices>
  auto one_of(const Choices& choices) {
    return *(std::begin(choices) + below(static_cast<int64_t>(std::size(choices))));
  }

 private:
  uint64_t state_;
};

enum class RoutingKind : uint8_t { uniform, zipf, one_expert, mostly_none, all_none, duplicates };
inline constexpr RoutingKind kRoutingKinds[] = {RoutingKind::uniform,     RoutingKind::zipf,     RoutingKind::one_expert,
                                                RoutingKind::mostly_none, RoutingKind::all_none, RoutingKind::duplicates};
inline std::string name(RoutingKind kind) {
  static constexpr const char* kNames[] = {"uniform", "zipf", "one_expert", "mostly_none", "all_none", "duplicates"};
  return kNames[static_cast<size_t>(kind)];
}

/// Expert ids [num_tokens, num_topk]. Uniform and zipf choose without repetition while there are experts left, and -1 after
/// (k > experts); duplicates chooses with repetition from few.
inline std::vector<int64_t> random_topk(Random& random, RoutingKind kind, int64_t num_tokens, int num_topk, int num_experts) {
  std::vector<double> weight(static_cast<size_t>(num_experts), 1.0);
  if (kind == RoutingKind::zipf) {
    for (size_t e = 0; e < weight.size(); ++e) weight[e] = 1.0 / static_cast<double>(e + 1);
  }
  const int64_t favourite = random.below(num_experts);
  std::vector<int64_t> ids;
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::vector<double> left = weight;
    for (int k = 0; k < num_topk; ++k) {
      int64_t id = -1;
      switch (kind) {
        case RoutingKind::all_none: break;
        case RoutingKind::one_expert: id = favourite; break;
        case RoutingKind::duplicates: id = random.below(std::min(num_experts, 2)); break;
        case RoutingKind::mostly_none: id = random.chance(0.8) ? -1 : random.below(num_experts); break;
        default: {
          double at = random.unit() * std::accumulate(left.begin(), left.end(), 0.0);
          for (size_t e = 0; e < left.size(); ++e) {
            if (left[e] == 0.0) continue;
            id = static_cast<int64_t>(e);
            if ((at -= left[e]) < 0.0) break;
          }
          if (id >= 0) left[static_cast<size_t>(id)] = 0.0;
        }
      }
      ids.push_back(id);
    }
  }
  return ids;
}

/// Random element of a type that can be added: magnitude about 1, or one of the special values with probability `specials`.
inline uint64_t random_element(Random& random, DType dtype, double specials) {
  struct Format {
    int exponent_bits, mantissa_bits;
  };
  const Format f = dtype == DType::fp64 ? Format{11, 52} : dtype == DType::fp32 ? Format{8, 23} : dtype == DType::bf16 ? Format{8, 7} : Format{5, 10};
  const uint64_t sign = (random.bits() & 1) << (f.exponent_bits + f.mantissa_bits), most = (uint64_t{1} << f.exponent_bits) - 1;
  const uint64_t mantissa = random.bits() & ((uint64_t{1} << f.mantissa_bits) - 1), half = most >> 1;
  if (!random.chance(specials)) return sign | (half - 4 + static_cast<uint64_t>(random.below(6))) << f.mantissa_bits | mantissa;
  switch (random.below(5)) {
    case 0: return sign;                                              // zeros
    case 1: return sign | most << f.mantissa_bits;                    // infinities
    case 2: return sign | most << f.mantissa_bits | mantissa | 1;     // NaNs with a payload
    case 3: return sign | mantissa;                                   // subnormals
    default: return sign | (most - 1) << f.mantissa_bits | mantissa;  // near overflow
  }
}

/// `n` elements; of types that cannot be added, any bytes.
inline core::Bytes random_rows(Random& random, DType dtype, int64_t n, double specials = 0.0) {
  const size_t size = size_of(dtype);
  core::Bytes bytes(static_cast<size_t>(n) * size);
  for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
    const uint64_t element = is_summable(dtype) ? random_element(random, dtype, specials) : random.bits();
    std::memcpy(bytes.data() + i * size, &element, size);  // little endian: the low bytes
  }
  return bytes;
}

inline std::vector<float> random_floats(Random& random, int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = static_cast<float>(random.unit() * 2 - 1);
  return values;
}

/// What random_problem() may choose from.
struct RandomLimits {
  int num_ranks = 2;
  int64_t max_tokens = 24;
  int64_t max_hidden = 300;
  int max_experts = 17;
  int min_topk = 1, max_topk = 9;
  bool shuffle_experts = true;  ///< expert_to_rank in any order, ranks without experts included
  double zero_tokens = 0.15;    ///< probability that a rank has none
  double specials = 0.05;       ///< of rows that are added
  std::vector<RoutingKind> kinds{std::begin(kRoutingKinds), std::end(kRoutingKinds)};
  std::vector<Layout> layouts{Layout::rank_major, Layout::expert_major, Layout::expert_slab};
  std::vector<DType> dtypes{DType::bf16, DType::fp16, DType::fp32, DType::fp64, DType::u8, DType::i64};
  std::vector<DType> sums{DType::bf16, DType::fp16, DType::fp32, DType::fp64};  ///< of a combine
  std::vector<Wire> wires{Wire::payload, Wire::fp32, Wire::fp8, Wire::rows};
  bool exact = true, capacity = true, quantize = true, side = true, several_nodes = true;
  bool aligned = false;  ///< rows of whole 128-byte blocks, side arrays of whole 16-byte words
  bool fused = false;    ///< with `aligned`: quantised wherever the dtype allows it, and the last block of a row may be shorter
};

/// A dispatch and the choices of a combine of it.
struct RandomProblem {
  RoutingKind kind = RoutingKind::uniform;
  std::vector<int> expert_to_rank;
  std::vector<int> node_of_rank;
  core::DispatchProblem dispatch;
  std::vector<DType> side_dtypes;  ///< side array i has side_bytes[i] / size_of(side_dtypes[i]) columns
  // Of the combine.
  DType dtype = DType::bf16;
  int64_t hidden = 0;
  CombineWeights apply = CombineWeights::none;
  Wire wire = Wire::payload;
  bool with_side = false;
  double specials = 0.0;
};

/// A capacity that matters: 0, 1, or about what the balanced load needs.
inline int64_t random_capacity(Random& random, const core::DispatchProblem& d) {
  int64_t tokens = 0;
  for (const auto& in : d.ranks) tokens += in.num_tokens;
  const int64_t groups = d.layout == Layout::expert_slab ? d.experts.num_experts() : d.experts.num_ranks();
  const int64_t balanced = tokens * d.num_topk / groups + 1;
  const int64_t choices[] = {0, 1, balanced / 2, balanced, balanced + d.alignment, tokens * d.num_topk + d.alignment * d.experts.num_experts()};
  return random.one_of(choices);
}

inline std::vector<int> random_owners(Random& random, int num_experts, const RandomLimits& limits) {
  std::vector<int> owners(static_cast<size_t>(num_experts));
  const bool shuffled = limits.shuffle_experts && random.chance(0.5);
  const core::ExpertMap split = core::ExpertMap::split(num_experts, limits.num_ranks);
  for (int e = 0; e < num_experts; ++e)
    owners[static_cast<size_t>(e)] = shuffled ? static_cast<int>(random.below(limits.num_ranks)) : split.rank_of(e);
  return owners;
}

inline RandomProblem random_problem(uint64_t seed, const RandomLimits& limits) {
  Random random(seed);
  RandomProblem p;
  p.kind = random.one_of(limits.kinds);
  core::DispatchProblem& d = p.dispatch;
  const int num_experts = static_cast<int>(random.between(1, limits.max_experts));
  p.expert_to_rank = random_owners(random, num_experts, limits);
  d.experts = core::ExpertMap::of(p.expert_to_rank, limits.num_ranks);
  const int num_nodes = limits.several_nodes ? static_cast<int>(random.between(1, limits.num_ranks)) : 1;
  for (int r = 0; r < limits.num_ranks; ++r) p.node_of_rank.push_back(static_cast<int>(random.below(num_nodes)));
  d.num_topk = static_cast<int>(random.between(limits.min_topk, limits.max_topk));
  d.hidden = random.between(1, limits.max_hidden);
  if (limits.aligned) d.hidden = (d.hidden + 127) / 128 * 128;
  d.dtype = random.one_of(limits.dtypes);
  d.has_weights = random.chance(0.7);
  d.layout = random.one_of(limits.layouts);
  if (d.layout == Layout::expert_major) d.alignment = static_cast<int>(random.one_of(std::vector<int>{1, 1, 3, 8, 16}));
  const bool can_quantize = d.dtype == DType::bf16 || d.dtype == DType::fp16 || d.dtype == DType::fp32;
  if (limits.quantize && can_quantize && random.chance(limits.fused ? 1.0 : 0.3))
    d.quantize = random.chance(0.5) ? Quantize::fp8_e4m3 : Quantize::fp8_e4m3_ue8m0;
  if (limits.aligned && d.quantize != Quantize::none) {  // scales of whole 16-byte words, too
    const int64_t to = d.quantize == Quantize::fp8_e4m3 ? 512 : 2048;
    d.hidden = (d.hidden + to - 1) / to * to;
    if (limits.fused && random.chance(0.5)) d.hidden -= 16 * random.between(1, 7);
  }
  for (int64_t i = limits.side ? random.below(3) : 0; i > 0; --i) {
    p.side_dtypes.push_back(random.one_of(std::vector<DType>{DType::fp32, DType::u8, DType::bf16}));
    d.side_bytes.push_back(static_cast<size_t>(random.between(1, 5)) * (limits.aligned ? 16 : size_of(p.side_dtypes.back())));
  }
  for (int r = 0; r < limits.num_ranks; ++r) {
    core::DispatchInput& in = d.ranks.emplace_back();
    in.num_tokens = random.chance(limits.zero_tokens) ? 0 : random.between(1, limits.max_tokens);
    in.x = random_rows(random, d.dtype, in.num_tokens * d.hidden, limits.specials);
    in.topk_idx = random_topk(random, p.kind, in.num_tokens, d.num_topk, num_experts);
    if (d.has_weights) in.topk_weights = random_floats(random, in.num_tokens * d.num_topk);
    for (size_t width : d.side_bytes) in.side.push_back(random_rows(random, DType::u8, in.num_tokens * static_cast<int64_t>(width)));
  }
  if (d.layout == Layout::expert_slab || (limits.capacity && (!limits.exact || random.chance(0.5)))) d.capacity = random_capacity(random, d);

  const bool by_rank = d.layout == Layout::rank_major;
  p.dtype = random.one_of(limits.aligned ? std::vector<DType>{DType::bf16, DType::fp16} : limits.sums);
  p.hidden = random.chance(0.7) ? d.hidden : random.between(1, limits.max_hidden);
  if (limits.aligned) p.hidden = (p.hidden + 7) / 8 * 8;
  p.apply = random.one_of(std::vector<CombineWeights>{CombineWeights::none, CombineWeights::source, CombineWeights::rows});
  if (p.apply == CombineWeights::source && (by_rank || !d.has_weights)) p.apply = CombineWeights::none;
  p.wire = random.one_of(limits.wires);
  if (p.wire == Wire::rows && by_rank) p.wire = Wire::payload;
  p.with_side = random.chance(0.4);
  if (limits.aligned && random.chance(0.6)) p.wire = Wire::payload, p.with_side = false;
  if (p.wire == Wire::rows && random.chance(0.4)) p.apply = CombineWeights::tokens;
  p.specials = limits.specials;
  return p;
}

/// The combine of `p`, with random rows. `received` must outlive it, as must `p`.
inline core::CombineProblem random_combine(const RandomProblem& p, const std::vector<core::DispatchOutput>& received, uint64_t seed) {
  Random random(seed);
  core::CombineProblem c;
  c.dispatch = &p.dispatch;
  c.received = &received;
  c.topology = core::Topology::of(p.node_of_rank);
  c.hidden = p.hidden;
  c.dtype = p.dtype;
  c.apply = p.apply;
  c.wire = p.wire;
  c.with_side = p.with_side;
  for (const core::DispatchOutput& out : received) {
    const size_t rank = c.ranks.size();
    core::CombineInput& in = c.ranks.emplace_back();
    in.y = random_rows(random, p.dtype, out.array_rows * p.hidden, p.specials);
    if (p.apply == CombineWeights::rows) in.weights = random_floats(random, out.array_rows);
    if (p.apply == CombineWeights::tokens) in.weights = random_floats(random, static_cast<int64_t>(p.dispatch.ranks[rank].topk_idx.size()));
    if (p.with_side) in.side = random_floats(random, out.array_rows * (p.dispatch.layout == Layout::rank_major ? p.dispatch.num_topk : 1));
  }
  return c;
}

}  // namespace turnout::testing
