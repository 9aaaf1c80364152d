// Calls are in order of the stream that they are given, and share the GPU with kernels of the user.
#include "cuda/gpu_processes.h"
#include "cuda/one_call.h"
#include "cuda/user_kernels.h"
#include "support/errors.h"

namespace turnout::testing {
namespace {

using support::expect_says;
using support::message_of;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

int num_sms_of(int device) {
  int n = 0;
  cuda_ok(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return n;
}

using Streams = GpuTest;

/// x and the ids are wrong until a producer on the stream of the call, 5 ms late, has written them; a consumer right behind takes the
/// rows; then the inputs are spoilt. No host waits in between.
TEST_P(Streams, ADelayedProducerAndAConsumerOnTheStreamOfTheCall) {
  for (bool exact : {false, true}) {
    for (Mode mode : {Mode::throughput, Mode::low_latency}) {
      ReplayShape shape;
      shape.mode = mode;
      const Routings routings(5 + (exact ? 1 : 0), num_ranks(), shape, 1);
      RandomProblem problem = routings.problem();
      if (exact) problem.dispatch.capacity.reset();
      const Expected e(3, problem);
      run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
        const auto place = GetParam().place_of(comm.rank());
        const auto stream = static_cast<cudaStream_t>(place->stream().native);
        load_user_kernels();
        Buffer buffer(comm, config_for({&routings}, {}, place->device()));
        RunChoices run;
        run.mode = mode;
        Call call(e, comm.rank(), *place, run);
        // What the producer writes, and what lies there before.
        const RankArguments host(e.p, comm.rank(), run);
        DispatchArgs& args = call.arguments.dispatch;
        const TensorView good_x = place->put(host.dispatch.x), good_ids = place->put(host.dispatch.topk_idx);
        const auto x_bytes = (span_bytes(args.x) + 3) / 4 * 4, id_bytes = span_bytes(args.topk_idx);
        const auto spoil = [&] {
          if (span_bytes(args.x) == 0) return;
          place->fill(args.x.data, 0x7f, span_bytes(args.x));
          place->fill(args.topk_idx.data, 0xff, id_bytes);
        };
        spoil();
        std::vector<std::byte> zeros(size_t{1} << 20);
        const TensorView taken = place->put(TensorView::dense(zeros.data(), DType::u8, {static_cast<int64_t>(zeros.size())}));
        place->finish();
        comm.barrier();
        const auto start = Clock::now();
        spin(stream, 5ms);
        copy_words(stream, args.x.data, good_x.data, span_bytes(args.x) / 4 * 4);
        if (const size_t rest = span_bytes(args.x) % 4) {
          const size_t at = x_bytes - 4;
          cuda_ok(cudaMemcpyAsync(static_cast<std::byte*>(args.x.data) + at, static_cast<std::byte*>(good_x.data) + at, rest,
                                  cudaMemcpyDeviceToDevice, stream),
                  "the producer's last bytes");
        }
        copy_words(stream, args.topk_idx.data, good_ids.data, id_bytes);
        const DispatchResult result = buffer.dispatch(args);
        const double issued = seconds_since(start);
        const size_t row_bytes = std::min(span_bytes(result.x) / 4 * 4, zeros.size());
        copy_words(stream, taken.data, result.x.data, row_bytes);
        spoil();
        call.handle = result.handle;
        const CombineResult sum = buffer.combine(call.back);
        place->finish();
        const double done = seconds_since(start);
        buffer.check();
        call.expect(result);
        call.expect(sum);
        // What the consumer took is what lies there, as far as rows are real.
        const TensorView rows = place->get(result.x), copy = place->get(taken);
        const int64_t stride = result.x.strides[0] * static_cast<int64_t>(size_of(result.x.dtype));
        const auto real =
            static_cast<size_t>(std::min<int64_t>(static_cast<int64_t>(row_bytes), e.received[static_cast<size_t>(comm.rank())].num_rows * stride));
        EXPECT_TRUE(real == 0 || std::memcmp(rows.data, copy.data, real) == 0) << "the consumer saw other rows";
        if (comm.rank() == 0) {
          saw("%s %s: issued after %.3f ms, done after %.3f ms (the producer takes 5)", exact ? "exact" : "capacity", std::string(name(mode)).c_str(),
              1e3 * issued, 1e3 * done);
        }
        EXPECT_GE(done, 0.005);
        if (!exact) {
          EXPECT_LT(issued, 0.005) << "the host waited for the producer";
        }
      });
      if (HasFailure()) return;
    }
  }
}

/// Later calls of the lane take its staging before the caller waits.
TEST_P(Streams, ACallIsWaitedForAfterManyLaterOnes) {
  ReplayShape shape;
  shape.mode = Mode::throughput;
  const Routings routings(50, num_ranks(), shape, 1);
  run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
    const auto place = GetParam().place_of(comm.rank());
    RunChoices run;
    run.mode = Mode::throughput;
    Buffer buffer(comm, config_for({&routings}, run, place->device()));
    Call first(routings.variant(0), comm.rank(), *place, run), later(routings.variant(0), comm.rank(), *place, run);
    for (Receive receive : {Receive::deferred, Receive::resident}) {
      DispatchArgs args = first.arguments.dispatch;
      args.receive = receive;
      PendingDispatch pending = buffer.dispatch_async(args);
      for (int i = 0; i < 5; ++i) {
        const DispatchResult result = buffer.dispatch(later.arguments.dispatch);
        place->finish();
        buffer.check();
        later.expect(result);
      }
      const DispatchResult result = pending.wait();
      place->finish();
      buffer.check();
      first.expect(result);
    }
  });
}

