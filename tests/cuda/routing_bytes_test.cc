// Routings as bytes in memory of the caller's: what calls along them give, wherever the bytes were copied.
#include "turnout/routing_bytes.h"

#include "cuda/one_call.h"
#include "support/errors.h"

namespace turnout::testing {
namespace {

using RoutingBytes = GpuTest;

RoutingShape shape_of(const DispatchArgs& args) {
  return {args.x.shape[0],      static_cast<int>(args.topk_idx.shape[1]), args.topk_weights.defined(), args.layout, args.capacity.value_or(-1),
          args.expert_alignment};
}

/// Two dispatches, whose own handles go at once; then their combines, and second dispatches, along copies of their bytes.
TEST_P(RoutingBytes, CallsAlongACopyAreThoseAlongTheHandle) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_slab}) {
    for (const Mode mode : {Mode::throughput, Mode::low_latency}) {
      SCOPED_TRACE(std::string(name(layout)) + " " + std::string(name(mode)));
      ReplayShape shape;
      shape.layout = layout;
      shape.mode = mode;
      const Routings routings(11, num_ranks(), shape, 2);
      run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
        const auto place = GetParam().place_of(comm.rank());
        Buffer buffer(comm, config_for({&routings}, {}, place->device()));
        RunChoices run;
        run.mode = mode;
        Call a(routings.variant(0), comm.rank(), *place, run), b(routings.variant(1), comm.rank(), *place, run);
        const RoutingShape what = shape_of(a.arguments.dispatch);
        const std::vector<std::byte> none(routing_bytes(buffer, what));
        const TensorView bytes = TensorView::dense(none.data(), DType::u8, {static_cast<int64_t>(none.size())});
        const TensorView first = place->put(bytes), second = place->put(bytes), moved = place->put(bytes);
        const auto stream = static_cast<cudaStream_t>(place->stream().native);
        comm.barrier();
        const auto send = [&](Call& call, const TensorView& to) {
          const DispatchResult rows = buffer.dispatch(call.arguments.dispatch);
          store_routing(buffer, rows.handle, to.data, place->stream());
        };
        send(a, first);
        send(b, second);
        cuda_ok(cudaMemcpyAsync(moved.data, first.data, none.size(), cudaMemcpyDeviceToDevice, stream), "copying a routing");
        cuda_ok(cudaMemsetAsync(first.data, 0xff, none.size(), stream), "spoiling where it was");
        b.handle = load_routing(buffer, what, second.data);
        a.handle = load_routing(buffer, what, moved.data);
        const CombineResult back_b = buffer.combine(b.back), back_a = buffer.combine(a.back);
        DispatchArgs again = a.arguments.dispatch;
        again.topk_idx = again.topk_weights = {};
        again.capacity.reset();
        again.handle = &a.handle;
        const DispatchResult rows = buffer.dispatch(again);
        place->finish();
        buffer.check();
        a.expect(back_a);
        b.expect(back_b);
        a.expect(rows);
        comm.barrier();
      });
    }
  }
}

TEST_P(RoutingBytes, WhatIsNoShapeIsRefused) {
  ReplayShape shape;
  const Routings routings(12, num_ranks(), shape, 1);
  run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
    const auto place = GetParam().place_of(comm.rank());
    Buffer buffer(comm, config_for({&routings}, {}, place->device()));
    support::expect_says(support::message_of<InvalidArgument>([&] {
                           (void)routing_bytes(buffer, {4, 2, true, Layout::rank_major, -1, 1});
                         }),
                         {"capacity -1", "give those of its dispatch"});
    support::expect_says(support::message_of<InvalidArgument>([&] { store_routing(buffer, Handle(), nullptr, place->stream()); }),
                         {"store_routing: the handle is empty"});
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, RoutingBytes, ::testing::Values(Placement{1, 1}, Placement{3, 1}, Placement{2, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
