// The symmetric arena of a Buffer: one list gives the offsets and the total, for every rank alike.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/math.h"

namespace turnout::core {

/// Hands out aligned regions in order.
struct RegionCursor {
  size_t num_bytes = 0;
  constexpr size_t take(size_t bytes, size_t alignment = 128) {
    const size_t at = (num_bytes + alignment - 1) / alignment * alignment;
    num_bytes = at + bytes;
    return at;
  }
};

/// Sizes that shape the arena; all ranks compute the same ones.
struct BufferShape {
  int num_ranks = 1;
  int num_lanes = 1;
  int depth = 2;                   ///< staging copies: one more than calls may be outstanding
  size_t header_bytes = 0;         ///< of one call's header to one rank
  size_t least_staging_bytes = 0;  ///< what a ring must hold at once: four of the largest records, or all rows of a token
  size_t staging_bytes = 0;        ///< of one ring; 0: chosen here
  size_t receive_bytes = 0;
  int64_t verified_rows = -1;  ///< -1: no checksums; else the most rows that a rank receives in a call
};

/// Byte offsets in the arena, the same on every rank.
struct BufferLayout {
  static constexpr size_t kPage = 4096;
  static constexpr size_t kNoteBytes = 1024;  ///< why a rank aborted, in words

  // Bytes of a checksum and of what seals the rest of a call (engine/cpu/verify.h), and the least distance of what has one of its own.
  static constexpr size_t kSumBytes = 16, kSealBytes = 64, kLeastRecord = 64, kLeastRow = 128;

  size_t notes, headers, status, rings, receive, num_bytes;
  size_t seals, ring_sums, row_sums, pull_sums;  ///< the same place if there are no checksums
  size_t header_bytes, ring_bytes, receive_bytes;
  int num_ranks, num_lanes, depth;
  bool verified;  ///< with checksums
  size_t verified_rows;

  static constexpr BufferLayout of(const BufferShape& s) {
    BufferLayout b{};
    b.num_ranks = s.num_ranks;
    b.num_lanes = s.num_lanes;
    b.depth = s.depth;
    b.header_bytes = s.header_bytes;
    b.ring_bytes = ring_bytes_of(s);
    b.receive_bytes = static_cast<size_t>(align_up(static_cast<int64_t>(s.receive_bytes), kPage));
    const size_t copies = static_cast<size_t>(s.num_lanes) * static_cast<size_t>(s.depth) * static_cast<size_t>(s.num_ranks);
    RegionCursor at;
    b.notes = at.take(static_cast<size_t>(s.num_ranks) * kNoteBytes);
    b.headers = at.take(copies * b.header_bytes);
    b.status = at.take(sizeof(uint64_t));  // not zero: some rank has aborted
    b.rings = at.take(copies * b.ring_bytes, kPage);
    b.receive = at.take(b.receive_bytes, kPage);
    b.verified = s.verified_rows >= 0;
    b.verified_rows = b.verified ? static_cast<size_t>(s.verified_rows) : 0;
    b.seals = at.take(b.verified ? copies * kSealBytes : 0);
    b.ring_sums = at.take(b.verified ? copies * b.ring_sum_bytes() : 0);
    b.row_sums = at.take(b.verified ? b.receive_bytes / kLeastRow * kSumBytes : 0);
    b.pull_sums = at.take(static_cast<size_t>(s.num_lanes) * static_cast<size_t>(s.depth) * b.verified_rows * kSumBytes);
    b.num_bytes = static_cast<size_t>(align_up(static_cast<int64_t>(at.num_bytes), kPage));
    return b;
  }

  /// Where `source` writes its header, and its records, for the call that uses copy `copy` of `lane`.
  constexpr size_t note_at(int source) const { return notes + static_cast<size_t>(source) * kNoteBytes; }
  constexpr size_t header_at(int lane, int copy, int source) const { return headers + index(lane, copy, source) * header_bytes; }
  constexpr size_t ring_at(int lane, int copy, int source) const { return rings + index(lane, copy, source) * ring_bytes; }

  // With checksums: of what `source` writes for that call beside its rows; of the record in a slot of its ring; of the row that begins
  // at `offset` of the arena; of row `row` of this rank, which peers read in place.
  constexpr size_t seal_at(int lane, int copy, int source) const { return seals + index(lane, copy, source) * kSealBytes; }
  constexpr size_t ring_sum_at(int lane, int copy, int source, int64_t slot) const {
    return ring_sums + index(lane, copy, source) * ring_sum_bytes() + static_cast<size_t>(slot) * kSumBytes;
  }
  constexpr size_t row_sum_at(size_t offset) const { return row_sums + (offset - receive) / kLeastRow * kSumBytes; }
  constexpr size_t pull_sum_at(int lane, int copy, int64_t row) const {
    const size_t call = static_cast<size_t>(lane) * static_cast<size_t>(depth) + static_cast<size_t>(copy);
    return pull_sums + (call * verified_rows + static_cast<size_t>(row)) * kSumBytes;
  }

  // Signals: one per rank for the abort and one for close(), then six per (lane, copy, source), whose writers do not share a cache line.
  enum Signal : int { kHeader, kRows, kProduced, kSpace, kVerdict, kStopped, kNumSignals };
  constexpr int abort_signal(int source) const { return source; }
  constexpr int closed_signal(int source) const { return num_ranks + source; }
  constexpr int signal(int lane, int copy, int source, Signal which) const {
    return first_signal() + static_cast<int>(index(lane, copy, source)) * kSignalsPerLine + which;
  }
  constexpr int num_signals() const { return first_signal() + num_lanes * depth * num_ranks * kSignalsPerLine; }

 private:
  static constexpr int kSignalsPerLine = 8;
  static_assert(kNumSignals <= kSignalsPerLine);
  constexpr size_t ring_sum_bytes() const { return ring_bytes / kLeastRecord * kSumBytes; }
  constexpr int first_signal() const { return static_cast<int>(align_up(2 * num_ranks, kSignalsPerLine)); }
  constexpr size_t index(int lane, int copy, int source) const {
    return (static_cast<size_t>(lane) * static_cast<size_t>(depth) + static_cast<size_t>(copy)) * static_cast<size_t>(num_ranks) +
           static_cast<size_t>(source);
  }

  /// 1 MiB where few ranks share 16 MiB, so that a ring stays in cache; never less than calls need to get on.
  static constexpr size_t ring_bytes_of(const BufferShape& s) {
    constexpr size_t kAll = size_t{16} << 20, kMost = size_t{1} << 20;
    const size_t wanted = s.staging_bytes ? s.staging_bytes : std::min(kMost, kAll / static_cast<size_t>(s.num_ranks));
    return static_cast<size_t>(align_up(static_cast<int64_t>(std::max(wanted, s.least_staging_bytes)), kPage));
  }
};

}  // namespace turnout::core
