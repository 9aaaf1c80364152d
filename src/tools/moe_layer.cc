#include "tools/moe_layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/dtype.h"
#include "tools/routing_source.h"

namespace turnout::tools {

namespace {

size_t size(int64_t n) { return static_cast<size_t>(n); }

std::vector<float> random_matrix(uint64_t seed, int64_t n, double scale) {
  Random random(seed);
  std::vector<float> values(size(n));
  for (float& v : values) v = static_cast<float>((random.real() * 2 - 1) * scale);
  return values;
}

}  // namespace

void widen_row(const std::byte* row, DType dtype, int64_t n, float* out) {
  if (dtype == DType::fp32) {
    std::memcpy(out, row, size(n) * 4);
    return;
  }
  const auto* bits = reinterpret_cast<const uint16_t*>(row);
  for (int64_t i = 0; i < n; ++i) out[i] = core::bf16_to_float(bits[i]);
}

void narrow_row(const float* values, DType dtype, int64_t n, std::byte* row) {
  if (dtype == DType::fp32) {
    std::memcpy(row, values, size(n) * 4);
    return;
  }
  auto* bits = reinterpret_cast<uint16_t*>(row);
  for (int64_t i = 0; i < n; ++i) bits[i] = core::float_to_bf16(values[i]);
}

MoeLayer::MoeLayer(const LayerShape& s)
    : shape_(s),
      router_(random_matrix(s.seed, s.num_experts * s.hidden, 1.0)),
      up_(random_matrix(s.seed + 1, s.num_experts * s.inner * s.hidden, 2.0 / std::sqrt(static_cast<double>(s.hidden)))),
      down_(random_matrix(s.seed + 2, s.num_experts * s.inner * s.hidden, 2.0 / std::sqrt(static_cast<double>(s.inner)))) {}

std::vector<std::byte> MoeLayer::embed(const std::vector<std::string>& words) const {
  std::vector<std::byte> x(words.size() * row_bytes());
  std::vector<float> row(size(shape_.hidden));
  for (size_t w = 0; w < words.size(); ++w) {
    Random random(hash_text(words[w]));
    for (float& v : row) v = static_cast<float>(random.real() * 2 - 1);
    narrow_row(row.data(), shape_.dtype, shape_.hidden, x.data() + w * row_bytes());
  }
  return x;
}

void MoeLayer::route(const std::vector<std::byte>& x, std::vector<int32_t>& topk_idx, std::vector<float>& topk_weights) const {
  const auto tokens = static_cast<int64_t>(x.size() / row_bytes());
  const auto topk = static_cast<int64_t>(shape_.topk);
  topk_idx.assign(size(tokens * topk), -1);
  topk_weights.assign(size(tokens * topk), 0.0f);
  std::vector<float> row(size(shape_.hidden)), score(size(shape_.num_experts));
  std::vector<int32_t> order(score.size());
  for (int64_t t = 0; t < tokens; ++t) {
    widen_row(x.data() + size(t) * row_bytes(), shape_.dtype, shape_.hidden, row.data());
    for (size_t e = 0; e < score.size(); ++e) {
      const float* w = router_.data() + e * row.size();
      score[e] = std::inner_product(row.begin(), row.end(), w, 0.0f) / std::sqrt(static_cast<float>(shape_.hidden));
    }
    const float most = *std::max_element(score.begin(), score.end());
    float sum = 0;
    for (float& v : score) sum += v = std::exp(v - most);
    for (float& v : score) v /= sum;
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + topk, order.end(),
                      [&](int32_t a, int32_t b) { return score[size(a)] != score[size(b)] ? score[size(a)] > score[size(b)] : a < b; });
    float chosen = 0;
    for (int64_t k = 0; k < topk; ++k) chosen += score[size(order[size(k)])];
    for (int64_t k = 0; k < topk; ++k) {
      topk_idx[size(t * topk + k)] = order[size(k)];
      topk_weights[size(t * topk + k)] = score[size(order[size(k)])] / chosen;
    }
  }
}

void MoeLayer::apply_expert(int expert, const std::byte* x, std::byte* y) const {
  const size_t hidden = size(shape_.hidden), inner = size(shape_.inner);
  thread_local std::vector<float> in, out;
  in.resize(hidden);
  out.assign(hidden, 0.0f);
  widen_row(x, shape_.dtype, shape_.hidden, in.data());
  const float* up = up_.data() + size(expert) * inner * hidden;
  const float* down = down_.data() + size(expert) * inner * hidden;
  for (size_t i = 0; i < inner; ++i, up += hidden, down += hidden) {
    const float a = std::inner_product(in.begin(), in.end(), up, 0.0f);
    const float s = a / (1.0f + std::exp(-a));
    for (size_t h = 0; h < hidden; ++h) out[h] += s * down[h];
  }
  narrow_row(out.data(), shape_.dtype, shape_.hidden, y);
}

std::vector<std::byte> MoeLayer::forward(const std::vector<std::string>& words) const {
  const std::vector<std::byte> x = embed(words);
  std::vector<int32_t> idx;
  std::vector<float> weights;
  route(x, idx, weights);
  std::vector<std::byte> out(x.size()), y(row_bytes());
  std::vector<float> term(size(shape_.hidden)), sum(term.size());
  const auto topk = size(shape_.topk);
  for (size_t t = 0; t < words.size(); ++t) {
    for (size_t k = 0; k < topk; ++k) {
      apply_expert(idx[t * topk + k], x.data() + t * row_bytes(), y.data());
      widen_row(y.data(), shape_.dtype, shape_.hidden, term.data());
      const float w = weights[t * topk + k];
      for (size_t h = 0; h < sum.size(); ++h) sum[h] = k == 0 ? w * term[h] : sum[h] + w * term[h];
    }
    narrow_row(sum.data(), shape_.dtype, shape_.hidden, out.data() + t * row_bytes());
  }
  return out;
}

}  // namespace turnout::tools
