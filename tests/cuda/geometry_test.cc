// However many multiprocessors a call takes, it brings the same.
#include <numeric>

#include "cuda/one_call.h"
#include "support/errors.h"

namespace turnout::testing {
namespace {

class Geometry : public GpuTest {};

int num_sms_of(int device) {
  int sms = 0;
  cuda_ok(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return sms;
}

// mori#625: more blocks for the network than blocks hung, and a number of them that 8 does not divide lost and doubled tokens.
TEST_P(Geometry, AnyNumberOfMultiprocessorsBringsTheSame) {
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
          SCOPED_TRACE("rank " + std::to_string(comm.rank()) + ", num_sms " + std::to_string(args.num_sms) + " and " + std::to_string(call.back.num_sms) +
                       ", " + std::string(name(layout)) + " " + std::string(name(mode)));
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

INSTANTIATE_TEST_SUITE_P(Cuda, Geometry, ::testing::Values(Placement{1, 1}, Placement{2, 1}, Placement{3, 1}, Placement{2, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
