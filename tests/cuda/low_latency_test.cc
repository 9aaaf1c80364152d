// Calls in low_latency mode that the one-kernel forms take: any routing and layout with a capacity, mixed with calls in throughput
// mode, rows that only one rank has without alignment, and calls that fail.
#include <chrono>

#include "cuda/cuda_place.h"
#include "engine/contract.h"
#include "transport/cuda.h"

namespace turnout::testing {
namespace {

struct Case {
  int num_ranks, num_devices;
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return std::to_string(info.param.num_ranks) + "_ranks_on_" + std::to_string(info.param.num_devices);
}

/// A problem with its answers.
struct Known {
  RandomProblem p;
  std::vector<core::DispatchOutput> received;
  core::CombineProblem c;
  std::vector<core::CombineOutput> combined;

  Known(uint64_t seed, const RandomLimits& limits)
      : p(random_problem(seed, limits)),
        received(core::reference_dispatch(p.dispatch)),
        c(random_combine(p, received, seed + 1)),
        combined(core::reference_combine(c)) {}
};

/// One rank of a problem on its GPU.
struct OnRank {
  OnRank(const Known& known_, Communicator& comm, int num_devices)
      : known(known_), rank(comm.rank()), place(rank % num_devices), arguments(known.p, rank, {}) {
    arguments.move_to(place);
    arguments.dispatch.mode = Mode::low_latency;
  }
  BufferConfig config() const {
    BufferConfig c = config_of(known.p, {});
    c.device = place.device();
    c.receive_bytes = size_t{64} << 20;
    c.timeouts.timeout = c.timeouts.busy_timeout = std::chrono::seconds(5);
    return c;
  }
  void expect(const DispatchResult& result) {
    place.finish();
    expect_dispatch(result, known.received[static_cast<size_t>(rank)], known.p.dispatch, place);
  }
  void expect(const CombineResult& sum) {
    place.finish();
    expect_combine(sum, known.combined[static_cast<size_t>(rank)], known.p.dtype, known.p.hidden, known.p.with_side, place);
  }
  CombineArgs back(const Handle& handle, Mode mode) {
    CombineArgs args = combine_args(known.p, known.c, known.received, rank, handle);
    args.mode = mode;
    args.stream = place.stream();
    args.y = place.put(args.y);
    args.weights = place.put(args.weights);
    args.side = place.put(args.side);
    return args;
  }
  /// A dispatch and a combine of what it brought, both compared.
  void expect_round(Buffer& buffer, Mode there = Mode::low_latency, Mode home = Mode::low_latency) {
    arguments.dispatch.mode = there;
    const DispatchResult result = buffer.dispatch(arguments.dispatch);
    expect(result);
    expect(buffer.combine(back(result.handle, home)));
    buffer.check();
  }

  const Known& known;
  const int rank;
  CudaPlace place;
  RankArguments arguments;
};

class LowLatency : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < GetParam().num_devices) {
      GTEST_SKIP() << "needs " << GetParam().num_devices << " GPUs, there are " << devices;
    }
  }
  /// What the kernels of low_latency take.
  RandomLimits limits() const {
    RandomLimits l;
    l.num_ranks = GetParam().num_ranks;
    l.dtypes = {DType::bf16, DType::fp16, DType::fp32, DType::u8};
    l.wires = {Wire::payload};
    l.exact = l.several_nodes = false;
    return l;
  }
  /// Runs `body` on each rank for problems of these seeds.
  void run(uint64_t first, uint64_t last, const RandomLimits& l, const std::function<void(OnRank&, Communicator&)>& body) {
    for (uint64_t seed = first; seed < last && !HasFailure(); ++seed) {
      const Known known(seed, l);
      run_virtual_ranks(l.num_ranks, [&](Communicator& comm) {
        SCOPED_TRACE("seed " + std::to_string(seed) + " rank " + std::to_string(comm.rank()));
        OnRank on(known, comm, GetParam().num_devices);
        body(on, comm);
      });
    }
  }
};

TEST_P(LowLatency, EqualsTheOracle) {
  run(1, 25, limits(), [](OnRank& on, Communicator& comm) {
    Buffer buffer(comm, on.config());
    on.expect_round(buffer);
    on.expect_round(buffer);
  });
}

TEST_P(LowLatency, EqualsTheOracleWithWideRowsAndManyExperts) {
  RandomLimits l = limits();
  l.max_hidden = 7168;
  l.max_experts = 300;
  l.max_topk = 40;
  l.max_tokens = 70;
  run(100, 104, l, [](OnRank& on, Communicator& comm) {
    Buffer buffer(comm, on.config());
    on.expect_round(buffer);
  });
}

