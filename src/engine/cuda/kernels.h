// The kernels of the CUDA engine, as the host launches them. Each returns the error of its launch.
#pragma once
#include <cuda_runtime.h>

#include "engine/cuda/args.h"

namespace turnout::engine::cuda {

/// Sets shared memory limits and loads every kernel. Once per device, before anybody waits.
cudaError_t prepare_plan();
cudaError_t prepare_hello();
cudaError_t prepare_admit();
cudaError_t prepare_move();
cudaError_t prepare_combine();
cudaError_t prepare_combine_terms();
cudaError_t prepare_ll_dispatch();
cudaError_t prepare_ll_combine();
cudaError_t prepare_move_bulk();
cudaError_t prepare_quantize_ahead();
cudaError_t prepare_combine_bulk();
/// Takes the local memory that kernels need, in order of a stream.
cudaError_t prepare_local_memory(cudaStream_t stream);

/// Steps of a group in the plan kernel; 0: too many experts for this GPU's shared memory.
int plan_groups(int num_ranks, int num_experts);

cudaError_t launch_plan(const DispatchArgs& args, int num_ranks, int num_experts, int blocks, cudaStream_t stream);
/// Where can_quantize_ahead says so: before the plan, and the move kernel takes what it leaves.
cudaError_t launch_quantize_ahead(const DispatchArgs& args, int blocks, cudaStream_t stream);
cudaError_t launch_meta(const DispatchArgs& args, int num_ranks, int num_experts, int blocks, cudaStream_t stream);
cudaError_t launch_hello(const HelloArgs& args, cudaStream_t stream);
cudaError_t launch_admit(const DispatchArgs& args, int blocks, cudaStream_t stream);
/// `send` and `receive` may be parts of different kernels of one call.
cudaError_t launch_move(const DispatchArgs& args, bool send, bool receive, int blocks, cudaStream_t stream);
cudaError_t launch_combine(const CombineArgs& args, bool send, bool receive, int blocks, cudaStream_t stream);
/// The same of wire = rows: the launch above uses it.
cudaError_t launch_combine_terms(const CombineArgs& args, bool send, bool receive, int blocks, cudaStream_t stream);
/// The same where can_move_bulk and can_combine_bulk (throughput/bulk.h) say that they can: the launches above use them.
cudaError_t launch_move_bulk(const DispatchArgs& args, bool send, bool receive, int blocks, cudaStream_t stream);
cudaError_t launch_combine_bulk(const CombineArgs& args, int blocks, cudaStream_t stream);

/// low_latency: one kernel a call, for what these say they can do. All ranks say the same: only facts that they agree on count.
/// REQUIRES of a launch: num_tokens <= ll_tokens of the arena.
bool can_ll_dispatch(const DispatchArgs& args);
bool can_ll_combine(const CombineArgs& args);
/// Blocks that serve a call best on a GPU of `num_sms`; any number from 1 to kMaxChannels does.
int ll_dispatch_blocks(const DispatchArgs& args, int num_sms);
int ll_combine_blocks(const CombineArgs& args, int num_sms);
/// Whether that dispatch lays scales out by columns itself: a slab whose rows take the fast forms. REQUIRES: where results lie is known.
bool ll_lays_columns(const DispatchArgs& a);
cudaError_t launch_ll_dispatch(const DispatchArgs& args, int blocks, cudaStream_t stream);
cudaError_t launch_ll_combine(const CombineArgs& args, int blocks, cudaStream_t stream);

}  // namespace turnout::engine::cuda
