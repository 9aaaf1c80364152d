#include "tools/problem.h"

#include <algorithm>
#include <cstring>

#include "tools/environment.h"

namespace turnout::tools {

namespace {
size_t size(int64_t n) { return static_cast<size_t>(n); }

std::string at(const char* what, int64_t index) { return std::string(what) + "[" + std::to_string(index) + "]"; }

/// Compares the first elements of a view with a vector.
template <class T>
std::string compare(const char* what, const TensorView& got, const std::vector<T>& want) {
  if (want.empty()) return "";
  if (!got.defined() || got.num_elements() != static_cast<int64_t>(want.size())) {
    return std::string(what) + " is " + (got.defined() ? got.to_string() : "not there") + ", expected " + std::to_string(want.size()) + " elements";
  }
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::memcmp(got.as<T>() + i, &want[i], sizeof(T)) == 0) continue;
    return at(what, static_cast<int64_t>(i)) + " is " + std::to_string(got.as<T>()[i]) + ", expected " + std::to_string(want[i]);
  }
  return "";
}

std::string compare(const char* what, const TensorView& got, int64_t want) {
  if (!got.defined() || got.as<int64_t>()[0] != want) {
    return std::string(what) + " is " + (got.defined() ? std::to_string(got.as<int64_t>()[0]) : "not there") + ", expected " + std::to_string(want);
  }
  return "";
}

/// The view as a matrix of rows: expert_slab has one dimension more.
const std::byte* row_of(const TensorView& view, int64_t row) {
  if (view.ndim < 3) return view.row(row);
  return view.row(row / view.shape[1]) + (row % view.shape[1]) * view.strides[1] * static_cast<int64_t>(size_of(view.dtype));
}

}  // namespace

void fill_rows(std::byte* out, DType dtype, int64_t num_elements, uint64_t seed) {
  Random random(seed);
  if (!is_summable(dtype)) {
    for (int64_t i = 0; i < num_elements * static_cast<int64_t>(size_of(dtype)); ++i) out[i] = static_cast<std::byte>(random.next());
    return;
  }
  struct Format {
    int exponent_bits, mantissa_bits;
  };
  const Format f = dtype == DType::fp64 ? Format{11, 52} : dtype == DType::fp32 ? Format{8, 23} : dtype == DType::bf16 ? Format{8, 7} : Format{5, 10};
  const uint64_t half = (uint64_t{1} << (f.exponent_bits - 1)) - 1;
  for (int64_t i = 0; i < num_elements; ++i) {
    const uint64_t bits = random.next(), exponent = half - 3 + (bits >> 60) % 4;
    const uint64_t value =
        (bits >> 59 & 1) << (f.exponent_bits + f.mantissa_bits) | exponent << f.mantissa_bits | (bits & ((uint64_t{1} << f.mantissa_bits) - 1));
    std::memcpy(out + i * static_cast<int64_t>(size_of(dtype)), &value, size_of(dtype));  // little endian: the low bytes
  }
}

core::DispatchProblem make_problem(const ProblemSpec& spec, int rows_of) {
  core::DispatchProblem p;
  p.experts = core::ExpertMap::split(spec.num_experts, spec.num_ranks());
  p.num_topk = spec.topk;
  p.hidden = spec.hidden;
  p.dtype = spec.dtype;
  p.has_weights = true;
  p.layout = spec.layout;
  p.capacity = spec.capacity;
  p.alignment = spec.alignment;
  p.quantize = spec.quantize;
  for (int rank = 0; rank < spec.num_ranks(); ++rank) {
    core::DispatchInput input;
    input.num_tokens = spec.tokens[size(rank)];
    RoutingTable table = make_routing(
        {.source = spec.routing, .num_experts = spec.num_experts, .topk = spec.topk, .num_tokens = input.num_tokens, .seed = spec.seed}, rank);
    input.topk_idx = std::move(table.topk_idx);
    input.topk_weights = std::move(table.topk_weights);
    if (rows_of < 0 || rows_of == rank) {
      input.x.resize(size(input.num_tokens * spec.hidden) * size_of(spec.dtype));
      fill_rows(input.x.data(), spec.dtype, input.num_tokens * spec.hidden, spec.seed * 1000 + static_cast<uint64_t>(rank));
    }
    p.ranks.push_back(std::move(input));
  }
  return p;
}

DispatchArgs dispatch_args(const core::DispatchProblem& p, int rank, Place& place) {
  const core::DispatchInput& input = p.ranks[size(rank)];
  DispatchArgs args;
  args.x = place.put(TensorView::dense(input.x.data(), p.dtype, {input.num_tokens, p.hidden}));
  args.topk_idx = place.put(TensorView::dense(input.topk_idx.data(), DType::i64, {input.num_tokens, p.num_topk}));
  args.topk_weights = place.put(TensorView::dense(input.topk_weights.data(), DType::fp32, {input.num_tokens, p.num_topk}));
  args.stream = place.stream();
  args.layout = p.layout;
  args.capacity = p.capacity;
  args.expert_alignment = p.alignment;
  args.quantize = p.quantize;
  return args;
}

