// What host and kernels of the CUDA engine agree on: plain structs, given to kernels by value. No CUDA types.
//
// A dispatch is  plan -> [exact: the host learns the counts] -> admit -> move;  a combine is one kernel. In low_latency mode
// each call is one kernel of its own. All kernels of a call run in order of one stream, so a kernel may rely on all that the
// kernels before it wrote here; only what peers write is waited for.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/scale.h"
#include "engine/cpu/header.h"
#include "engine/cuda/layout.h"
#include "turnout/buffer.h"

namespace turnout::engine::cuda {

/// Ranks that reach each other by load and store: base[r] is the arena of rank r in this rank's address space.
struct Team {
  int rank = 0, num_ranks = 1;
  std::byte* base[kMaxRanks] = {};
};

/// Where a wait stood when it gave up; in host-visible memory, written once (kState last).
struct DeviceRecord {
  /// 0: none; 1: a wait expired, the Buffer is aborted, 5: so it is, because the peer waited for is lost; `value` of both is what the host said
  /// of the peer. Else one call failed on all ranks: 2: ranks disagree about facts, 3: a rank refused, 4: an id is out of range (value) at
  /// token `expected`, entry k.
  uint64_t state = 0;
  int32_t finder = -1, peer = -1, lane = 0, call = 0, phase = 0, k = 0;
  int64_t epoch = 0, expected = 0, seen = 0, value = 0;
};

inline constexpr uint64_t kExpired = 1, kLostPeer = 5;
/// What the host says of a peer. Lost: its process has ended, it has closed its Buffer, or first the one and then the other. It may come
/// back: its heart has not beaten for so long that it is called silent, or even for all of `timeout`, which then is the end of waits for it.
inline constexpr uint32_t kGone = 1, kClosed = 2, kClosedAndGone = kClosed | kGone, kQuiet = 4, kSilent = 5;
constexpr TURNOUT_HOST_DEVICE bool is_lost(uint32_t said) { return said != 0 && said < kQuiet; }
/// Memory of a process that has ended may be gone with it.
constexpr TURNOUT_HOST_DEVICE bool has_ended(uint32_t said) { return is_lost(said) && (said & kGone) != 0; }

/// In the page of the arena's status word: why whoever gave up did so.
inline constexpr size_t kAbortRecordOffset = 128;

/// Phases of a call, for DeviceRecord::phase; text in engine.cc.
enum class Phase : int32_t { counts = 1, offer, meta, rows, partials, local_blocks, low_latency_rows, low_latency_partials };

/// Host memory that the device reads and writes (pinned and mapped), one per Buffer.
struct HostWords {
  uint64_t abort = 0;   ///< set by the host: stop waiting (a process died, another rank aborted)
  uint64_t status = 0;  ///< set by kernels once the Buffer is aborted: what user code and check() look at
  DeviceRecord record;
  uint32_t peers[kMaxRanks] = {};  ///< set by the host: who will not come any more, or is silent (kGone ... kSilent); only waits for them end
};

/// Per Buffer, in this GPU's memory. Words that kernels read when they start, so that no argument changes between replays.
struct Control {
  uint64_t generation = 0;  ///< recovers so far; the Buffer is aborted while the arena's status word is above it
  uint64_t timeout_ns = 0, busy_ns = 0;
  uint64_t status = 0;  ///< through the host: the arena's status word, as far as kernels of this rank have seen it
};

/// Per lane, in this GPU's memory.
struct LaneControl {
  /// Epoch of the last call issued. Block b of a call's last sending kernel advances words b, b + grid, ...: no atomic, and any
  /// grid next time.
  uint32_t epoch[kMaxChannels] = {};
  /// Tickets of a copy: a kernel of the call before zeroes them.
  static constexpr int kNumTickets = 16;
  static constexpr int kMostCopies = 65;            ///< max_outstanding is at most 64
  uint32_t tickets[kMostCopies][kNumTickets] = {};  ///< [copy]
  uint32_t failed = 0;                              ///< epoch of the last call that was refused or that ranks disagreed about: its kernels do nothing
  uint32_t failed_of[kMostCopies] = {};             ///< [copy] the same, for calls that receive after later ones have been issued
  uint32_t told = 0;                                ///< epoch of the last call that failed and has left a record of why
  uint32_t started[kMaxChannels] =
      {};  ///< epoch of the last call in which low_latency: block b has started, or others do its part; plan: chunk b is claimed
  uint64_t next_look[kMaxRanks] = {};  ///< when somebody looks again at what the host says of a rank
};

/// Owner and local number of every expert: device memory that set_expert_to_rank() rewrites in stream order.
struct ExpertTable {
  int64_t hash = 0;
  int32_t num_experts = 0, max_local = 0;
  const int32_t* owner = nullptr;      ///< [P]
  const int32_t* local = nullptr;      ///< [P]
  const int32_t* num_local = nullptr;  ///< [R]
  const int32_t* first = nullptr;      ///< [R + 1] into by_rank
  const int32_t* by_rank = nullptr;    ///< [P] ids by (rank, local number)
};

/// The routing of a dispatch: device pointers into one allocation that the Handle keeps. N = rows of the receive block
/// (rank_major rows; capacity, or what the counts say), Le = local experts, C = capacity.
struct Routing {
  // Source side.
  int32_t* topk_idx = nullptr;       ///< [T, K] as given
  float* topk_weights = nullptr;     ///< [T, K] or null
  int32_t* dest = nullptr;           ///< [T, K] rank of the expert, -1 where there is none
  int32_t* send_index = nullptr;     ///< [T, K] at the first k of each destination rank: position in its list; else -1
  int32_t* pair_index = nullptr;     ///< [T, K] pairs of this source with the same expert that come earlier
  int32_t* rows = nullptr;           ///< [R, R] token rows of source s for destination d
  int32_t* send_begin = nullptr;     ///< [R] slot of this rank's first row at each destination
  int32_t* sent = nullptr;           ///< [R] rows that each destination admits (its block has room for)
  int32_t* send_offset = nullptr;    ///< [R + 1] prefix sum of sent: where the records of a destination begin in this rank's combine block
  int32_t* source_tokens = nullptr;  ///< [R] tokens of each source
  int32_t* own_tokens = nullptr;     ///< [T] token of the i-th row that stays on this rank
  // Receive side.
  int32_t* recv_begin = nullptr;    ///< [R + 1] rows of each source that fit in the block
  int32_t* record_begin = nullptr;  ///< [R] where this rank's records begin in the combine block of each source
  int32_t* recv_idx = nullptr;      ///< [N, K] local expert or -1
  float* recv_weights = nullptr;    ///< [N, K], 0 where not local; null without weights
  int32_t* position = nullptr;      ///< expert layouts, [N, K]: row of the result, -1: none or dropped
  /// Of a low_latency dispatch to a slab, else null: [R, ll_tokens, K] the same as position for the i-th row of each source, so that
  /// a combine finds its rows without knowing where those of a source begin.
  int32_t* slots = nullptr;
  float* row_weights = nullptr;       ///< expert layouts: [rows of the result], 0 in padding; null without weights
  int32_t* expert_base = nullptr;     ///< [R, Le] pairs of earlier sources
  int32_t* expert_counts = nullptr;   ///< [Le] admitted pairs
  int64_t* expert_offsets = nullptr;  ///< [Le + 1]
  int32_t* sorted_rows = nullptr;     ///< rank_major: [N * K] (as many as there are pairs)
  int32_t* cut = nullptr;             ///< [2] row and k where admission to expert_major ended
  int64_t* num_rows = nullptr;        ///< [1]
  int64_t* num_dropped = nullptr;     ///< [1]
};

/// What every kernel is told.
struct Common {
  Team team;
  Arena arena{};
  Control* control = nullptr;
  LaneControl* lane_control = nullptr;
  HostWords* host = nullptr;
  const ExpertTable* experts = nullptr;
  /// The same arrays as in `experts`, whose addresses never change: one load less before the first row is sent.
  const int32_t* owner = nullptr;  ///< [P]
  const int32_t* local = nullptr;  ///< [P]
  int num_experts = 0;
  int max_local = 0;
  int lane = 0;
  /// Arenas are memory of the host: what peers write here is behind PCIe (host_link.h). The same on all ranks.
  bool through_host = false;
  /// Rows of low_latency dispatches travel in whole lines instead of flagged words, as partial sums do (Arena::ll_combine_lines). The same on
  /// all ranks, for all calls of the Buffer.
  bool lines = false;
  /// Through the host, else null: [depth][R][4] what other ranks offer, as one block of this rank has read it: flagged words.
  uint32_t* offers = nullptr;
  /// The call is the one issued `back` calls ago on its lane (0: the one being issued: its epoch is the word in LaneControl + 1).
  int back = 0;
  /// Of a call that receives beside later calls: where the kernel that ends the sending part leaves the epoch for it; else null.
  uint32_t* own_epoch = nullptr;
  bool last_of_send = false;  ///< this kernel ends the sending part: it advances the epoch
  CallFacts facts{};          ///< epoch and generation are filled in on the device
};

struct SideArray {
  const std::byte* src = nullptr;  ///< [T], rows src_stride bytes apart
  int64_t src_stride = 0;
  std::byte* out = nullptr;  ///< rows of the result, `bytes` apart
  int32_t bytes = 0;
};
inline constexpr int kMaxSide = 16;

/// Offsets in a receive block of some number of rows: rows of x (from 0 on), scales, side arrays, then three [N, K] arrays.
struct BlockOffsets {
  int64_t scales = 0, side = 0, idx = 0, weights = 0, pair = 0, num_bytes = 0;
};

struct DispatchArgs {
  Common common;
  // Input.
  const std::byte* x = nullptr;
  int64_t x_stride = 0;  ///< bytes
  const void* topk_idx = nullptr;
  const void* topk_weights = nullptr;
  int64_t num_tokens = 0;
  int num_topk = 0;
  bool ids_are_64 = false, weights_are_bf16 = false, has_weights = false, cached = false;
  int64_t hidden = 0;
  DType dtype = DType::bf16;
  Quantize quantize = Quantize::none;
  int num_side = 0;
  SideArray side[kMaxSide];

