// One call and its way back, for tests that care about what happens around them.
#pragma once
#include "cuda/replay.h"

namespace turnout::testing {

/// A dispatch and a combine of one problem, as arguments in the memory of a place.
struct Call {
  Call(const Expected& expected, int rank, Place& at, RunChoices run_ = {}) : e(expected), r(rank), place(at), arguments(e.p, rank, run_) {
    arguments.move_to(place);
    back = combine_args(e.p, e.combine, e.received, rank, handle);
    back.y = place.put(back.y);
    back.weights = place.put(back.weights);
    back.side = place.put(back.side);
    back.stream = place.stream();
    back.mode = run_.mode;
    place.finish();
  }
  void expect(const DispatchResult& result) const { expect_dispatch(result, e.received[static_cast<size_t>(r)], e.p.dispatch, place); }
  void expect(const CombineResult& sum) const {
    expect_combine(sum, e.combined[static_cast<size_t>(r)], e.p.dtype, e.p.hidden, e.p.with_side, place);
  }
  const Expected& e;
  const int r;
  Place& place;
  RankArguments arguments;
  Handle handle;
  CombineArgs back;
};

}  // namespace turnout::testing
