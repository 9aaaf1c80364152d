// In what order things happen on several streams, and between kernels of the user that overlap with ours.
#include <thread>

#include "cuda/one_call.h"
#include "cuda/user_kernels.h"

namespace turnout::testing {
namespace {

using namespace std::chrono_literals;

using Order = GpuTest;

cudaStream_t stream_of(const Place& place) { return static_cast<cudaStream_t>(place.stream().native); }

/// Lanes are independent: two of them on two streams, and one lane that changes its stream (the user orders them by an event).
TEST_P(Order, LanesOnTheirOwnStreamsAndALaneThatMoves) {
  const Routings routings(70, num_ranks(), {}, 2);
  run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
    const auto one = GetParam().place_of(comm.rank()), two = GetParam().place_of(comm.rank());
    BufferConfig config = config_for({&routings}, {}, one->device());
    config.num_lanes = 2;
    Buffer buffer(comm, config);
    Call a(routings.variant(0), comm.rank(), *one), b(routings.variant(1), comm.rank(), *two);
    b.arguments.dispatch.lane = b.back.lane = 1;
    comm.barrier();
    for (int i = 0; i < 10; ++i) {
      const DispatchResult x = buffer.dispatch(a.arguments.dispatch), y = buffer.dispatch(b.arguments.dispatch);
      a.handle = x.handle;
      b.handle = y.handle;
      const CombineResult back_y = buffer.combine(b.back), back_x = buffer.combine(a.back);
      one->finish();
      two->finish();
      buffer.check();
      a.expect(x);
      b.expect(y);
      a.expect(back_x);
      b.expect(back_y);
    }
    cudaEvent_t event = nullptr;
    cuda_ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    for (int i = 0; i < 6; ++i) {
      Place& from = i % 2 ? *two : *one;
      Place& to = i % 2 ? *one : *two;
      DispatchArgs args = a.arguments.dispatch;
      args.stream = from.stream();
      const DispatchResult x = buffer.dispatch(args);
      cuda_ok(cudaEventRecord(event, static_cast<cudaStream_t>(from.stream().native)), "cudaEventRecord");
      cuda_ok(cudaStreamWaitEvent(static_cast<cudaStream_t>(to.stream().native), event, 0), "cudaStreamWaitEvent");
      CombineArgs back = a.back;
      back.handle = &x.handle;
      back.stream = to.stream();
      const CombineResult sum = buffer.combine(back);
      to.finish();
      buffer.check();
      a.expect(x);
      a.expect(sum);
    }
    cuda_ok(cudaEventDestroy(event), "cudaEventDestroy");
    comm.barrier();
  });
}

