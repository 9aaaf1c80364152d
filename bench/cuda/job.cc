// Problems of the GPU benchmark.
#include "cuda/job.h"

#include <algorithm>
#include <stdexcept>

#include "core/dtype.h"
#include "core/math.h"
#include "core/routing.h"
#include "tools/routing_source.h"

namespace turnout::bench {

void cuda_ok(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}

DeviceArray::DeviceArray(size_t num_bytes) {
  cuda_ok(cudaMalloc(&data_, std::max<size_t>(num_bytes, 16)), "cudaMalloc");
  cuda_ok(cudaMemset(data_, 0xA5, std::max<size_t>(num_bytes, 16)), "cudaMemset");
}
DeviceArray::DeviceArray(const void* host, size_t num_bytes) : DeviceArray(num_bytes) {
  cuda_ok(cudaMemcpy(data_, host, num_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}

float hash_value(uint64_t seed, uint64_t row, uint64_t column) {
  uint64_t z = (seed * 0x9E3779B97F4A7C15ull ^ row * 0xD1B54A32D192ED03ull) + column * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 31) * 0x94D049BB133111EBull;
  z ^= z >> 29;
  return static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(z >> 16))) * 0x1p-31f;
}

std::vector<uint16_t> bf16_rows(uint64_t seed, int64_t rows, int64_t hidden) {
  std::vector<uint16_t> out(static_cast<size_t>(rows * hidden));
  size_t at = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < hidden; ++i) out[at++] = core::float_to_bf16(hash_value(seed, static_cast<uint64_t>(r), static_cast<uint64_t>(i)));
  }
  return out;
}

Problem make_problem(const Shape& shape, int num_ranks, uint64_t seed) {
  Problem p{shape, num_ranks, seed, {}, {}};
  for (int rank = 0; rank < num_ranks; ++rank) {
    tools::RoutingOptions options;
    options.source = shape.routing;
    options.num_experts = shape.experts;
    options.topk = shape.topk;
    options.num_tokens = shape.tokens;
    options.seed = seed;
    tools::RoutingTable table = tools::make_routing(options, rank);
    p.ids.push_back(std::move(table.topk_idx));
    p.weights.push_back(std::move(table.topk_weights));
  }
  return p;
}

namespace {

/// Ranks that token `t` of `source` goes to, ascending.
std::vector<int> ranks_of(const Problem& p, const core::ExpertMap& map, int source, int64_t t) {
  std::vector<int> ranks;
  for (int k = 0; k < p.shape.topk; ++k) {
    const int64_t id = p.ids[static_cast<size_t>(source)][static_cast<size_t>(t * p.shape.topk + k)];
    if (id >= 0) ranks.push_back(map.rank_of(static_cast<int>(id)));
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

}  // namespace

Traffic traffic_of(const Problem& p) {
  const core::ExpertMap map = core::ExpertMap::split(p.shape.experts, p.num_ranks);
  Traffic all;
  std::vector<int64_t> leaving(static_cast<size_t>(p.num_ranks), 0), pairs(static_cast<size_t>(p.num_ranks), 0);
  for (int s = 0; s < p.num_ranks; ++s) {
    for (int64_t t = 0; t < p.shape.tokens; ++t) {
      for (int r : ranks_of(p, map, s, t)) {
        if (r == s) ++all.local_rows;
        else ++all.remote_rows, ++leaving[static_cast<size_t>(s)];
      }
    }
  }
  for (const std::vector<int64_t>& ids : p.ids) {
    for (int64_t id : ids) {
      if (id >= 0) ++pairs[static_cast<size_t>(map.rank_of(static_cast<int>(id)))];
    }
  }
  all.most_remote_to_one = *std::max_element(leaving.begin(), leaving.end());
  all.most_pairs = *std::max_element(pairs.begin(), pairs.end());
  return all;
}

int64_t capacity_of(const Problem& p) {
  const core::ExpertMap map = core::ExpertMap::split(p.shape.experts, p.num_ranks);
  std::vector<int64_t> rows(static_cast<size_t>(p.num_ranks), 0), pairs(static_cast<size_t>(p.shape.experts), 0);
  for (int s = 0; s < p.num_ranks; ++s) {
    for (int64_t t = 0; t < p.shape.tokens; ++t) {
      for (int r : ranks_of(p, map, s, t)) ++rows[static_cast<size_t>(r)];
    }
    for (int64_t id : p.ids[static_cast<size_t>(s)]) {
      if (id >= 0) ++pairs[static_cast<size_t>(id)];
    }
  }
  if (p.shape.layout == Layout::rank_major) return *std::max_element(rows.begin(), rows.end());
  if (p.shape.layout == Layout::expert_slab) return *std::max_element(pairs.begin(), pairs.end());
  int64_t most = 0;
  for (int r = 0; r < p.num_ranks; ++r) {
    int64_t padded = 0;
    for (int e : map.experts_of(r)) padded += core::align_up(pairs[static_cast<size_t>(e)], p.shape.alignment);
    most = std::max(most, padded);
  }
  return most;
}

std::vector<uint16_t> y_rows(const Problem& p, int rank, int64_t rows) {
  return bf16_rows(p.seed + 1000 + static_cast<uint64_t>(rank), rows, p.shape.hidden);
}

}  // namespace turnout::bench
