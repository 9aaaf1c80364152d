// Calls of every kind that are small enough for compute-sanitizer.
#include "cuda/small_calls.h"

namespace turnout::testing {
namespace {

using SmallCalls = GpuTest;

TEST_P(SmallCalls, OfEveryKind) {
  for (size_t i = 0; i < SmallCall::kNum; ++i) {
    const SmallCall call(i, num_ranks());
    RunChoices run = call.run;
    run.place = [](int rank) { return GetParam().place_of(rank); };
    run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
      SCOPED_TRACE(call.what() + " rank " + std::to_string(comm.rank()));
      play_rank(comm, call.e, run);
    });
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, SmallCalls, ::testing::Values(Placement{1, 1}, Placement{2, 1}, Placement{2, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
