// The symmetric arena of a Buffer on a GPU: one list gives offsets and total, for host and device, the same on every rank.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/host_device.h"
#include "core/math.h"

namespace turnout::engine::cuda {

/// Most ranks that reach each other by load and store.
inline constexpr int kMaxRanks = 72;
/// Most blocks of one kernel that announce on their own (one signal each per peer).
inline constexpr int kMaxChannels = 256;
/// Payload of a flagged word: three of its four 32-bit words; the fourth is the epoch.
inline constexpr int kWordPayload = 3;

/// Sizes that shape the arena; all ranks compute the same ones.
struct ArenaShape {
  int num_ranks = 1;
  int num_lanes = 1;
  int depth = 3;                 ///< staging copies: one more than calls may be outstanding
  int header_ints = 0;           ///< payload of a header, in 32-bit words (header_ints_of)
  int64_t max_tokens = 0;        ///< per rank and call
  int64_t ll_tokens = 0;         ///< most tokens of a low_latency call; 0: no such calls
  size_t ll_dispatch_bytes = 0;  ///< of one staged low-latency row, in flagged words
  size_t ll_combine_bytes = 0;   ///< of one staged low-latency partial sum
  size_t ll_combine_lines = 0;   ///< where its lines begin; 0: it has none, but words only. Lines change no size
  int ll_combine_copies = 0;     ///< partial sums a token can have: min(ranks, top-k)
  size_t receive_bytes = 0;
};

/// Byte offsets. A "copy" is epoch % depth of a lane; everything a copy holds carries the epoch, so nothing is ever reset.
struct Arena {
  size_t status, headers, offers, channels, rows, ll_dispatch, ll_combine, receive, num_bytes;
  size_t header_bytes, ll_dispatch_row, ll_combine_row, ll_combine_lines, receive_bytes;
  int64_t max_tokens, ll_tokens;
  int num_ranks, num_lanes, depth, ll_combine_copies;

  static constexpr Arena of(const ArenaShape& s) {
    Arena a{};
    a.num_ranks = s.num_ranks;
    a.num_lanes = s.num_lanes;
    a.depth = s.depth;
    a.max_tokens = s.max_tokens;
    a.ll_tokens = s.ll_tokens;
    a.ll_combine_copies = s.ll_combine_copies;
    a.header_bytes = static_cast<size_t>(core::align_up(core::ceil_div(s.header_ints, kWordPayload) * 16, 128));
    a.ll_dispatch_row = static_cast<size_t>(core::align_up(static_cast<int64_t>(s.ll_dispatch_bytes), 128));
    a.ll_combine_row = static_cast<size_t>(core::align_up(static_cast<int64_t>(s.ll_combine_bytes), 128));
    a.ll_combine_lines = s.ll_combine_lines;
    a.receive_bytes = static_cast<size_t>(core::align_up(static_cast<int64_t>(s.receive_bytes), 4096));
    const size_t pairs = static_cast<size_t>(s.num_lanes) * static_cast<size_t>(s.depth) * static_cast<size_t>(s.num_ranks);
    size_t at = 0;
    const auto take = [&at](size_t bytes) {
      const size_t here = at;
      at = static_cast<size_t>(core::align_up(static_cast<int64_t>(at + bytes), 4096));
      return here;
    };
    a.status = take(4096);
    a.headers = take(pairs * a.header_bytes);
    a.offers = take(pairs * 16);
    a.channels = take(pairs * kMaxChannels * 8);
    a.rows = take(pairs * static_cast<size_t>(s.max_tokens) * 8);
    a.ll_dispatch = take(pairs * static_cast<size_t>(s.ll_tokens) * a.ll_dispatch_row);
    a.ll_combine = take(static_cast<size_t>(s.num_lanes) * static_cast<size_t>(s.depth) * static_cast<size_t>(s.ll_combine_copies) *
                        static_cast<size_t>(s.ll_tokens) * a.ll_combine_row);
    a.receive = take(a.receive_bytes);
    a.num_bytes = at;
    return a;
  }

