// The life of a Buffer on GPUs: made and destroyed without a leak, suspended and resumed at the same addresses, and rows beyond 2^31 elements.
#include <cstdlib>

#include "cuda/gpu_processes.h"
#include "cuda/replay.h"
#include "cuda/user_kernels.h"
#include "support/errors.h"
#include "util/env.h"

namespace turnout::testing {
namespace {

using support::expect_says;
using support::message_of;
using Clock = std::chrono::steady_clock;

constexpr double kMiB = 1024.0 * 1024.0;

size_t free_bytes(int device) {
  size_t free = 0, total = 0;
  cuda_ok(cudaSetDevice(device), "cudaSetDevice");
  cuda_ok(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

/// A round over a Buffer that the caller keeps; where its rows came to lie.
const void* play_once(Buffer& buffer, const Expected& e, CudaPlace& place) {
  const auto at = static_cast<size_t>(buffer.rank());
  RankArguments arguments(e.p, buffer.rank(), {});
  arguments.move_to(place);
  const DispatchResult result = buffer.dispatch(arguments.dispatch);
  CombineArgs back = combine_args(e.p, e.combine, e.received, buffer.rank(), result.handle);
  back.y = place.put(back.y);
  back.weights = place.put(back.weights);
  back.side = place.put(back.side);
  back.stream = place.stream();
  const CombineResult sum = buffer.combine(back);
  place.finish();
  buffer.check();
  expect_dispatch(result, e.received[at], e.p.dispatch, place);
  expect_combine(sum, e.combined[at], e.p.dtype, e.p.hidden, e.p.with_side, place);
  return result.x.data;
}

class Lifecycle : public GpuTest {};

TEST_P(Lifecycle, FiftyCyclesLeakNothing) {
  const Routings routings(1, num_ranks(), {}, 1);
  const auto start = Clock::now();
  const auto cycle = [&] {
    run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
      const auto place = GetParam().place_of(comm.rank());
      BufferConfig config = config_for({&routings}, {}, place->device());
      config.receive_bytes = size_t{64} << 20;
      Buffer buffer(comm, config);
      play_once(buffer, routings.variant(0), *place);
      comm.barrier();
    });
  };
  for (int i = 0; i < 5; ++i) cycle();  // what the driver keeps, it has by now
  std::vector<size_t> before;
  for (int d = 0; d < GetParam().num_gpus; ++d) before.push_back(free_bytes(d));
  const size_t descriptors = transport::testing::num_descriptors();
  for (int i = 0; i < 50; ++i) cycle();
  for (int d = 0; d < GetParam().num_gpus; ++d) {
    const size_t after = free_bytes(d);
    saw("GPU %d: %.1f MiB free before 50 cycles, %.1f after; %.1f s", d, static_cast<double>(before[static_cast<size_t>(d)]) / kMiB,
        static_cast<double>(after) / kMiB, std::chrono::duration<double>(Clock::now() - start).count());
    EXPECT_GE(after + (size_t{8} << 20), before[static_cast<size_t>(d)]);
  }
  EXPECT_EQ(transport::testing::num_descriptors(), descriptors);
}

TEST_P(Lifecycle, SuspendFreesMemoryAndResumeKeepsAddresses) {
  if (util::env().device_memory == "ipc") GTEST_SKIP() << "memory of cudaIpc is not suspended";
  const Routings routings(2, num_ranks(), {}, 1);
  run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
    const auto place = GetParam().place_of(comm.rank());
    const int device = place->device().index;
    BufferConfig config = config_for({&routings}, {}, place->device());
    config.receive_bytes = size_t{64} << 20;
    Buffer buffer(comm, config);
    // Arenas that are memory of the host have leases apart, on the GPU, where there are others to send to.
    const bool by_host = util::env().device_transport == "cuda_host";
    const size_t on_gpu = !by_host ? buffer.num_bytes() : comm.num_ranks() > 1 ? config.receive_bytes : 0;
    const Expected& e = routings.variant(0);
    const void* first = play_once(buffer, e, *place);
    EXPECT_THROW(buffer.resume(), InvalidArgument);
    comm.barrier();
    for (int time = 0; time < 2; ++time) {
      const size_t before = free_bytes(device);
      comm.barrier();
      buffer.suspend();
      comm.barrier();
      const size_t suspended = free_bytes(device);
      EXPECT_THROW(buffer.suspend(), InvalidArgument);
      EXPECT_GE(suspended, before + on_gpu);
      comm.barrier();
      buffer.resume();
      comm.barrier();
      const size_t resumed = free_bytes(device);
      EXPECT_GE(suspended, resumed + on_gpu);
      comm.barrier();
      // Where leases are apart, the block of the call before may not be free yet; the memory that blocks are taken from is where it was.
      const void* again = play_once(buffer, e, *place);
      const auto apart = static_cast<const std::byte*>(again) - static_cast<const std::byte*>(first);
      EXPECT_LT(static_cast<size_t>(std::abs(apart)), by_host ? config.receive_bytes : 1) << first << ", then " << again;
      if (comm.rank() == 0) {
        saw("a Buffer with %.1f MiB of a GPU on each of %d ranks: %.1f MiB free, %.1f suspended, %.1f resumed; rows at %p, then at %p",
            static_cast<double>(on_gpu) / kMiB, comm.num_ranks(), static_cast<double>(before) / kMiB, static_cast<double>(suspended) / kMiB,
            static_cast<double>(resumed) / kMiB, first, again);
      }
      comm.barrier();
    }
  });
}

