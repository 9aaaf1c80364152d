// The contract of an engine: what a Buffer delivers equals the oracle bit for bit, for any problem, over any transport.
#pragma once
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/reference.h"
#include "support/place.h"
#include "support/random_routing.h"
#include "turnout/turnout.hpp"

namespace turnout::testing {

/// How a problem is run; what it delivers must not depend on it.
struct RunChoices {
  std::string transport = "inproc";
  uint64_t scheduler_seed = 0;
  Mode mode = Mode::throughput;
  ResultKind result = ResultKind::automatic;
  bool results_differ = false;  ///< odd ranks take fresh results
  bool async = false;
  Receive receive = Receive::deferred;
  int num_threads = 1;
  size_t receive_bytes = 0;  ///< 0: the default; small: results overflow it
  size_t staging_bytes = 0;
  int repeats = 1;          ///< dispatch and combine so often, the last time with a cached handle
  bool y_in_lease = false;  ///< rows of the combine lie in the receive region where they fit, and are spoilt right after it
  bool i32_ids = false, bf16_weights = false;
  bool scale_columns = false;                               ///< of what is quantised
  std::function<std::unique_ptr<Place>(int rank)> place{};  ///< none: the host
  std::chrono::milliseconds timeout{0};                     ///< 0: that of config_of()
};

inline BufferConfig config_of(const RandomProblem& p, const RunChoices& run) {
  BufferConfig c;
  const core::DispatchProblem& d = p.dispatch;
  c.num_experts = d.experts.num_experts();
  c.expert_to_rank = p.expert_to_rank;
  c.dtype = DType::u8;
  c.hidden = std::max(d.hidden * static_cast<int64_t>(size_of(d.dtype)), p.hidden * static_cast<int64_t>(size_of(p.dtype)));
  c.max_topk = d.num_topk;
  for (const auto& in : d.ranks) c.max_tokens_per_rank = std::max(c.max_tokens_per_rank, in.num_tokens);
  for (size_t bytes : d.side_bytes) c.max_side_bytes += bytes;
  c.num_threads = run.num_threads;
  c.receive_bytes = run.receive_bytes;
  c.staging_bytes = run.staging_bytes;
  c.timeouts.timeout = c.timeouts.busy_timeout = std::chrono::seconds(30);
  return c;
}

/// Row `i` of a result array that may be a slab.
inline const std::byte* result_row(const TensorView& t, int64_t i) {
  if (t.ndim == 2) return t.row(i);
  return t.row(i / t.shape[1]) + i % t.shape[1] * t.strides[1] * static_cast<int64_t>(size_of(t.dtype));
}

inline void expect_rows(const char* what, const TensorView& got, const core::Bytes& want, const core::DispatchOutput& out, int64_t num_rows,
                        Layout layout) {
  if (out.array_rows == 0) return;
  const size_t width = want.size() / static_cast<size_t>(out.array_rows);
  for (int64_t i = 0; i < out.array_rows; ++i) {
    // Rows beyond the real ones are unspecified, but padding inside expert_major groups is zero.
    if (out.origin[static_cast<size_t>(i)].source < 0 && !(layout == Layout::expert_major && i < num_rows)) continue;
    ASSERT_EQ(std::memcmp(result_row(got, i), want.data() + static_cast<size_t>(i) * width, width), 0) << what << " row " << i;
  }
}

/// Scales in either order: by columns they are words of four bytes.
inline void expect_scales(const TensorView& got, const core::Bytes& want, const core::DispatchOutput& out, int64_t num_rows, Layout layout) {
  ASSERT_EQ(got.ndim, layout == Layout::expert_slab ? 3 : 2);  // also on a rank that has no experts
  if (got.ndim == 3) {
    ASSERT_EQ(got.shape[0] * got.shape[1], out.array_rows);
  }
  if (out.array_rows == 0) return;
  const size_t width = want.size() / static_cast<size_t>(out.array_rows), size = size_of(got.dtype);
  const auto last = static_cast<size_t>(got.ndim - 1);
  const int64_t group_rows = got.shape[last - 1];
  std::vector<std::byte> row(static_cast<size_t>(got.shape[last]) * size);
  ASSERT_GE(row.size(), width);
  for (int64_t i = 0; i < out.array_rows; ++i) {
    if (out.origin[static_cast<size_t>(i)].source < 0 && !(layout == Layout::expert_major && i < num_rows)) continue;
    const int64_t first = (got.ndim == 3 ? i / group_rows * got.strides[0] : 0) + i % group_rows * got.strides[last - 1];
    for (int64_t e = 0; e < got.shape[last]; ++e)
      std::memcpy(row.data() + static_cast<size_t>(e) * size,
                  static_cast<const std::byte*>(got.data) + static_cast<size_t>(first + e * got.strides[last]) * size, size);
    ASSERT_EQ(std::memcmp(row.data(), want.data() + static_cast<size_t>(i) * width, width), 0) << "x_scales row " << i;
    for (size_t b = width; b < row.size(); ++b) ASSERT_EQ(row[b], std::byte{0}) << "x_scales row " << i;
  }
}

template <class T>
void expect_values(const char* what, const TensorView& got, const std::vector<T>& want) {
  ASSERT_EQ(got.num_elements(), static_cast<int64_t>(want.size())) << what;
  if (want.empty()) return;
  ASSERT_EQ(std::memcmp(got.data, want.data(), want.size() * sizeof(T)), 0) << what;
}

/// What a dispatch brought, where the test can read it. `there` keeps the memory.
struct Brought {
  TensorView num_rows, num_dropped, expert_counts, expert_offsets, topk_idx, sorted_rows, topk_weights, x, x_scales;
  std::vector<TensorView> side;
};
inline Brought bring(const DispatchResult& there, const core::DispatchOutput& want, Place& place) {
  Brought b;
  b.num_rows = place.get(there.num_rows);
  b.num_dropped = place.get(there.num_dropped);
  b.expert_counts = place.get(there.expert_counts);
  b.expert_offsets = place.get(there.expert_offsets);
  b.topk_idx = place.get(there.topk_idx);
  b.sorted_rows = place.get(there.sorted_rows);
  // Where only the device knows how many pairs there are, the view is as long as there may be.
  const auto pairs = static_cast<int64_t>(want.sorted_rows.size());
  if (place.device().kind != DeviceKind::cpu && b.sorted_rows.defined() && b.sorted_rows.shape[0] > pairs) b.sorted_rows.shape[0] = pairs;
  b.topk_weights = place.get(there.topk_weights);
  b.x = place.get(there.x);
  b.x_scales = place.get(there.x_scales);
  for (const TensorView& side : there.side) b.side.push_back(place.get(side));
  return b;
}

inline void expect_dispatch(const DispatchResult& there, const core::DispatchOutput& want, const core::DispatchProblem& d, Place& place) {
  const Brought got = bring(there, want, place);
  ASSERT_EQ(*got.num_rows.as<int64_t>(), want.num_rows);
  ASSERT_EQ(*got.num_dropped.as<int64_t>(), want.num_dropped);
  expect_values("expert_counts", got.expert_counts, want.expert_counts);
  expect_values("expert_offsets", got.expert_offsets, want.expert_offsets);
  if (d.layout == Layout::rank_major) {
    expect_values("topk_idx", got.topk_idx, want.topk_idx);
    expect_values("sorted_rows", got.sorted_rows, want.sorted_rows);
  }
  if (d.has_weights) expect_values("topk_weights", got.topk_weights, want.topk_weights);
  expect_rows("x", got.x, want.x, want, want.num_rows, d.layout);
  if (d.quantize != Quantize::none) expect_scales(got.x_scales, want.x_scales, want, want.num_rows, d.layout);
  ASSERT_EQ(got.side.size(), want.side.size());
  for (size_t s = 0; s < want.side.size(); ++s) expect_rows("side", got.side[s], want.side[s], want, want.num_rows, d.layout);
}

inline void expect_combine(const CombineResult& there, const core::CombineOutput& want, DType dtype, int64_t hidden, bool with_side, Place& place) {
  const size_t width = static_cast<size_t>(hidden) * size_of(dtype);
  struct {
    TensorView x, num_lost, side;
  } const got{place.get(there.x), place.get(there.num_lost), place.get(there.side)};
  ASSERT_EQ(got.x.shape[0], static_cast<int64_t>(want.num_lost.size()));
  for (int64_t t = 0; t < got.x.shape[0]; ++t) {
    ASSERT_EQ(std::memcmp(got.x.row(t), want.x.data() + static_cast<size_t>(t) * width, width), 0) << "token " << t;
  }
  expect_values("num_lost", got.num_lost, want.num_lost);
  if (with_side) expect_values("side", got.side, want.side);
}

inline void expect_dispatch(const DispatchResult& got, const core::DispatchOutput& want, const core::DispatchProblem& d) {
  Place host;
  expect_dispatch(got, want, d, host);
}
inline void expect_combine(const CombineResult& got, const core::CombineOutput& want, DType dtype, int64_t hidden, bool with_side) {
  Place host;
  expect_combine(got, want, dtype, hidden, with_side, host);
}

/// One rank's part of a problem, as arguments. Keeps what the views need.
struct RankArguments {
  RankArguments(const RandomProblem& p, int rank, const RunChoices& run) {
    const core::DispatchProblem& d = p.dispatch;
    const core::DispatchInput& in = d.ranks[static_cast<size_t>(rank)];
    const int64_t tokens = in.num_tokens;
    dispatch.x = TensorView::dense(in.x.data(), d.dtype, {tokens, d.hidden});
    ids32.assign(in.topk_idx.begin(), in.topk_idx.end());
    dispatch.topk_idx = run.i32_ids ? TensorView::dense(ids32.data(), DType::i32, {tokens, d.num_topk})
                                    : TensorView::dense(in.topk_idx.data(), DType::i64, {tokens, d.num_topk});
    if (d.has_weights) dispatch.topk_weights = TensorView::dense(in.topk_weights.data(), DType::fp32, {tokens, d.num_topk});
    for (size_t s = 0; s < in.side.size(); ++s) {
      const auto cols = static_cast<int64_t>(d.side_bytes[s] / size_of(p.side_dtypes[s]));
      dispatch.side.push_back(TensorView::dense(in.side[s].data(), p.side_dtypes[s], {tokens, cols}));
    }
    dispatch.mode = run.mode;
    dispatch.layout = d.layout;
    dispatch.capacity = d.capacity;
    dispatch.expert_alignment = d.alignment;
    dispatch.quantize = d.quantize;
    if (d.quantize != Quantize::none && run.scale_columns) dispatch.scale_order = ScaleOrder::columns;
    dispatch.result = run.results_differ && rank % 2 == 1 ? ResultKind::fresh : run.result;
    dispatch.receive = run.receive;
  }
  void move_to(Place& place) {
    dispatch.x = place.put(dispatch.x);
    dispatch.topk_idx = place.put(dispatch.topk_idx);
    dispatch.topk_weights = place.put(dispatch.topk_weights);
    for (TensorView& side : dispatch.side) side = place.put(side);
    dispatch.stream = place.stream();
  }
  DispatchArgs dispatch;
  std::vector<int32_t> ids32;
};

inline CombineArgs combine_args(const RandomProblem& p, const core::CombineProblem& c, const std::vector<core::DispatchOutput>& received, int rank,
                                const Handle& handle) {
  const auto at = static_cast<size_t>(rank);
  const core::CombineInput& in = c.ranks[at];
  const int64_t rows = received[at].array_rows;
  CombineArgs args;
  args.y = TensorView::dense(in.y.data(), p.dtype, {rows, p.hidden});
  args.handle = &handle;
  args.apply = p.apply;
  args.wire = p.wire;
  if (p.apply == CombineWeights::rows) args.weights = TensorView::dense(in.weights.data(), DType::fp32, {rows});
  if (p.apply == CombineWeights::tokens)
    args.weights = TensorView::dense(in.weights.data(), DType::fp32, {p.dispatch.ranks[at].num_tokens, p.dispatch.num_topk});
  if (p.with_side) {
    args.side = p.dispatch.layout == Layout::rank_major ? TensorView::dense(in.side.data(), DType::fp32, {rows, p.dispatch.num_topk})
                                                        : TensorView::dense(in.side.data(), DType::fp32, {rows});
  }
  return args;
}

/// A problem with what the oracle says of it, dispatch and combine. It stays where it is: its parts point to each other.
struct Expected {
  Expected(uint64_t seed, RandomProblem problem)
      : p(std::move(problem)),
        received(core::reference_dispatch(p.dispatch)),
        combine(random_combine(p, received, seed)),
        combined(core::reference_combine(combine)) {}
  Expected(const Expected&) = delete;
  Expected& operator=(const Expected&) = delete;
  const RandomProblem p;
  const std::vector<core::DispatchOutput> received;
  const core::CombineProblem combine;
  const std::vector<core::CombineOutput> combined;
};

/// Puts the rows of a combine into the lease that a dispatch brought, if they fit there. Returns the stride of a row, 0 if they do not.
inline size_t put_into_lease(const DispatchResult& result, CombineArgs& back, Layout layout, Place& place) {
  const auto width = static_cast<size_t>(back.y.shape[1]) * size_of(back.y.dtype);
  const auto stride = static_cast<size_t>(result.x.strides[0]) * size_of(result.x.dtype);
  if (!result.is_lease || layout != Layout::rank_major || width > stride || stride % 8 != 0) return 0;
  for (int64_t i = 0; i < back.y.shape[0]; ++i)
    place.write(static_cast<std::byte*>(result.x.data) + static_cast<size_t>(i) * stride, back.y.row(i), width);
  back.y = TensorView::matrix(result.x.data, back.y.dtype, back.y.shape[0], back.y.shape[1], static_cast<int64_t>(stride / size_of(back.y.dtype)),
                              place.device());
  return stride;
}

/// One rank's part of a problem, on a Buffer of its own. Compares every byte that is specified.
inline void play_rank(Communicator& comm, const Expected& e, const RunChoices& run) {
  const RandomProblem& p = e.p;
  const int rank = comm.rank();
  const auto at = static_cast<size_t>(rank);
  const std::unique_ptr<Place> place = run.place ? run.place(rank) : std::make_unique<Place>();
  BufferConfig config = config_of(p, run);
  config.device = place->device();
  if (run.timeout.count() > 0) config.timeouts.timeout = config.timeouts.busy_timeout = run.timeout;
  Buffer buffer(comm, config);
  EXPECT_EQ(buffer.num_bytes(), required_bytes(buffer.config(), comm.num_ranks()));
  RankArguments arguments(p, rank, run);
  arguments.move_to(*place);
  Handle handle;
  for (int round = 0; round < run.repeats; ++round) {
    DispatchArgs args = arguments.dispatch;
    const Handle cached = handle;
    if (round > 0 && round == run.repeats - 1) {
      args.handle = &cached;
      args.topk_idx = args.topk_weights = TensorView();
    }
    DispatchResult result = run.async ? buffer.dispatch_async(args).wait() : buffer.dispatch(args);
    place->finish();
    buffer.check();
    expect_dispatch(result, e.received[at], p.dispatch, *place);
    handle = result.handle;
    CombineArgs back = combine_args(p, e.combine, e.received, rank, handle);
    back.mode = run.mode;
    back.stream = place->stream();
    back.weights = place->put(back.weights);
    back.side = place->put(back.side);
    const size_t in_lease = run.y_in_lease ? put_into_lease(result, back, p.dispatch.layout, *place) : 0;
    if (!in_lease) back.y = place->put(back.y);
    const CombineResult sum = run.async ? buffer.combine_async(back).wait() : buffer.combine(back);
    place->finish();
    buffer.check();
    if (in_lease) place->fill(result.x.data, 0xA5, static_cast<size_t>(back.y.shape[0]) * in_lease);
    expect_combine(sum, e.combined[at], p.dtype, p.hidden, p.with_side, *place);
  }
}

inline CommunicatorOptions options_of(const RandomProblem& p, const RunChoices& run) {
  CommunicatorOptions options;
  options.transport = run.transport;
  options.scheduler_seed = run.scheduler_seed;
  options.node_of_rank = p.node_of_rank;
  return options;
}

/// The problem of a seed.
inline std::unique_ptr<const Expected> expected_of(uint64_t seed, const RandomLimits& limits) {
  return std::make_unique<const Expected>(seed + 1, random_problem(seed, limits));
}

/// Runs a problem on virtual ranks.
inline void expect_matches_reference(uint64_t seed, const Expected& e, const RunChoices& run) {
  const int num_ranks = static_cast<int>(e.p.dispatch.ranks.size());
  run_virtual_ranks(
      num_ranks,
      [&](Communicator& comm) {
        const std::string who = "seed " + std::to_string(seed) + " rank " + std::to_string(comm.rank()) + " of " + std::to_string(num_ranks);
        SCOPED_TRACE(who);
        try {
          play_rank(comm, e, run);
        } catch (const std::exception& error) {  // told now: the others may wait for this rank until the test is over its deadline
          std::fprintf(stderr, "%s: %s\n", who.c_str(), error.what());
          throw;
        }
      },
      options_of(e.p, run));
}
inline void expect_matches_reference(uint64_t seed, const RandomLimits& limits, const RunChoices& run) {
  expect_matches_reference(seed, *expected_of(seed, limits), run);
}

}  // namespace turnout::testing
