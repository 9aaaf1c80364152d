// A small but real Mixture-of-Experts layer on words: embedding, router, experts. All weights come from one seed, so every
// rank (and a layer on one rank) computes with the same ones.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "turnout/types.h"

namespace turnout::tools {

struct LayerShape {
  int64_t hidden = 256, inner = 64;
  int num_experts = 16, topk = 4;
  DType dtype = DType::bf16;
  uint64_t seed = 20;
};

class MoeLayer {
 public:
  explicit MoeLayer(const LayerShape& shape);

  /// Rows of the words, [words, hidden] of the dtype: numbers drawn from the hash of a word.
  std::vector<std::byte> embed(const std::vector<std::string>& words) const;
  /// Router: projection, softmax over experts, the best top-k in falling order, weights normalised.
  void route(const std::vector<std::byte>& x, std::vector<int32_t>& topk_idx, std::vector<float>& topk_weights) const;
  /// y = down(silu(up(x))) of one row, fp32 inside, rounded to the dtype.
  void apply_expert(int expert, const std::byte* x, std::byte* y) const;
  /// The whole layer with nothing sent anywhere: rows in k order, weighted and added in fp32, one rounding.
  std::vector<std::byte> forward(const std::vector<std::string>& words) const;

  const LayerShape& shape() const { return shape_; }
  size_t row_bytes() const { return static_cast<size_t>(shape_.hidden) * size_of(shape_.dtype); }

 private:
  LayerShape shape_;
  std::vector<float> router_;     ///< [experts, hidden]
  std::vector<float> up_, down_;  ///< [experts, inner, hidden], [experts, inner, hidden] (transposed: rows are inner)
};

/// Elements of a row as fp32, and back with one rounding. bf16 and fp32.
void widen_row(const std::byte* row, DType dtype, int64_t n, float* out);
void narrow_row(const float* values, DType dtype, int64_t n, std::byte* row);

}  // namespace turnout::tools
