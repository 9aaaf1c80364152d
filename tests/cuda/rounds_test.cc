// Exact dispatches whose rows exceed the receive region: they come in rounds, and what is delivered does not differ.
#include "core/math.h"
#include "cuda/gpu_test.h"
#include "engine/contract.h"
#include "support/errors.h"

namespace turnout::testing {
namespace {

using support::message_of;

/// A problem and a region that is too small for it.
struct Crowded {
  Crowded(uint64_t seed, RandomProblem problem, int64_t rounds) : e(seed + 1, std::move(problem)) {
    const core::DispatchProblem& d = e.p.dispatch;
    const auto ranks = d.ranks.size();
    std::vector<int64_t> here(ranks);
    int64_t most_sent = 0;
    for (const core::DispatchInput& in : d.ranks) {
      int64_t sent = 0;
      for (int64_t t = 0; t < in.num_tokens; ++t) {
        std::vector<bool> goes(ranks);
        for (int k = 0; k < d.num_topk; ++k) {
          const int64_t id = in.topk_idx[static_cast<size_t>(t * d.num_topk + k)];
          if (id >= 0) goes[static_cast<size_t>(d.experts.rank_of(static_cast<int>(id)))] = true;
        }
        for (size_t r = 0; r < ranks; ++r) here[r] += goes[r], sent += goes[r];
      }
      most_sent = std::max(most_sent, sent);
    }
    busiest = static_cast<int>(std::max_element(here.begin(), here.end()) - here.begin());
    const int64_t rows = here[static_cast<size_t>(busiest)];
    const bool quantised = d.quantize != Quantize::none;
    int64_t row =
        core::align_up(quantised ? d.hidden : d.hidden * static_cast<int64_t>(size_of(d.dtype)), 128) + (quantised ? d.hidden / 128 * 4 + 4 : 0);
    for (size_t bytes : d.side_bytes) row += static_cast<int64_t>(bytes);
    const int64_t ids = rows * d.num_topk * 12, combine = most_sent * 128 + 4096, some = 8192;
    const int64_t bytes = std::max(ids + (rows / rounds + 1) * row + some, combine + ids + row + some);
    receive_bytes = static_cast<size_t>(bytes);
    id_bytes = rows * d.num_topk * 8;
    exceeds = rows * row > core::align_up(bytes, 4096);
  }
  const Expected e;
  size_t receive_bytes = 0;
  int64_t id_bytes = 0;  ///< at least, where most rows come
  bool exceeds = false;  ///< for sure
  int busiest = 0;       ///< the rank that gets most rows
};

Crowded crowded(uint64_t seed, int num_ranks, bool quantize = true) {
  RandomLimits l;
  l.num_ranks = num_ranks;
  l.max_tokens = 60;
  l.max_hidden = 2500;
  l.capacity = l.several_nodes = false;
  l.quantize = quantize;
  l.layouts = {Layout::rank_major, Layout::expert_major};
  l.kinds = {RoutingKind::uniform, RoutingKind::zipf, RoutingKind::one_expert, RoutingKind::duplicates};
  l.dtypes = {DType::bf16, DType::bf16, DType::fp32, DType::u8};
  l.aligned = seed % 3 == 0;
  RandomProblem p = random_problem(seed, l);
  // Partial sums lie in the region too, all at once.
  p.hidden = 4;
  p.dtype = DType::bf16;
  p.wire = Wire::payload;
  if (p.apply == CombineWeights::tokens) p.apply = CombineWeights::none;  // those need every row
  return Crowded(seed, std::move(p), 2 + static_cast<int64_t>(seed % 8));
}

/// One rank's calls, each on the results of those before it.
class Player {
 public:
  Player(Communicator& comm, const Expected& e, const RunChoices& run, Place& place)
      : e_(e), at_(static_cast<size_t>(comm.rank())), run_(run), place_(place), buffer_(comm, config(place)), arguments_(e.p, comm.rank(), run) {
    arguments_.move_to(place);
  }
  Buffer& buffer() { return buffer_; }
  DispatchArgs args(bool cached) const {
    DispatchArgs args = arguments_.dispatch;
    if (!cached) return args;
    args.handle = &handle_;
    args.topk_idx = args.topk_weights = TensorView();
    return args;
  }
  /// The result dies, so that what it leased is free again.
  void expect(const DispatchResult& result) {
    place_.finish();
    buffer_.check();
    expect_dispatch(result, e_.received[at_], e_.p.dispatch, place_);
  }
  void dispatch(bool cached) {
    const DispatchArgs given = args(cached);
    const DispatchResult result = run_.async ? buffer_.dispatch_async(given).wait() : buffer_.dispatch(given);
    expect(result);
    handle_ = result.handle;
  }
  CombineArgs back() {
    CombineArgs args = combine_args(e_.p, e_.combine, e_.received, static_cast<int>(at_), handle_);
    args.stream = place_.stream();
    args.y = place_.put(args.y);
    args.weights = place_.put(args.weights);
    args.side = place_.put(args.side);
    return args;
  }
  void expect(const CombineResult& sum) {
    place_.finish();
    buffer_.check();
    expect_combine(sum, e_.combined[at_], e_.p.dtype, e_.p.hidden, e_.p.with_side, place_);
  }