/// A call in a Buffer that is suspended is an error, not a fault of the GPU.
TEST_P(Lifecycle, CallsOfASuspendedBufferAreRefused) {
  if (util::env().device_memory == "ipc") GTEST_SKIP() << "memory of cudaIpc is not suspended";
  const Routings routings(2, num_ranks(), {}, 1);
  run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
    const auto place = GetParam().place_of(comm.rank());
    Buffer buffer(comm, config_for({&routings}, {}, place->device()));
    const Expected& e = routings.variant(0);
    play_once(buffer, e, *place);
    comm.barrier();
    buffer.suspend();
    RankArguments arguments(e.p, comm.rank(), {});
    arguments.move_to(*place);
    expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(arguments.dispatch); }), {"suspended", "resume()"});
    comm.barrier();
    buffer.resume();
    play_once(buffer, e, *place);
    comm.barrier();
  });
}

/// 300 000 rows of 7168 bf16: more than 2^31 elements and 4.3 GB. Ranks send all of them to the last rank, which is another if there is one.
TEST_P(Lifecycle, MoreThanTwoToThe31Elements) {
  if (GetParam().num_ranks > 2) GTEST_SKIP() << "1 or 2 ranks fill enough memory";
  constexpr int64_t kRows = 300'000, kHidden = 7168, kWords = kHidden / 2;
  static_assert(kRows * kHidden > (int64_t{1} << 31));
  const auto bytes = static_cast<size_t>(kRows * kHidden * 2);
  for (Layout layout : {Layout::rank_major, Layout::expert_major}) {
    const auto start = Clock::now();
    run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
      const auto place = GetParam().place_of(comm.rank());
      const auto stream = static_cast<cudaStream_t>(place->stream().native);
      const bool sends = comm.rank() == 0, receives = comm.rank() == comm.num_ranks() - 1;
      load_user_kernels();
      BufferConfig config;
      config.num_experts = 2;
      config.hidden = kHidden;
      config.max_tokens_per_rank = kRows;
      config.max_topk = 1;
      config.receive_bytes = 3 * bytes + (size_t{128} << 20);  // rows where they land, the result, and records, which are a little longer
      config.timeouts.timeout = config.timeouts.busy_timeout = std::chrono::seconds(10);
      config.device = place->device();
      Buffer buffer(comm, config);
      const int64_t tokens = sends ? kRows : 0;
      const std::vector<int64_t> host_ids(static_cast<size_t>(tokens), 1);
      std::byte* x = nullptr;
      if (sends) {
        cuda_ok(cudaMallocAsync(reinterpret_cast<void**>(&x), bytes, stream), "cudaMallocAsync");
        fill_rows(stream, reinterpret_cast<uint32_t*>(x), kRows, kWords, kWords);
      }
      unsigned long long* wrong = nullptr;
      cuda_ok(cudaMallocAsync(reinterpret_cast<void**>(&wrong), 16, stream), "cudaMallocAsync");
      cuda_ok(cudaMemsetAsync(wrong, 0, 16, stream), "cudaMemset");
      DispatchArgs args;
      args.x = TensorView::dense(x, DType::bf16, {tokens, kHidden}, place->device());
      args.topk_idx = place->put(TensorView::dense(host_ids.data(), DType::i64, {tokens, 1}));
      args.topk_idx.device = place->device();
      args.layout = layout;
      args.capacity = kRows;
      args.stream = place->stream();
      comm.barrier();
      const DispatchResult result = buffer.dispatch(args);
      if (receives) {
        count_wrong_rows(stream, result.x.as<const uint32_t>(), kRows, kWords, result.x.strides[0] / 2, 0, 1, wrong);
      }
      CombineArgs back;
      back.y = result.x;
      back.handle = &result.handle;
      back.stream = place->stream();
      const CombineResult sum = buffer.combine(back);
      if (sends) count_wrong_rows(stream, sum.x.as<const uint32_t>(), kRows, kWords, sum.x.strides[0] / 2, 0, 1, wrong + 1);
      unsigned long long found[2] = {1, 1};
      int64_t num_rows = -1;
      cuda_ok(cudaMemcpyAsync(found, wrong, sizeof found, cudaMemcpyDeviceToHost, stream), "download");
      cuda_ok(cudaMemcpyAsync(&num_rows, result.num_rows.data, 8, cudaMemcpyDeviceToHost, stream), "download");
      place->finish();
      buffer.check();
      EXPECT_EQ(found[0], 0u) << "words of the rows that arrived";
      EXPECT_EQ(found[1], 0u) << "words of the rows that came back";
      EXPECT_EQ(num_rows, receives ? kRows : 0);
      if (x) cuda_ok(cudaFreeAsync(x, stream), "cudaFreeAsync");
      cuda_ok(cudaFreeAsync(wrong, stream), "cudaFreeAsync");
      place->finish();
      comm.barrier();
    });
    saw("%s, %s: %lld rows of %lld bf16 there and back in %.1f s", std::string(name(layout)).c_str(), name(GetParam()).c_str(),
        static_cast<long long>(kRows), static_cast<long long>(kHidden), std::chrono::duration<double>(Clock::now() - start).count());
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, Lifecycle, ::testing::Values(Placement{1, 1}, Placement{2, 1}, Placement{2, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