TEST_P(Streams, MoreSmsThanThereAreAreRefused) {
  const Routings routings(8, num_ranks(), {}, 1);
  run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
    const auto place = GetParam().place_of(comm.rank());
    const int sms = num_sms_of(place->device().index);
    Buffer buffer(comm, config_for({&routings}, {}, place->device()));
    Call call(routings.variant(0), comm.rank(), *place);
    for (int wrong : {sms + 1, 1 << 30, -1}) {
      DispatchArgs args = call.arguments.dispatch;
      args.num_sms = wrong;
      const std::string message = message_of<InvalidArgument>([&] { buffer.dispatch(args); });
      expect_says(message, {"num_sms is " + std::to_string(wrong), "has " + std::to_string(sms) + " multiprocessors"});
      if (comm.rank() == 0 && wrong == sms + 1) saw(message);
    }
    for (int right : {1, 2, sms}) {
      DispatchArgs args = call.arguments.dispatch;
      args.num_sms = right;
      const DispatchResult result = buffer.dispatch(args);
      call.handle = result.handle;
      call.back.num_sms = right;
      const CombineResult sum = buffer.combine(call.back);
      place->finish();
      buffer.check();
      call.expect(result);
      call.expect(sum);
    }
    call.back.num_sms = sms + 1;
    expect_says(message_of<InvalidArgument>([&] { buffer.combine(call.back); }), {"num_sms is " + std::to_string(sms + 1)});
  });
}

/// A kernel of the user takes every multiprocessor but `left`, on another stream, and stays there until the call is through.
void expect_works_beside(const Placement& placement, int left, int num_sms, Mode mode) {
  ReplayShape shape;
  shape.mode = mode;
  shape.max_tokens = 200;
  const Routings routings(40 + static_cast<uint64_t>(left), placement.num_ranks, shape, 1);
  run_virtual_ranks(placement.num_ranks, [&](Communicator& comm) {
    SCOPED_TRACE(std::to_string(left) + " multiprocessors left, num_sms " + std::to_string(num_sms) + " " + std::string(name(mode)));
    const auto place = placement.place_of(comm.rank());
    const int sms = num_sms_of(place->device().index);
    load_user_kernels();
    const MappedWords words(2);
    RunChoices run;
    run.mode = mode;
    run.timeout = 4s;
    Buffer buffer(comm, config_for({&routings}, run, place->device()));
    Call call(routings.variant(0), comm.rank(), *place, run);
    cudaStream_t other = nullptr;
    cuda_ok(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
    const bool takes_them = comm.rank() < placement.num_gpus;
    comm.barrier();
    if (takes_them) {
      occupy(other, sms - left, words.at(0), words.at(1), 12s);
      words.wait(0, static_cast<uint32_t>(sms - left), "blocks of the user's kernel");
    }
    comm.barrier();
    const auto start = Clock::now();
    DispatchArgs args = call.arguments.dispatch;
    args.num_sms = call.back.num_sms = num_sms;
    std::string failure;
    try {
      const DispatchResult result = buffer.dispatch(args);
      call.handle = result.handle;
      const CombineResult sum = buffer.combine(call.back);
      place->finish();
      const double took = seconds_since(start);
      buffer.check();
      call.expect(result);
      call.expect(sum);
      if (comm.rank() == 0) {
        saw("%d of %d multiprocessors left, num_sms %d, %s, %s: dispatch and combine in %.0f us", left, sms, num_sms, std::string(name(mode)).c_str(),
            name(placement).c_str(), 1e6 * took);
      }
    } catch (const Error& error) {
      failure = error.what();
    }
    EXPECT_EQ(failure, "") << "with " << left << " multiprocessors left and num_sms " << num_sms;
    words.write(1, 1);
    cuda_ok(cudaStreamSynchronize(other), "the user's kernel");
    cuda_ok(cudaStreamDestroy(other), "cudaStreamDestroy");
    comm.barrier();  // to free memory is to wait for the GPU, with the user's kernel on it, while the rank that ends that may be kept out
  });
}

TEST_P(Streams, AUserKernelThatLeavesFewSmsDoesNotStopUs) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    for (int left : {1, 2, 8}) {
      // Ranks that share a GPU wait for each other: each needs a multiprocessor.
      if (left < (num_ranks() + GetParam().num_gpus - 1) / GetParam().num_gpus) continue;
      expect_works_beside(GetParam(), left, std::max(1, left / GetParam().num_ranks), mode);
      if (HasFailure()) return;
    }
  }
}