  // Rows: what one consists of, after quantisation, in bytes.
  int64_t x_bytes = 0, scale_bytes = 0, x_block_stride = 0;

  /// The rows and their scales where they are quantised before they are moved (throughput/quantize_ahead.cu), x_block_stride and
  /// scale_bytes apart; else null.
  std::byte *fp8 = nullptr, *fp8_scales = nullptr;
  bool plans_beside = false;  ///< the plan kernel need not wait for that

  // The block that peers write, `block_rows` rows, at `block` of the own arena. Exact size: ranks differ in their rows, and so in
  // the offsets of what lies behind x: whoever writes takes them from the rows that were offered (block_offsets). Where the region
  // lacks room for all `total_rows`, the ids of all come at once, and the rows in rounds: in round i those from i * block_rows on.
  size_t block = 0;
  int64_t block_rows = 0, total_rows = 0;
  int round = 0;
  uint32_t room = 0;  ///< exact: what the header says of the own region (kRoomUnit)

  // The result. Straight: rank_major rows stay where they landed (a lease).
  bool straight = false;
  int move_blocks = 1;  ///< grid of the move kernel
  /// plan, admit and move follow each other without anything between: each may start while the one before it runs, and waits for
  /// what it needs of it. A move kernel of more than kFewBlocks starts only when all ranks have told their counts: before that it
  /// could keep out, for as long as a peer is late, what the peer waits for (a collective of another library, say).
  /// In low_latency mode: the one kernel may start while that before it in the stream ends, and waits for it before it reads anything.
  bool chained = false;
  static constexpr int kFewBlocks = 32;
  Layout layout = Layout::rank_major;
  /// In low_latency mode: the parts of the call that this kernel does. One that only sends waits for nobody and sends own rows, too, to
  /// staging of its own; that which receives, later, takes them from there.
  bool sends = true, receives = true;
  int64_t capacity = -1;  ///< of the layout; -1: exact
  int alignment = 1;
  int64_t result_rows = 0;  ///< first dimension of the row arrays (slab: Le * C)
  std::byte* out_x = nullptr;
  int64_t out_stride = 0;
  std::byte* out_scales = nullptr;  ///< rows of scale_bytes
  /// Scales by columns: word w of row i of group g at (g * words + w) * length + i. At once: nothing goes to out_scales.
  struct ScaleColumns {
    uint32_t* to = nullptr;
    int32_t words = 0, length = 0, group_rows = 0;
    bool at_once = false;
    /// Finds where they lie, and returns the bytes that they take: none unless they are wanted.
    int64_t place(int64_t num_groups, int64_t rows, bool is_slab) {
      group_rows = static_cast<int32_t>(rows > 0 ? rows : 1);
      length = static_cast<int32_t>(core::scale_column(rows, is_slab));
      return num_groups * 4 * words * length;
    }
  } columns;
  int64_t* arrived = nullptr;  ///< [R] counters of rows present, or null