// bf16 to fp8, top-8, a slab: the short form of dispatch, and those that just miss it (no weights, scales of one byte, loose ids).
TEST_P(LowLatency, EqualsTheOracleInTheUsualFormAndBesideIt) {
  RandomLimits l = limits();
  l.dtypes = {DType::bf16};
  l.layouts = {Layout::expert_slab};
  l.aligned = l.fused = true;
  l.side = false;
  l.min_topk = l.max_topk = 8;
  l.max_hidden = 2048;
  l.max_experts = 40;
  l.max_tokens = 60;
  int usual = 0;
  for (uint64_t seed = 800; seed < 812; ++seed) {
    const RandomProblem p = random_problem(seed, l);
    usual += p.dispatch.quantize == Quantize::fp8_e4m3 && p.dispatch.has_weights;
  }
  EXPECT_GE(usual, 2);
  run(800, 812, l, [](OnRank& on, Communicator& comm) {
    Buffer buffer(comm, on.config());
    on.expect_round(buffer);
    const auto tokens = on.known.p.dispatch.ranks[static_cast<size_t>(on.rank)].num_tokens;
    if (on.rank == 0 && tokens > 0) on.arguments.dispatch.num_sms = static_cast<int>(tokens);  // as many tokens as blocks: one too many
    on.expect_round(buffer);
  });
}

TEST_P(LowLatency, MixesWithThroughputOnOneBuffer) {
  run(200, 206, limits(), [](OnRank& on, Communicator& comm) {
    Buffer buffer(comm, on.config());
    for (const Mode there : {Mode::low_latency, Mode::throughput}) {
      for (const Mode home : {Mode::throughput, Mode::low_latency}) on.expect_round(buffer, there, home);
    }
  });
}

TEST_P(LowLatency, KnownRoutingsAndSeveralCallsInFlight) {
  run(300, 305, limits(), [](OnRank& on, Communicator& comm) {
    Buffer buffer(comm, on.config());
    const DispatchResult first = buffer.dispatch(on.arguments.dispatch);
    on.expect(first);
    DispatchArgs again = on.arguments.dispatch;
    again.handle = &first.handle;
    again.topk_idx = again.topk_weights = TensorView();
    for (const Mode mode : {Mode::low_latency, Mode::throughput, Mode::low_latency}) {
      again.mode = mode;
      PendingDispatch one = buffer.dispatch_async(again);
      again.mode = Mode::low_latency;
      PendingDispatch two = buffer.dispatch_async(again);
      const DispatchResult late = two.wait();
      const DispatchResult early = one.wait();
      on.expect(late);
      on.expect(early);
      PendingCombine home = buffer.combine_async(on.back(early.handle, Mode::low_latency));
      on.expect(buffer.combine(on.back(late.handle, Mode::low_latency)));
      on.expect(home.wait());
    }
    buffer.check();
  });
}

// The last rank comes when all the others have sent two calls and their multiprocessors are the user's again: two dispatches, then two combines.
// (Sums of fp64 are throughput's, which send when all have come.)
TEST_P(LowLatency, ADeferredSendWaitsForNobody) {
  RandomLimits l = limits();
  l.sums = {DType::bf16, DType::fp16, DType::fp32};
  run(330, 336, l, [](OnRank& on, Communicator& comm) {
    BufferConfig config = on.config();
    config.max_outstanding = 3;  // half of its four copies
    Buffer buffer(comm, config);
    const DispatchResult first = buffer.dispatch(on.arguments.dispatch);
    on.expect(first);
    DispatchArgs args = on.arguments.dispatch, again = args;
    args.receive = again.receive = Receive::deferred;
    again.handle = &first.handle;
    again.topk_idx = again.topk_weights = TensorView();
    const bool is_late = on.rank == comm.num_ranks() - 1;
    for (int turn = 0; turn < 3; ++turn) {
      if (is_late) comm.barrier();
      PendingDispatch one = buffer.dispatch_async(args), two = buffer.dispatch_async(again);
      on.place.finish();
      buffer.check();
      if (!is_late) comm.barrier();
      const DispatchResult late = two.wait();
      const DispatchResult early = one.wait();
      on.expect(late);
      on.expect(early);
      if (is_late) comm.barrier();
      PendingCombine home = buffer.combine_async(on.back(early.handle, Mode::low_latency));
      PendingCombine other = buffer.combine_async(on.back(late.handle, Mode::low_latency));
      on.place.finish();
      buffer.check();
      if (!is_late) comm.barrier();
      on.expect(other.wait());
      on.expect(home.wait());
    }
    buffer.check();
  });
}