int64_t most_rows(const core::DispatchProblem& p) {
  std::vector<int64_t> of_rank(size(p.experts.num_ranks())), of_expert(size(p.experts.num_experts()));
  for (const core::DispatchInput& input : p.ranks) {
    for (int64_t t = 0; t < input.num_tokens; ++t) {
      std::vector<char> seen(of_rank.size());
      for (int k = 0; k < p.num_topk; ++k) {
        const int64_t e = input.topk_idx[size(t * p.num_topk + k)];
        if (e < 0) continue;
        ++of_expert[size(e)];
        const auto rank = size(p.experts.rank_of(static_cast<int>(e)));
        if (!seen[rank]) ++of_rank[rank];
        seen[rank] = 1;
      }
    }
  }
  if (p.layout == Layout::rank_major) return *std::max_element(of_rank.begin(), of_rank.end());
  if (p.layout == Layout::expert_slab) return *std::max_element(of_expert.begin(), of_expert.end());
  int64_t most = 0;
  for (int rank = 0; rank < p.experts.num_ranks(); ++rank) {
    int64_t rows = 0;
    for (const int e : p.experts.experts_of(rank)) rows += (of_expert[size(e)] + p.alignment - 1) / p.alignment * p.alignment;
    most = std::max(most, rows);
  }
  return most;
}

namespace {

/// What a call on a GPU takes of the receive region beside its result, for any wire: rows that are laid out once they are all there,
/// and the partial sums that come back.
size_t gpu_staging_bytes(const core::DispatchProblem& p, int64_t max_tokens, size_t row_bytes) {
  const int num_ranks = p.experts.num_ranks();
  const size_t pairs = size(max_tokens) * size(std::min(num_ranks, p.num_topk));
  const size_t partial_sums = size(p.num_topk) * (size(p.hidden) * std::max<size_t>(4, size_of(p.dtype)) + 512);
  return size(max_tokens) * size(num_ranks) * row_bytes + pairs * partial_sums + (size_t{1} << 20);
}

}  // namespace

BufferConfig config_for(const core::DispatchProblem& p, int num_results, Device device) {
  BufferConfig config;
  apply_environment(config);
  config.num_experts = p.experts.num_experts();
  config.hidden = p.hidden;
  config.dtype = p.dtype;
  config.max_topk = p.num_topk;
  for (const auto& input : p.ranks) config.max_tokens_per_rank = std::max(config.max_tokens_per_rank, input.num_tokens);
  // What is known of the rows: exactly how many arrive. Beside a row lie its scales, experts and weights.
  int64_t rows = p.capacity ? std::max(*p.capacity, most_rows(p)) : most_rows(p);
  if (p.layout == Layout::expert_slab) rows *= p.experts.max_local();
  const size_t row = (size(p.hidden) * size_of(p.dtype) + 127) / 128 * 128 + 256 + size(p.num_topk) * 12 + size(p.hidden) / 32;
  config.receive_bytes = size(num_results) * (size(rows + 16) * row + (size_t{64} << 10));
  config.device = device;
  if (device.kind == DeviceKind::cuda) config.receive_bytes += gpu_staging_bytes(p, config.max_tokens_per_rank, row);
  return config;
}

std::string difference(const DispatchResult& got, const core::DispatchOutput& want, const core::DispatchProblem& p, Place& place) {
  TensorView sorted_rows = place.get(got.sorted_rows);
  // Where only the device knows how many pairs there are, the view is as long as there may be.
  const auto pairs = static_cast<int64_t>(want.sorted_rows.size());
  if (place.gpu() && sorted_rows.defined() && sorted_rows.shape[0] > pairs) sorted_rows.shape[0] = pairs;
  for (const std::string& text :
       {compare("num_rows", place.get(got.num_rows), want.num_rows), compare("num_dropped", place.get(got.num_dropped), want.num_dropped),
        compare("expert_counts", place.get(got.expert_counts), want.expert_counts),
        compare("expert_offsets", place.get(got.expert_offsets), want.expert_offsets), compare("sorted_rows", sorted_rows, want.sorted_rows),
        compare("topk_idx", place.get(got.topk_idx), want.topk_idx), compare("topk_weights", place.get(got.topk_weights), want.topk_weights)}) {
    if (!text.empty()) return text;
  }
  const bool quantised = p.quantize != Quantize::none;
  const size_t row_bytes = size(p.hidden) * (quantised ? 1 : size_of(p.dtype));
  const size_t scale_bytes = quantised ? size((p.hidden + 127) / 128) * (p.quantize == Quantize::fp8_e4m3 ? 4 : 1) : 0;
  const TensorView x = place.get(got.x), x_scales = place.get(got.x_scales);
  for (int64_t row = 0; row < want.array_rows; ++row) {
    const bool real = want.origin[size(row)].source >= 0, padding = p.layout == Layout::expert_major && row < want.num_rows;
    if (!real && !padding) continue;  // unspecified
    if (std::memcmp(row_of(x, row), want.x.data() + size(row) * row_bytes, row_bytes) != 0) return at("x", row) + " differs";
    if (scale_bytes && std::memcmp(row_of(x_scales, row), want.x_scales.data() + size(row) * scale_bytes, scale_bytes) != 0) {
      return at("x_scales", row) + " differs";
    }
  }
  return "";
}

std::string difference(const CombineResult& got, const core::CombineOutput& want, DType dtype, int64_t hidden, Place& place) {
  if (const std::string text = compare("num_lost", place.get(got.num_lost), want.num_lost); !text.empty()) return text;
  const size_t row_bytes = size(hidden) * size_of(dtype);
  const TensorView x = place.get(got.x);
  for (size_t t = 0; t < want.num_lost.size(); ++t) {
    if (std::memcmp(x.row(static_cast<int64_t>(t)), want.x.data() + t * row_bytes, row_bytes) != 0) {
      return at("combined x", static_cast<int64_t>(t)) + " differs";
    }
  }
  return "";
}

}  // namespace turnout::tools
