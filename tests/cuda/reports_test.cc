// What others' users have reported of GPUs: what must hold here, each with its source. What is of no processor is in tests/issues.
#include "cuda/one_call.h"
#include "issues/job.h"

namespace turnout::testing {
namespace {

class Reports : public GpuTest {};

int num_sms_of(int device) {
  int sms = 0;
  cuda_ok(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return sms;
}

// mori#625: more blocks for the network than blocks hung, and a number of them that 8 does not divide lost and doubled tokens.
TEST_P(Reports, AnyNumberOfMultiprocessorsBringsTheSame) {
  uint64_t seed = 80;
  for (Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_slab}) {
    for (Mode mode : {Mode::throughput, Mode::low_latency}) {
      const ReplayShape shape{layout, mode, seed % 3 ? Quantize::none : Quantize::fp8_e4m3, 96};
      const Routings routings(seed++, num_ranks(), shape, 1);
      run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
        const auto place = GetParam().place_of(comm.rank());
        RunChoices run;
        run.mode = mode;
        Buffer buffer(comm, config_for({&routings}, run, place->device()));
        Call call(routings.variant(0), comm.rank(), *place, run);
        const int sms = num_sms_of(place->device().index);
        Random random(seed + static_cast<uint64_t>(comm.rank()));  // ranks need not take as many
        for (int i = 0; i < 14; ++i) {
          const int few[] = {1, 2, 3, 5, 7};
          const auto choose = [&] { return i < 5 ? few[i] : 1 + static_cast<int>(random.below(static_cast<uint64_t>(sms))); };
          DispatchArgs args = call.arguments.dispatch;
          args.num_sms = choose();
          call.back.num_sms = choose();
          SCOPED_TRACE("rank " + std::to_string(comm.rank()) + ", num_sms " + std::to_string(args.num_sms) + " and " +
                       std::to_string(call.back.num_sms) + ", " + std::string(name(layout)) + " " + std::string(name(mode)));
          const DispatchResult rows = buffer.dispatch(args);
          call.handle = rows.handle;
          const CombineResult sum = buffer.combine(call.back);
          place->finish();
          buffer.check();
          call.expect(rows);
          call.expect(sum);
          if (::testing::Test::HasFailure()) break;
        }
        comm.barrier();
      });
      if (HasFailure()) return;
    }
  }
}

// DeepEP#621: only rank 0 has choices, all others -1, of experts 0 and 1; in a thousand rounds some rows were wrong. mori#80, mori#342: a
// call right after another, without a barrier, overwrote what a peer still read. Nothing is waited for between a row of rounds.
TEST_P(Reports, HundredsOfRoundsOfOneRankWithTokensAreAllRight) {
  constexpr int kRow = 8;
  RandomProblem problem = problem_of(num_ranks(), 8, 2, 512, Layout::rank_major, [](int rank) {
    std::vector<int64_t> ids;
    for (int t = 0; t < 6; ++t) ids.insert(ids.end(), {rank == 0 ? 0 : -1, rank == 0 ? 1 : -1});
    return ids;
  });
  problem.dispatch.capacity = 6 * num_ranks();  // so nobody waits for counts
  const Expected e(1, problem);
  run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
    const auto place = GetParam().place_of(comm.rank());
    RunChoices run;
    run.mode = Mode::low_latency;
    BufferConfig config = config_of(e.p, run);
    config.device = place->device();
    config.receive_bytes = size_t{64} << 20;
    config.timeouts.timeout = config.timeouts.busy_timeout = std::chrono::seconds(8);
    Buffer buffer(comm, config);
    Call call(e, comm.rank(), *place, run);
    for (int round = 0; round < 100; ++round) {
      std::vector<CombineResult> sums;
      for (int i = 0; i < kRow; ++i) {
        const DispatchResult rows = buffer.dispatch(call.arguments.dispatch);
        call.handle = rows.handle;
        sums.push_back(buffer.combine(call.back));
      }
      place->finish();
      buffer.check();
      for (const CombineResult& sum : sums) call.expect(sum);
      if (::testing::Test::HasFailure()) break;
    }
    comm.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Cuda, Reports, ::testing::Values(Placement{1, 1}, Placement{2, 1}, Placement{4, 1}, Placement{2, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
