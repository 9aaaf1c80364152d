// Sampled rows and sums of the GPU benchmark against the problem itself.
#include <algorithm>
#include <cstring>

#include "core/dtype.h"
#include "core/math.h"
#include "core/routing.h"
#include "core/scale.h"
#include "cuda/job.h"

namespace turnout::bench {

namespace {

template <class T>
std::vector<T> download(const void* from, size_t n, cudaStream_t stream) {
  std::vector<T> to(n);
  cuda_ok(cudaMemcpyAsync(to.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost, stream), "download");
  cuda_ok(cudaStreamSynchronize(stream), "download");
  return to;
}

struct Origin {
  int source;
  int64_t token;
  int k;  ///< -1: rank_major
};

/// Where each row of the result of `rank` comes from, and its place (row of x, slab: flat). Nothing is dropped.
struct Placed {
  std::vector<Origin> origins;
  std::vector<int64_t> rows;
};
Placed place(const Problem& p, int rank, int64_t capacity) {
  const core::ExpertMap map = core::ExpertMap::split(p.shape.experts, p.num_ranks);
  Placed out;
  std::vector<int64_t> counts(static_cast<size_t>(map.num_local(rank)), 0);
  std::vector<int> locals;
  for (int s = 0; s < p.num_ranks; ++s) {
    for (int64_t t = 0; t < p.shape.tokens; ++t) {
      bool any = false;
      for (int k = 0; k < p.shape.topk; ++k) {
        const int64_t id = p.ids[static_cast<size_t>(s)][static_cast<size_t>(t * p.shape.topk + k)];
        if (id < 0 || map.rank_of(static_cast<int>(id)) != rank) continue;
        if (p.shape.layout == Layout::rank_major) {
          if (!any) out.origins.push_back({s, t, -1});
        } else {
          out.origins.push_back({s, t, k});
          locals.push_back(map.local_of(static_cast<int>(id)));
          out.rows.push_back(counts[static_cast<size_t>(locals.back())]++);
        }
        any = true;
      }
    }
  }
  if (p.shape.layout == Layout::rank_major) {
    for (size_t i = 0; i < out.origins.size(); ++i) out.rows.push_back(static_cast<int64_t>(i));
    return out;
  }
  std::vector<int64_t> offsets{0};
  for (int64_t n : counts)
    offsets.push_back(offsets.back() + (p.shape.layout == Layout::expert_slab ? capacity : core::align_up(n, p.shape.alignment)));
  for (size_t i = 0; i < out.rows.size(); ++i) out.rows[i] += offsets[static_cast<size_t>(locals[i])];
  return out;
}

constexpr int64_t kSamples = 97;

}  // namespace

std::string check_dispatch(const Problem& p, int rank, const DispatchResult& result, cudaStream_t stream) {
  const Placed placed = place(p, rank, p.shape.layout == Layout::expert_slab ? result.x.shape[1] : 0);
  const auto total = static_cast<int64_t>(placed.origins.size());
  const int64_t num_rows = download<int64_t>(result.num_rows.data, 1, stream)[0];
  const int64_t dropped = download<int64_t>(result.num_dropped.data, 1, stream)[0];
  if (p.shape.layout != Layout::expert_major && num_rows != total)
    return "num_rows is " + std::to_string(num_rows) + ", expected " + std::to_string(total);
  if (dropped != 0) return std::to_string(dropped) + " rows were dropped";
  const int64_t hidden = p.shape.hidden, step = std::max<int64_t>(1, total / kSamples);
  const bool fp8 = p.shape.fp8_rows || p.shape.quantize != Quantize::none;
  const size_t last = static_cast<size_t>(result.x.ndim - 1);
  const int64_t stride = result.x.strides[last - 1] * static_cast<int64_t>(size_of(result.x.dtype));
  for (int64_t i = 0; i < total; i += step) {
    const Origin& o = placed.origins[static_cast<size_t>(i)];
    const auto* at = static_cast<const std::byte*>(result.x.data) + placed.rows[static_cast<size_t>(i)] * stride;
    std::vector<float> x(static_cast<size_t>(hidden));
    for (int64_t c = 0; c < hidden; ++c) {
      x[static_cast<size_t>(c)] = core::bf16_to_float(
          core::float_to_bf16(hash_value(p.seed + static_cast<uint64_t>(o.source), static_cast<uint64_t>(o.token), static_cast<uint64_t>(c))));
    }
    const std::string where = "row " + std::to_string(i) + " (rank " + std::to_string(o.source) + ", token " + std::to_string(o.token) + ")";
    if (!fp8) {
      const auto got = download<uint16_t>(at, static_cast<size_t>(hidden), stream);
      for (int64_t c = 0; c < hidden; ++c) {
        if (got[static_cast<size_t>(c)] != core::float_to_bf16(x[static_cast<size_t>(c)])) return where + " differs at " + std::to_string(c);
      }
      continue;
    }
    const auto got = download<uint8_t>(at, static_cast<size_t>(hidden), stream);
    for (int64_t b = 0; b < hidden; b += 128) {
      uint8_t q[128];
      float scale = 0;
      core::quantize_block(x.data() + b, std::min<int64_t>(128, hidden - b), q, &scale, nullptr);
      if (std::memcmp(q, got.data() + b, static_cast<size_t>(std::min<int64_t>(128, hidden - b))) != 0)
        return where + " differs in block " + std::to_string(b / 128);
    }
  }
  return "";
}

std::string check_combine(const Problem& p, int rank, const CombineResult& result, cudaStream_t stream) {
  std::vector<Placed> placed;
  const int64_t capacity = capacity_of(p);
  for (int r = 0; r < p.num_ranks; ++r) placed.push_back(place(p, r, capacity));
  const int64_t hidden = p.shape.hidden, step = std::max<int64_t>(1, p.shape.tokens / 41);
  for (int64_t t = 0; t < p.shape.tokens; t += step) {
    const auto got =
        download<uint16_t>(static_cast<const std::byte*>(result.x.data) + t * result.x.strides[0] * 2, static_cast<size_t>(hidden), stream);
    std::vector<float> total(static_cast<size_t>(hidden), 0.0f);
    bool started = false;
    for (int r = 0; r < p.num_ranks; ++r) {
      std::vector<float> part(static_cast<size_t>(hidden), 0.0f);
      bool any = false;
      const Placed& at = placed[static_cast<size_t>(r)];
      for (size_t i = 0; i < at.origins.size(); ++i) {
        if (at.origins[i].source != rank || at.origins[i].token != t) continue;
        for (int64_t c = 0; c < hidden; ++c) {
          const float y = core::bf16_to_float(
              core::float_to_bf16(hash_value(p.seed + 1000 + static_cast<uint64_t>(r), static_cast<uint64_t>(at.rows[i]), static_cast<uint64_t>(c))));
          float& sum = part[static_cast<size_t>(c)];
          sum = any ? sum + y : y;
        }
        any = true;
      }
      if (!any) continue;
      for (int64_t c = 0; c < hidden; ++c) {
        const float rounded = core::bf16_to_float(core::float_to_bf16(part[static_cast<size_t>(c)]));
        float& sum = total[static_cast<size_t>(c)];
        sum = started ? sum + rounded : rounded;
      }
      started = true;
    }
    for (int64_t c = 0; c < hidden; ++c) {
      if (got[static_cast<size_t>(c)] != core::float_to_bf16(total[static_cast<size_t>(c)]))
        return "token " + std::to_string(t) + " differs at " + std::to_string(c);
    }
  }
  return "";
}

}  // namespace turnout::bench