// Ranks wait when and in what order they like; what others send must not lie where one of them has not read yet.
TEST_P(LowLatency, DeferredCallsOfBothModesReceivedInAnyOrder) {
  run(360, 363, limits(), [](OnRank& on, Communicator& comm) {
    for (const int most : {2, 3, 4, 5}) {
      BufferConfig config = on.config();
      config.max_outstanding = most;
      Buffer buffer(comm, config);
      const DispatchResult first = buffer.dispatch(on.arguments.dispatch);
      on.expect(first);
      Random calls(static_cast<uint64_t>(most)), waits(static_cast<uint64_t>(100 * most + on.rank));
      std::vector<std::function<void()>> open;
      const auto receive_one = [&] {
        const auto at = open.begin() + static_cast<int>(waits.below(static_cast<int>(open.size())));
        (*at)();
        open.erase(at);
      };
      for (int call = 0; call < 20 && !HasFailure(); ++call) {
        while (!open.empty() && (static_cast<int>(open.size()) == most || waits.chance(0.3))) receive_one();
        const Mode mode = calls.chance(0.7) ? Mode::low_latency : Mode::throughput;
        if (calls.chance(0.4)) {
          const auto sum = std::make_shared<PendingCombine>(buffer.combine_async(on.back(first.handle, mode)));
          open.emplace_back([&on, sum] { on.expect(sum->wait()); });
        } else {
          DispatchArgs args = on.arguments.dispatch;
          args.mode = mode;
          const auto rows = std::make_shared<PendingDispatch>(buffer.dispatch_async(args));
          open.emplace_back([&on, rows] { on.expect(rows->wait()); });
        }
      }
      while (!open.empty()) receive_one();
      buffer.check();
    }
  });
}

// Whoever receives looks where the experts of a row are: those of a call that has been sent stay where they were.
TEST_P(LowLatency, ADeferredCallKeepsTheMapThatItWasSentWith) {
  run(350, 354, limits(), [](OnRank& on, Communicator& comm) {
    Buffer buffer(comm, on.config());
    DispatchArgs args = on.arguments.dispatch;
    args.receive = Receive::deferred;
    std::vector<int> moved;
    for (const int owner : on.known.p.expert_to_rank) moved.push_back((owner + 1) % comm.num_ranks());
    PendingDispatch sent = buffer.dispatch_async(args);
    buffer.set_expert_to_rank(moved);
    on.expect(sent.wait());
    buffer.set_expert_to_rank(on.known.p.expert_to_rank);
    on.expect_round(buffer);
  });
}

TEST_P(LowLatency, ADeferredCallThatIsRefusedFailsAtItsWait) {
  if (GetParam().num_ranks == 1) GTEST_SKIP() << "nobody to disagree with";
  run(340, 342, limits(), [](OnRank& on, Communicator& comm) {
    Buffer buffer(comm, on.config());
    DispatchArgs args = on.arguments.dispatch;
    if (on.rank == 0) args.capacity = *args.capacity + 1;
    const auto call = [&] {
      buffer.dispatch_async(args).wait();
      on.place.finish();
      buffer.check();
    };
    EXPECT_THROW(call(), InvalidArgument);
    comm.barrier();
    on.expect_round(buffer);
  });
}

TEST_P(LowLatency, RowsWithoutAlignmentOnOneRank) {
  RandomLimits l = limits();
  l.dtypes = {DType::bf16};
  run(400, 404, l, [](OnRank& on, Communicator& comm) {
    Buffer buffer(comm, on.config());
    const core::DispatchProblem& d = on.known.p.dispatch;
    const core::DispatchInput& in = d.ranks[static_cast<size_t>(on.rank)];
    const auto row = static_cast<size_t>(d.hidden) * 2;
    std::vector<std::byte> loose((row + 2) * static_cast<size_t>(in.num_tokens) + 2);
    for (size_t t = 0; t < static_cast<size_t>(in.num_tokens); ++t) std::memcpy(loose.data() + t * (row + 2), in.x.data() + t * row, row);
    if (on.rank == 0) on.arguments.dispatch.x = on.place.put(TensorView::matrix(loose.data(), DType::bf16, in.num_tokens, d.hidden, d.hidden + 1));
    on.expect_round(buffer);
  });
}