/// Programmatic dependent launch: the kernel ahead of a call lets others start at once and writes the ids late; the kernel behind it starts
/// early and waits for what is ahead of it.
TEST_P(Order, KernelsOfTheUserMayOverlapWithACall) {
  for (bool exact : {false, true}) {
    for (Mode mode : {Mode::throughput, Mode::low_latency}) {
      for (bool aligned : {false, true}) {  // general kernels, and bulk copies
        SCOPED_TRACE(std::string(exact ? "exact " : "capacity ") + std::string(name(mode)) + (aligned ? " aligned" : ""));
        RandomLimits limits;
        limits.num_ranks = num_ranks();
        limits.max_tokens = 100;
        limits.several_nodes = limits.quantize = false;
        limits.aligned = aligned;
        limits.dtypes = {DType::bf16};
        limits.layouts = {Layout::rank_major};
        limits.zero_tokens = 0;
        RandomProblem p = random_problem(aligned ? 91 : 92, limits);
        if (exact) p.dispatch.capacity.reset();
        else p.dispatch.capacity = 100 * num_ranks();
        const Expected e(4, p);
        run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
          const auto place = GetParam().place_of(comm.rank());
          load_user_kernels();
          RunChoices run;
          run.mode = mode;
          run.timeout = 8s;
          BufferConfig config = config_of(e.p, run);
          config.device = place->device();
          config.receive_bytes = size_t{64} << 20;
          Buffer buffer(comm, config);
          Call call(e, comm.rank(), *place, run);
          DispatchArgs& args = call.arguments.dispatch;
          const TensorView good_ids = place->put(RankArguments(e.p, comm.rank(), run).dispatch.topk_idx);
          const size_t id_bytes = span_bytes(args.topk_idx);
          std::vector<std::byte> zeros(size_t{1} << 20);
          const TensorView taken = place->put(TensorView::dense(zeros.data(), DType::u8, {static_cast<int64_t>(zeros.size())}));
          for (int time = 0; time < 3; ++time) {
            place->fill(args.topk_idx.data, 0xff, id_bytes);
            place->fill(taken.data, 0, zeros.size());
            place->finish();
            comm.barrier();
            produce_words(stream_of(*place), args.topk_idx.data, good_ids.data, id_bytes, 3ms);
            const DispatchResult result = buffer.dispatch(args);
            const size_t row_bytes = std::min(span_bytes(result.x) / 4 * 4, zeros.size());
            consume_words(stream_of(*place), taken.data, result.x.data, row_bytes);
            place->finish();
            buffer.check();
            call.expect(result);
            const TensorView rows = place->get(result.x), copy = place->get(taken);
            const auto real = static_cast<size_t>(e.received[static_cast<size_t>(comm.rank())].num_rows * result.x.strides[0] * 2);
            EXPECT_EQ(std::memcmp(rows.data, copy.data, std::min(real, row_bytes)), 0) << "the consumer saw other rows";
          }
          comm.barrier();
        });
        if (HasFailure()) return;
      }
    }
  }
}

/// A result dies on a thread that has nothing to do with its GPU, while its stream still reads the rows. The next call, on another stream,
/// gets the same block of the region, and its rows come after that.
TEST_P(Order, AResultMayDieOnAThreadOfAnotherGpu) {
  ReplayShape shape;
  shape.mode = Mode::throughput;
  const Routings routings(80, num_ranks(), shape, 2);
  run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
    const auto one = GetParam().place_of(comm.rank()), two = GetParam().place_of(comm.rank());
    load_user_kernels();
    RunChoices run;
    run.mode = Mode::throughput;
    Buffer buffer(comm, config_for({&routings}, run, one->device()));
    Call a(routings.variant(0), comm.rank(), *one, run), b(routings.variant(1), comm.rank(), *two, run);
    std::vector<std::byte> zeros(size_t{1} << 20);
    const TensorView taken = one->put(TensorView::dense(zeros.data(), DType::u8, {static_cast<int64_t>(zeros.size())}));
    for (int time = 0; time < 4; ++time) {
      comm.barrier();
      auto first = std::make_unique<DispatchResult>(buffer.dispatch(a.arguments.dispatch));
      one->finish();
      const TensorView x = first->x, rows = one->get(x);
      const size_t row_bytes = std::min(span_bytes(x) / 4 * 4, zeros.size());
      spin(stream_of(*one), 20ms);
      copy_words(stream_of(*one), taken.data, x.data, row_bytes);
      std::thread([&first] { first.reset(); }).join();  // a new thread's current device is 0
      const DispatchResult second = buffer.dispatch(b.arguments.dispatch);
      if (time > 0) {  // by then the Buffer knows of both streams
        EXPECT_EQ(second.x.data, x.data) << "another block: nothing is tested";
      }
      one->finish();
      two->finish();
      buffer.check();
      b.expect(second);
      const TensorView copy = one->get(taken);
      EXPECT_TRUE(row_bytes == 0 || std::memcmp(rows.data, copy.data, row_bytes) == 0) << "rows were written before they had been read";
    }
    comm.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Cuda, Order, ::testing::Values(Placement{1, 1}, Placement{2, 1}, Placement{2, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
