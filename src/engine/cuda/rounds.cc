// Exact calls whose rows exceed what a rank's receive region has free: they come in rounds. The headers of all ranks say how much each
// can give, so with the counts every host knows how many rows each rank takes at a time, and how many rounds the call has. The first
// round brings the ids of all rows and as many rows as the block holds; in each further round, a call of the lane in terms of epochs,
// signals and staging, the same blocks are offered again. Every rank takes part in all rounds, whether it has rows to send or not.
#include <algorithm>
#include <string>

#include "engine/cuda/engine.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/pending.h"
#include "transport/device/driver.h"
#include "util/log.h"

namespace turnout::engine::cuda {

using transport::device::check;

/// What the header says of the region: no calls but those under this engine's mutex take anything of it, so a block of this size will
/// be there.
uint32_t Engine::room() const {
  return static_cast<uint32_t>(std::min<size_t>(shared_->region.room() / static_cast<size_t>(kRoomUnit), 0xffffffffu));
}

int64_t rows_that_fit(const DispatchArgs& a, int64_t total, int64_t room) {
  if (block_offsets(a, total).num_bytes <= room) return total;
  int64_t low = 0, high = total - 1;  // `low` rows fit, if any do
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (block_offsets(a, middle, total).num_bytes <= room) low = middle;
    else high = middle - 1;
  }
  return low;
}

/// The same on all ranks. Where one has no room for a single row it refuses the call, which then has one round.
int64_t Engine::num_rounds(const DispatchArgs& a, const RoutingMemory& r, const volatile int64_t* rooms) const {
  int64_t most = 1;
  for (size_t d = 0; d < r.rows_of_rank.size(); ++d) {
    const int64_t total = r.rows_of_rank[d], fit = rows_that_fit(a, total, rooms[d]);
    if (total > 0 && fit == 0) return 1;
    if (total > 0) most = std::max(most, core::ceil_div(total, fit));
  }
  return most;
}

/// A cached call asks for the rooms, and waits for them, only where all ranks see that one of them may need rounds.
bool Engine::may_need_rounds(const DispatchArgs& a, const RoutingMemory& r) const {
  int64_t most = 0;
  for (int64_t rows : r.rows_of_rank) most = std::max(most, rows);
  return r.in_rounds || 2 * block_offsets(a, most).num_bytes > static_cast<int64_t>(shared_->arena.receive_bytes);
}

/// Rounds use up staging that calls in flight still need: those are received first.
void Engine::prepare_rounds(LaneState& lane, cudaStream_t stream) {
  if (lane.rounds <= 1) return;
  receive_earlier(static_cast<int>(&lane - lanes_.data()), stream, lane.rounds);
  if (!told_of_rounds_) {
    util::log(util::LogLevel::warn,
              "a dispatch of exact size comes in " + std::to_string(lane.rounds) +
                  " rounds, for lack of room in a receive region: release results, or make the Buffer with a larger receive_bytes "
                  "(later ones are not logged)",
              rank_);
  }
  told_of_rounds_ = true;
}

/// All rounds but the first, which has been issued. They are received as they come: a block is emptied before it is offered again.
void Engine::issue_rounds(PendingCall& call, int move_blocks) {
  LaneState& lane = lanes_[static_cast<size_t>(call.lane)];
  DispatchArgs a = call.dispatch;
  a.move_blocks = move_blocks;
  for (; lane.rounds_issued < lane.rounds; ++lane.rounds_issued) {
    a.round = static_cast<int>(lane.rounds_issued);
    a.common.last_of_send = false;
    check(launch_hello(hello_of(a), call.stream), "hello kernel");
    a.common.last_of_send = true;
    check(launch_move(a, true, true, a.move_blocks, call.stream), "move kernel");
    ++lane.num_sends;
  }
  call.epoch = lane.num_sends;
}

}  // namespace turnout::engine::cuda