TEST_P(LowLatency, CountsArrivalsOfAResidentReceive) {
  RandomLimits l = limits();
  l.layouts = {Layout::rank_major};
  run(500, 503, l, [](OnRank& on, Communicator& comm) {
    Buffer buffer(comm, on.config());
    DispatchArgs args = on.arguments.dispatch;
    args.receive = Receive::resident;
    const DispatchResult result = buffer.dispatch_async(args).wait();
    on.expect(result);
    const TensorView arrived = on.place.get(result.arrived);
    int64_t rows = 0;
    for (int s = 0; s < comm.num_ranks(); ++s) rows += arrived.as<int64_t>()[s];
    EXPECT_EQ(rows, on.known.received[static_cast<size_t>(on.rank)].num_rows);
  });
}

TEST_P(LowLatency, ARefusedCallFailsEverywhereAndTheNextIsRight) {
  run(600, 602, limits(), [](OnRank& on, Communicator& comm) {
    Buffer buffer(comm, on.config());
    on.expect_round(buffer);
    const auto expect_refusal = [&](const std::function<void(DispatchArgs&)>& change, const char* what) {
      SCOPED_TRACE(what);
      DispatchArgs args = on.arguments.dispatch;
      if (on.rank == 0) change(args);
      const auto call = [&] {
        buffer.dispatch(args);
        on.place.finish();
        buffer.check();
      };
      EXPECT_THROW(call(), InvalidArgument);
      comm.barrier();
      on.expect_round(buffer);
    };
    expect_refusal([](DispatchArgs& args) { args.num_sms = 1 << 20; }, "refused by one rank");
    if (comm.num_ranks() == 1) return;
    expect_refusal([](DispatchArgs& args) { args.capacity = *args.capacity + 1; }, "different capacities");
    expect_refusal([](DispatchArgs& args) { args.mode = Mode::throughput; }, "different modes");
  });
}

TEST_P(LowLatency, APeerThatDoesNotComeEndsTheWaitAndRecoverStartsAgain) {
  if (GetParam().num_ranks == 1) GTEST_SKIP() << "no peer";
  run(700, 701, limits(), [](OnRank& on, Communicator& comm) {
    BufferConfig config = on.config();
    config.timeouts.timeout = config.timeouts.busy_timeout = std::chrono::milliseconds(300);
    Buffer buffer(comm, config);
    on.expect_round(buffer);
    comm.barrier();
    if (on.rank > 0) {
      const auto call = [&] {
        buffer.dispatch(on.arguments.dispatch);
        on.place.finish();
        buffer.check();
      };
      EXPECT_THROW(call(), PeerTimeout);
    }
    comm.barrier();
    buffer.recover();
    on.expect_round(buffer);
    buffer.suspend();
    comm.barrier();
    buffer.resume();
    on.expect_round(buffer);
  });
}

TEST_P(LowLatency, TooManyTokensForItAreRefusedInWords) {
  RandomLimits l = limits();
  run(800, 801, l, [](OnRank& on, Communicator& comm) {
    BufferConfig config = on.config();
    config.max_tokens_per_rank = 4000;
    config.hidden = std::max<int64_t>(config.hidden, 8192);  // rows for which 512 tokens are the most
    config.receive_bytes = size_t{256} << 20;
    Buffer buffer(comm, config);
    on.expect_round(buffer);
    std::vector<std::byte> rows(600 * 16);
    std::vector<int32_t> ids(600, 0);
    DispatchArgs many;
    many.x = on.place.put(TensorView::dense(rows.data(), DType::u8, {600, 16}));
    many.topk_idx = on.place.put(TensorView::dense(ids.data(), DType::i32, {600, 1}));
    many.mode = Mode::low_latency;
    many.capacity = 600 * comm.num_ranks();
    many.stream = on.place.stream();
    try {
      buffer.dispatch(many);
      ADD_FAILURE() << "no error";
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find("at most 512"), std::string::npos) << e.what();
    }
    comm.barrier();
    on.expect_round(buffer);
  });
}

INSTANTIATE_TEST_SUITE_P(Cuda, LowLatency, ::testing::Values(Case{1, 1}, Case{2, 1}, Case{3, 1}, Case{8, 1}, Case{2, 2}, Case{5, 2}), case_name);

}  // namespace
}  // namespace turnout::testing