 private:
  BufferConfig config(const Place& place) const {
    BufferConfig c = config_of(e_.p, run_);
    c.device = place.device();
    c.timeouts.timeout = c.timeouts.busy_timeout = run_.timeout;
    return c;
  }
  const Expected& e_;
  const size_t at_;
  const RunChoices& run_;
  Place& place_;
  Buffer buffer_;
  RankArguments arguments_;
  Handle handle_;
};

class Rounds : public GpuTest {
 protected:
  RunChoices run(const Crowded& c) const {
    RunChoices r;
    r.receive_bytes = c.receive_bytes;
    r.timeout = std::chrono::seconds(10);
    r.place = [](int rank) { return GetParam().place_of(rank); };
    return r;
  }
  void play(const Crowded& c, const RunChoices& run, const std::function<void(Player&, Place&, int)>& calls) {
    run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
      SCOPED_TRACE("rank " + std::to_string(comm.rank()));
      const std::unique_ptr<Place> place = run.place(comm.rank());
      Player player(comm, c.e, run, *place);
      calls(player, *place, comm.rank());
    });
  }
};

TEST_P(Rounds, BringWhatOneCallWould) {
  int num_exceeding = 0;
  for (uint64_t seed = 1; seed < 25; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Crowded c = crowded(seed, num_ranks());
    num_exceeding += c.exceeds;
    RunChoices r = run(c);
    r.async = seed % 3 == 1;
    r.receive = seed % 2 ? Receive::deferred : Receive::resident;
    r.results_differ = seed % 4 == 3;
    play(c, r, [](Player& player, Place&, int) {
      for (bool cached : {false, true, false}) {
        player.dispatch(cached);
        player.expect(player.buffer().combine(player.back()));
      }
    });
    if (HasFailure()) return;
  }
  EXPECT_GE(num_exceeding, 8);
}

/// Rounds use the staging that calls in flight still need.
TEST_P(Rounds, MayComeWhileCallsAreInFlight) {
  for (uint64_t seed = 100; seed < 108; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Crowded c = crowded(seed, num_ranks());
    RunChoices r = run(c);
    r.receive = seed % 2 ? Receive::deferred : Receive::resident;
    play(c, r, [](Player& player, Place&, int) {
      player.dispatch(false);
      for (bool cached : {false, true}) {
        Pending<CombineResult> sum = player.buffer().combine_async(player.back());
        Pending<DispatchResult> rows = player.buffer().dispatch_async(player.args(cached));
        player.expect(sum.wait());
        player.expect(rows.wait());
      }
    });
    if (HasFailure()) return;
  }
}

/// All ranks know the rounds of a call that one of them refuses late, and stay together.
TEST_P(Rounds, OfARefusedCallAreCountedByAll) {
  const Crowded c = crowded(4, num_ranks(), false);
  ASSERT_TRUE(c.exceeds);
  play(c, run(c), [&](Player& player, Place& place, int rank) {
    player.dispatch(false);
    for (int i = 0; i < 6; ++i) {
      DispatchArgs args = player.args(i % 2 == 1);
      const core::Bytes no_rows(static_cast<size_t>(args.x.shape[1]) * size_of(args.x.dtype));
      if (rank == c.busiest) args.out = place.put(TensorView::dense(no_rows.data(), args.x.dtype, {1, args.x.shape[1]}));
      if (rank == c.busiest) args.out.shape[0] = 0, args.result = ResultKind::automatic;
      const std::string message = message_of<InvalidArgument>([&] {
        player.buffer().dispatch(args);
        place.finish();
        player.buffer().check();
      });
      const std::string want = rank == c.busiest ? "out has room for 0 rows" : "refused by rank " + std::to_string(c.busiest);
      EXPECT_NE(message.find(want), std::string::npos) << message << " call " << i << " rank " << rank << " busiest " << c.busiest;
    }
    player.dispatch(false);
    player.dispatch(true);
  });
}

TEST_P(Rounds, WithoutRoomForOneRowAreRefusedInWords) {
  uint64_t seed = 2;
  while (crowded(seed, num_ranks()).id_bytes <= 4096) ++seed;
  const Crowded c = crowded(seed, num_ranks());
  RunChoices r = run(c);
  r.receive_bytes = 4096;
  std::atomic<int> num_told{0};
  play(c, r, [&](Player& player, Place& place, int) {
    const std::string message = message_of<InvalidArgument>([&] {
      player.buffer().dispatch(player.args(false));
      place.finish();
      player.buffer().check();
    });
    if (message.find("rows, one at a time, need") != std::string::npos) ++num_told;
    else EXPECT_NE(message.find("refused by rank"), std::string::npos) << message;
  });
  EXPECT_GE(num_told, 1);
}

std::vector<Placement> placements() {
  std::vector<Placement> all;
  for (int num_ranks : {1, 2, 3, 4, 5, 7, 8}) all.push_back({num_ranks, 1});
  for (int num_ranks : {2, 5}) all.push_back({num_ranks, 2});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cuda, Rounds, ::testing::ValuesIn(placements()), placement_name);

}  // namespace
}  // namespace turnout::testing