  Routing routing;
  int num_local = 0;  ///< experts of this rank

  // Scratch of the lane, in this GPU's memory.
  uint64_t* chunk_counts = nullptr;  ///< [kMaxChunks][R + P]: the epoch above, below it a count and (rows: the first R) kBadChunk
  uint32_t* flags = nullptr;         ///< [kNumFlags] local signals: epochs
  uint32_t* begins = nullptr;  ///< [R + 1][4]: send_begin and recv_begin as flagged words, which need no fence: exact size, and through the host
  int64_t* counts_for_host = nullptr;  ///< exact: mapped (CountWords)
};

/// Whether the move kernel finds the places of pairs itself, as it takes their rows, and notes them: the admit kernel makes tables only,
/// which takes one block. Through the host the ids are far away, and rank_major rows have no places.
TURNOUT_HOST_DEVICE constexpr bool move_places(const DispatchArgs& a) {
  return a.chained && a.layout != Layout::rank_major && !a.common.through_host;
}

/// Exact size: what the host learns from the headers of all ranks.
struct CountWords {
  static constexpr int kEpoch = 0;                                                             ///< written last
  static constexpr int kRooms = 1;                                                             ///< [R] bytes that each rank can give for this call
  static constexpr TURNOUT_HOST_DEVICE int rows(int num_ranks) { return kRooms + num_ranks; }  ///< [R, R]
  static constexpr TURNOUT_HOST_DEVICE int pairs(int num_ranks) { return rows(num_ranks) + num_ranks * num_ranks; }  ///< [Le]
};

/// What starts a call whose routing is known or which is refused, and each round after the first.
struct HelloArgs {
  Common common;
  size_t block = 0;
  int64_t block_rows = 0;
  uint32_t channels = 0, room = 0;
  int round = 0;
  bool refused = false;  ///< by this rank
  Reason why;
  bool counted = false;                ///< refused, but only when the header had told all ranks the counts: it stays as it is
  int64_t* counts_for_host = nullptr;  ///< mapped (CountWords): the rooms are told
};

/// Offsets in a block of `rows` rows, and with the ids of `id_rows`.
TURNOUT_HOST_DEVICE constexpr BlockOffsets block_offsets(const DispatchArgs& a, int64_t rows, int64_t id_rows) {
  BlockOffsets o;
  o.scales = core::align_up(rows * a.x_block_stride, 128);
  o.side = core::align_up(o.scales + rows * a.scale_bytes, 128);
  int64_t at = o.side;
  for (int s = 0; s < a.num_side; ++s) at = core::align_up(at + rows * a.side[s].bytes, 128);
  o.idx = o.weights = o.pair = at;
  if (!a.cached) {
    o.weights = core::align_up(o.idx + id_rows * a.num_topk * 4, 128);
    o.pair = core::align_up(o.weights + (a.has_weights ? id_rows * a.num_topk * 4 : 0), 128);
    at = core::align_up(o.pair + id_rows * a.num_topk * 4, 128);
  }
  o.num_bytes = at;
  return o;
}
TURNOUT_HOST_DEVICE constexpr BlockOffsets block_offsets(const DispatchArgs& a, int64_t rows) { return block_offsets(a, rows, rows); }
/// Where side array `s` begins.
TURNOUT_HOST_DEVICE constexpr int64_t side_offset(const DispatchArgs& a, const BlockOffsets& o, int64_t rows, int s) {
  int64_t at = o.side;
  for (int i = 0; i < s; ++i) at = core::align_up(at + rows * a.side[i].bytes, 128);
  return at;
}

/// What a rank says in its offer about the rows that it sends and receives.
TURNOUT_HOST_DEVICE constexpr uint32_t offered_channels(const DispatchArgs& a) {
  return static_cast<uint32_t>(a.move_blocks) | (a.straight ? kRowsStay : 0);
}

/// The first kernel of a call whose routing is known, or of a further round.
inline HelloArgs hello_of(const DispatchArgs& a) {
  HelloArgs hello;
  hello.common = a.common;
  hello.block = a.block;
  hello.block_rows = a.block_rows;
  hello.channels = offered_channels(a);
  hello.room = a.room;
  hello.round = a.round;
  hello.counts_for_host = a.counts_for_host;
  return hello;
}

/// Tokens are counted in at most so many chunks.
inline constexpr int kMaxChunks = 64;
inline constexpr uint32_t kBadChunk = 1u << 31;
/// Where x is quantised ahead, tokens are released in so many parts: the first rows leave while others are still to be read.
inline constexpr int kAheadParts = 4;
TURNOUT_HOST_DEVICE constexpr int ahead_part(int64_t num_tokens, int64_t token) { return static_cast<int>(token * kAheadParts / num_tokens); }
/// Local signals (in DispatchArgs::flags).
enum LocalFlag : int {
  kPlanReady,                          ///< headers have come, tables of rows are made
  kCounted,                            ///< counts and offsets of experts are those of the result
  kAdmitted,                           ///< ids of received rows have come too
  kQuantised,                          ///< kQuantised + part: the tokens of it are, where that is done ahead
  kPlaced = kQuantised + kAheadParts,  ///< kPlaced + chunk: its pairs have their places
  kRowsPlaced = kPlaced + kMaxChunks,  ///< kRowsPlaced + chunk: the rows of its tokens have theirs, which is all that rows need to leave
  kNumFlags = kRowsPlaced + kMaxChunks
};
/// Channels of a source: one per chunk of meta data, then one per block that announces rows.
inline constexpr int kRowChannels = kMaxChunks;
/// Tickets of a call, in LaneControl::tickets: work that blocks share out, and roles that go by the order in which blocks start.
enum Ticket : int {
  kMetaRoleTicket,     ///< meta: who makes the tables
  kRoleTicket,         ///< admit and combine: who waits for what peers say
  kTokenTicket,        ///< move: tokens to send,
  kOwnTicket,          ///<   rows that stay,
  kRowTicket,          ///<   rows that arrive
  kSendRoleTicket,     ///< move: who sends
  kReceiveRoleTicket,  ///< move, straight: who waits for the others
  kPushTicket,         ///< combine: partial sums for others,
  kReduceTicket,       ///<   own tokens
  kAheadTicket         ///< quantize_ahead: + part: warps that are done with it
};
static_assert(kAheadTicket + kAheadParts <= LaneControl::kNumTickets);

/// Tokens are cut into chunks alike on every rank, so that all know how many chunks a source has.
TURNOUT_HOST_DEVICE constexpr int64_t chunk_tokens(int64_t num_tokens) {
  const int64_t even = core::align_up(core::ceil_div(num_tokens, kMaxChunks), 32);
  return even > 256 ? even : 256;
}
TURNOUT_HOST_DEVICE constexpr int num_chunks(int64_t num_tokens) {
  const int64_t n = core::ceil_div(num_tokens, chunk_tokens(num_tokens));
  return n > 0 ? static_cast<int>(n) : 1;
}

struct CombineArgs {
  Common common;
  const std::byte* y = nullptr;  ///< rows in the handle's layout
  int64_t y_stride = 0;
  DType dtype = DType::bf16;
  int64_t hidden = 0;
  Wire wire = Wire::payload;
  CombineWeights apply = CombineWeights::none;
  const void* weights = nullptr;  ///< apply = rows: one per row of y; tokens: [T, K]
  bool weights_are_bf16 = false;
  bool has_side = false;        ///< the same on all ranks
  const float* side = nullptr;  ///< one scalar per row of y; rank_major [N, K]; null where there are no rows
  Layout layout = Layout::rank_major;
  int64_t capacity = -1;
  int64_t num_tokens = 0;
  int num_topk = 0;
  /// In low_latency mode: the parts of the call that this kernel does, as in DispatchArgs. Own rows are added by that which receives.
  bool sends = true, receives = true;
  std::byte* out = nullptr;  ///< [T] rows
  int64_t out_stride = 0;
  float* out_side = nullptr;    ///< [T, K] or null
  int32_t* num_lost = nullptr;  ///< [T]
  Routing routing;
  const int32_t* node_of_rank = nullptr;  ///< [R] device memory; null: one node
  /// In low_latency mode: the one kernel may start while that before it in the stream ends, and waits for it before it reads anything.
  bool chained = false;

  // The block of this rank that peers write their partial sums to: record i of destination d at row send_offset[d] + i, where
  // is routing.send_offset. Same format on every rank.
  size_t block = 0;
  int64_t block_rows = 0;       ///< room; at least the sum of routing.sent
  int64_t record_bytes = 0;     ///< stride of a record, a multiple of 128
  int64_t side_offset = 0;      ///< in a record: [K] scalars
  int64_t mask_offset = 0;      ///< in a record: 64-bit mask of the k's that are in the sum
  int64_t wire_row_stride = 0;  ///< wire = rows: K rows, each at k * wire_row_stride
  size_t block_stride = 0;      ///< if not 0: the block of copy c of the staging is at block + c * block_stride
};

}  // namespace turnout::engine::cuda
