// The public door: what a call was given is checked here, once, in words.
#pragma once
#include <string>

#include "engine/cpu/context.h"
#include "engine/cpu/header.h"
#include "engine/routing.h"
#include "turnout/buffer.h"

namespace turnout::api {

/// Throws InvalidArgument naming the argument, what came and what would do.
void check_dispatch(const engine::Context& context, const DispatchArgs& args);
void check_combine(const engine::Context& context, const CombineArgs& args);

/// Ids alone: -1 or an expert. REQUIRES: a matrix of i32 or i64 as check_dispatch() takes it, with data unless it is empty.
void check_ids(const TensorView& ids, int num_experts);

/// Whether elements of both views may be the same memory. REQUIRES: no negative strides.
bool overlap(const TensorView& a, const TensorView& b);

/// The fact that tells expert maps apart.
inline int64_t generation_of(const core::ExpertMap& experts) { return static_cast<int64_t>(experts.hash() >> 1); }

inline bool has_lane(const BufferConfig& config, int lane) { return lane >= 0 && lane < config.num_lanes; }
/// What is wrong with a lane that is not there.
std::string lane_problem(const BufferConfig& config, int lane);

/// The facts of a call that must be the same on all ranks. Take arguments as they come: they may be wrong.
engine::CallFacts facts_of(const engine::Context& context, const DispatchArgs& args);
engine::CallFacts facts_of(const engine::Context& context, const CombineArgs& args);

/// Bytes of the widest row that the configuration allows.
size_t row_bytes(const BufferConfig& config);

}  // namespace turnout::api