  TURNOUT_HOST_DEVICE constexpr size_t index(int lane, int copy, int source) const {
    return (static_cast<size_t>(lane) * static_cast<size_t>(depth) + static_cast<size_t>(copy)) * static_cast<size_t>(num_ranks) +
           static_cast<size_t>(source);
  }
  /// Where `source` writes its header of the call that uses `copy`: 16-byte flagged words.
  TURNOUT_HOST_DEVICE constexpr size_t header_at(int lane, int copy, int source) const { return headers + index(lane, copy, source) * header_bytes; }
  /// Where `source` offers a block of its receive region: one flagged word (Offer).
  TURNOUT_HOST_DEVICE constexpr size_t offer_at(int lane, int copy, int source) const { return offers + index(lane, copy, source) * 16; }
  /// 64-bit signal `channel` of `source`.
  TURNOUT_HOST_DEVICE constexpr size_t channel_at(int lane, int copy, int source, int channel) const {
    return channels + (index(lane, copy, source) * kMaxChannels + static_cast<size_t>(channel)) * 8;
  }
  /// 64-bit signal of the i-th row that `source` sends here: epoch << 32 | what the call says (dispatch: 0; combine: the
  /// first 32 bits of the record's mask).
  TURNOUT_HOST_DEVICE constexpr size_t row_at(int lane, int copy, int source, int64_t i) const {
    return rows + (index(lane, copy, source) * static_cast<size_t>(max_tokens) + static_cast<size_t>(i)) * 8;
  }
  /// Staged low-latency row of token `i` of `source`.
  TURNOUT_HOST_DEVICE constexpr size_t ll_dispatch_at(int lane, int copy, int source, int64_t i) const {
    return ll_dispatch + (index(lane, copy, source) * static_cast<size_t>(ll_tokens) + static_cast<size_t>(i)) * ll_dispatch_row;
  }
  /// Staged low-latency partial sum: the `nth` (0 .. min(R, K) - 1) of token `i` of this rank.
  TURNOUT_HOST_DEVICE constexpr size_t ll_combine_at(int lane, int copy, int nth, int64_t i) const {
    const size_t at = (static_cast<size_t>(lane) * static_cast<size_t>(depth) + static_cast<size_t>(copy)) * static_cast<size_t>(ll_combine_copies);
    return ll_combine + ((at + static_cast<size_t>(nth)) * static_cast<size_t>(ll_tokens) + static_cast<size_t>(i)) * ll_combine_row;
  }
};

/// Payload of a header, in 32-bit words: the facts of the call, then (dispatch) what its sender is about to send.
struct HeaderInts {
  static constexpr int kHash = 0;        ///< of the facts that must agree, low and high word
  static constexpr int kRefused = 2;     ///< the sender rejected its own arguments: 1: an id is no expert; kSaysWhy: its Reason lies where facts do
  static constexpr int kTokens = 3;      ///< of the sender
  static constexpr int kRoom = 4;        ///< exact: what its receive region can give for this call, in units of kRoomUnit
  static constexpr int kFactValues = 5;  ///< the facts themselves, 64 bits each, for the table of differences
  static constexpr int kNumFacts = 19;
  static constexpr int kRows = kFactValues + 2 * kNumFacts;                                      ///< [num_ranks] token rows for each rank
  static constexpr TURNOUT_HOST_DEVICE int experts(int num_ranks) { return kRows + num_ranks; }  ///< [local experts of the addressee]
  /// The same where they follow later than the rest: they begin a word of their own.
  static constexpr TURNOUT_HOST_DEVICE int later_experts(int num_ranks) {
    return (experts(num_ranks) + kWordPayload - 1) / kWordPayload * kWordPayload;
  }
};
inline constexpr uint32_t kSaysWhy = 2;
inline constexpr int64_t kRoomUnit = 128;
constexpr int header_ints_of(int num_ranks, int max_local_experts) { return HeaderInts::later_experts(num_ranks) + max_local_experts; }

/// Payload of an offer: the block of the sender's receive region that the addressee may write in this call.
struct Offer {
  uint32_t offset;  ///< from the start of the arena, in units of 128 bytes
  uint32_t rows;    ///< the block has room for so many
  /// Blocks of the sender that will say once, at their end, that their rows have been written (rank_major); and kRowsStay.
  uint32_t channels;
  TURNOUT_HOST_DEVICE constexpr int num_channels() const { return static_cast<int>(channels & 0xffff); }
  TURNOUT_HOST_DEVICE constexpr bool rows_stay() const { return channels >> 16 != 0; }
};
/// In Offer::channels: rows stay where they land, so the one who offers does not want to be told of each. Ranks differ in that: it
/// follows from where each wants its result.
inline constexpr uint32_t kRowsStay = 1u << 16;
/// Offer::rows of a rank that refused the call after its header.
inline constexpr uint32_t kRefusedOffer = 0xffffffffu;

}  // namespace turnout::engine::cuda