/// The default takes many blocks, which then come one after the other.
TEST_P(Streams, AUserKernelThatLeavesFewSmsDoesNotStopTheDefault) {
  if (num_ranks() > GetParam().num_gpus) GTEST_SKIP() << "ranks that share a GPU must all fit on it at once";
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    for (int left : {8, 2, 1}) {
      expect_works_beside(GetParam(), left, 0, mode);
      if (HasFailure()) return;
    }
  }
}

/// Between the send and the wait of a deferred receive a kernel of the user has every multiprocessor.
TEST_P(Streams, ADeferredReceiveLeavesAllSmsInBetween) {
  if (GetParam().num_ranks > GetParam().num_gpus) GTEST_SKIP() << "ranks that share a GPU would share its multiprocessors with the kernel";
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    ReplayShape shape;
    shape.mode = mode;
    const Routings routings(60, num_ranks(), shape, 1);
    run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
      const auto place = GetParam().place_of(comm.rank());
      const auto stream = static_cast<cudaStream_t>(place->stream().native);
      const int sms = num_sms_of(place->device().index);
      load_user_kernels();
      const MappedWords met(4);
      RunChoices run;
      run.mode = mode;
      Buffer buffer(comm, config_for({&routings}, run, place->device()));
      Call call(routings.variant(0), comm.rank(), *place, run);
      const uint32_t zeros[4] = {};
      const TensorView counters = place->put(TensorView::dense(zeros, DType::i32, {4}));
      comm.barrier();
      // On the stream of the call, then beside it.
      cudaStream_t other = nullptr;
      cuda_ok(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
      for (size_t turn = 0; turn < 2; ++turn) {
        PendingDispatch pending = buffer.dispatch_async(call.arguments.dispatch);
        cudaStream_t users = turn == 0 ? stream : other;
        if (users == other) cuda_ok(cudaStreamSynchronize(stream), "the send");
        const auto start = Clock::now();
        meet(users, sms, counters.as<uint32_t>() + 2 * turn, met.at(2 * turn), 2s);
        cuda_ok(cudaStreamSynchronize(users), "the user's kernel");
        EXPECT_EQ(met.read(2 * turn), 1u) << "not all multiprocessors were free";
        const double dispatched = seconds_since(start);
        const DispatchResult result = pending.wait();
        call.handle = result.handle;
        PendingCombine back = buffer.combine_async(call.back);
        if (users == other) cuda_ok(cudaStreamSynchronize(stream), "the send");
        meet(users, sms, counters.as<uint32_t>() + 2 * turn + 1, met.at(2 * turn + 1), 2s);
        cuda_ok(cudaStreamSynchronize(users), "the user's kernel");
        EXPECT_EQ(met.read(2 * turn + 1), 1u) << "not all multiprocessors were free";
        const CombineResult sum = back.wait();
        place->finish();
        buffer.check();
        call.expect(result);
        call.expect(sum);
        if (comm.rank() == 0) {
          saw("%s: %d blocks of the user met %s after %.0f us", std::string(name(mode)).c_str(), sms,
              turn ? "on another stream" : "on the stream of the call", 1e6 * dispatched);
        }
      }
      cuda_ok(cudaStreamDestroy(other), "cudaStreamDestroy");
      comm.barrier();
    });
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, Streams, ::testing::Values(Placement{1, 1}, Placement{2, 1}, Placement{2, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
