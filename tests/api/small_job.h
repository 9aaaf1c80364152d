// A job small enough to know its results by heart: every row of a token is one small number, so that a combine of what
// dispatch delivered is that number times the ranks (rank_major) that the token went to.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "support/errors.h"
#include "support/here.h"
#include "turnout/turnout.hpp"

namespace turnout::testing {

using support::expect_says;
using support::message_of;

inline BufferConfig small_config() {
  BufferConfig c;
  c.num_experts = 6;
  c.hidden = 8;
  c.dtype = DType::fp32;
  c.max_tokens_per_rank = 4;
  c.max_topk = 2;
  c.max_side_bytes = 8;
  c.device = here().device();
  c.timeouts.timeout = c.timeouts.busy_timeout = std::chrono::seconds(30);
  return c;
}

/// Arguments of one rank and what they point to.
struct Tokens {
  explicit Tokens(int rank, int64_t num_tokens = 3, int num_topk = 2, int64_t hidden = 8, int num_experts = 6)
      : T(num_tokens), K(num_topk), H(hidden) {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t h = 0; h < H; ++h) x.push_back(value(rank, t));
      for (int k = 0; k < K; ++k) {
        ids.push_back((rank + t + 2 * k) % num_experts);
        weights.push_back(1.0f);
      }
      side.push_back(static_cast<float>(100 * rank) + static_cast<float>(t));
    }
    args.x = dense(x.data(), DType::fp32, {T, H});
    args.topk_idx = dense(ids.data(), DType::i64, {T, K});
    args.topk_weights = dense(weights.data(), DType::fp32, {T, K});
    args.stream = here().stream();
  }
  Tokens(const Tokens&) = delete;
  Tokens& operator=(const Tokens&) = delete;
  static float value(int rank, int64_t t) { return static_cast<float>(8 * rank + t + 1); }

  int64_t T;
  int K;
  int64_t H;
  Shared<float> x, weights, side;
  Shared<int64_t> ids;
  DispatchArgs args;
};

/// The plain combine of what a dispatch delivered.
inline CombineArgs back_of(const DispatchResult& rows) {
  CombineArgs back;
  back.y = rows.x;
  back.handle = &rows.handle;
  back.stream = here().stream();
  return back;
}

/// Runs `body` on virtual ranks, over each transport.
inline void run_on_transports(int num_ranks, const std::function<void(Communicator&)>& body) {
  for (const char* transport : {"inproc", "shm"}) {
    CommunicatorOptions options;
    options.transport = transport;
    run_virtual_ranks(num_ranks, body, options);
  }
}

/// Ranks that own the experts of token `t` in the default split.
inline int num_destinations(const Tokens& tokens, int64_t t, int num_experts, int num_ranks) {
  std::set<int> owners;
  for (int k = 0; k < tokens.K; ++k) {
    const auto id = static_cast<int>(tokens.ids[static_cast<size_t>(t * tokens.K + k)]);
    const int extra = num_experts % num_ranks, base = num_experts / num_ranks;
    if (id >= 0) owners.insert(id < extra * (base + 1) ? id / (base + 1) : extra + (id - extra * (base + 1)) / base);
  }
  return static_cast<int>(owners.size());
}

/// A whole round on the default split: the Buffer works. Collective.
inline void expect_works(Buffer& buffer, int lane = 0) {
  Tokens tokens(buffer.rank());
  tokens.args.lane = lane;
  const DispatchResult rows = buffer.dispatch(tokens.args);
  CombineArgs back = back_of(rows);
  back.lane = lane;
  const CombineResult sum = buffer.combine(back);
  const TensorView got = here().get(sum.x);
  for (int64_t t = 0; t < tokens.T; ++t) {
    const auto want = Tokens::value(buffer.rank(), t) * static_cast<float>(num_destinations(tokens, t, 6, buffer.num_ranks()));
    for (int64_t h = 0; h < tokens.H; ++h)
      ASSERT_EQ(reinterpret_cast<const float*>(got.row(t))[h], want) << "rank " << buffer.rank() << " token " << t;
  }
}

}  // namespace turnout::testing
