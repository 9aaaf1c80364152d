// A call in flight: one epoch of a lane. It moves in steps that never wait, so that a lane can drive several at once; all
// waiting is in Lane::drive (lane.h).
//
// Staging copy `copy` = epoch % depth. The six signals from a source for a copy carry the epoch, so nothing is ever reset:
//   kHeader    epoch: the source's header is in place
//   kRows      epoch << 32 | rows that the source has put straight into the offered block
//   kProduced  epoch << 32 | records that the source has put into the ring
//   kSpace     epoch << 32 | records that the addressee has taken out of the ring; all ones: it has finished the call, so
//              header, ring and block of this epoch may be written again by the call that uses the copy next.
//   kVerdict   epoch << 32 | kFits or kMisfit, from a source whose header owes it: whether it can take its rows
//   kStopped   epoch: the call has failed on all ranks alike, and the source puts nothing more for it
#pragma once
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "engine/cpu/context.h"
#include "engine/cpu/header.h"
#include "engine/cpu/inline_vector.h"
#include "engine/cpu/known_facts.h"
#include "engine/cpu/verify.h"

namespace turnout::engine {

constexpr uint64_t kAllConsumed = 0xffffffffull;
constexpr uint64_t progress_value(uint64_t epoch, uint64_t count) { return epoch << 32 | count; }
constexpr int64_t kFits = 1, kMisfit = 2;

/// Bytes between two signals of a stream: enough to amortise the signal, few enough that the receiver starts early.
constexpr int64_t kBytesPerSignal = 64 << 10;
/// Results larger than this share of a last-level cache are written past it.
constexpr int64_t kCacheBytes = 4 << 20;

/// Whom a call waits for, and for what; made only once a wait has become slow.
struct Waiting {
  std::string phase;
  std::vector<int> peers;
  uint64_t expected = 0, seen = 0;
  bool for_arrival = false;  ///< the peers have not arrived at the call, or were issued it and do not wait for it yet: they may be busy
};

class Call {
 public:
  /// `context` outlives the call: its lane and whoever waits for it belong to the Buffer.
  Call(const std::shared_ptr<Context>& context, int lane, uint64_t epoch, uint64_t first_epoch, const KnownFacts& known, int64_t handle);
  virtual ~Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  /// Moves everything that can move now; true if anything did. Throws InvalidArgument when ranks disagree.
  virtual bool progress() = 0;
  /// Everything this rank sends has been sent.
  virtual bool sent() const = 0;
  /// Everything has arrived and been laid out.
  virtual bool done() const = 0;
  /// What progress() lacks.
  virtual Waiting waiting() const = 0;
  /// The call failed: gives memory back and marks outputs.
  virtual void give_up() noexcept = 0;

  /// Counts the call as refused on all ranks: headers only. `why` outlives the call.
  void refuse(const Reason& why);

  /// A call that was refused, or that ranks do not agree about, or whose rows do not fit, has failed on all ranks, but not all that
  /// was put for it may have landed yet: it keeps its copy until every peer has stopped, lest something late lands on the next call.
  bool closing() const { return stopped_ && num_closed_ < context_->num_ranks - 1; }
  /// Frees the copy for the peers that have stopped, or, when this rank leaves and reads nothing any more, for all.
  /// True if there were any. REQUIRES: closing().
  bool close(bool leaving = false);
  bool closed(int peer) const { return peers_[static_cast<size_t>(peer)].closed; }

  uint64_t epoch() const { return epoch_; }
  int lane() const { return lane_; }
  std::string name() const { return facts_.kind == static_cast<int64_t>(CallKind::dispatch) ? "dispatch" : "combine"; }
  /// The failure is one that all ranks find in their headers and verdicts: none waits for another.
  bool failed_together() const { return failed_together_; }
  std::exception_ptr failure;  ///< set when the call failed while another one was being driven

 protected:
  /// Sends this rank's header to every peer whose staging copy is free, receives theirs. True if anything moved.
  bool exchange_headers();
  bool all_headers_sent() const { return num_headers_sent_ == context_->num_ranks - 1; }
  bool all_headers_seen() const { return num_headers_seen_ == context_->num_ranks; }
  bool header_sent(int peer) const { return peers_[static_cast<size_t>(peer)].header_sent; }
  bool header_seen(int peer) const { return peers_[static_cast<size_t>(peer)].header_seen; }
  /// Throws InvalidArgument if some rank refused or the facts differ. REQUIRES: all_headers_seen().
  void check_headers();
  /// Tells all ranks whether this one can take its rows. REQUIRES: its header owes a verdict.
  void give_verdict(bool fits);
  bool owes_verdict(int source) const { return header(source).owes_verdict && count_of(source, core::BufferLayout::kVerdict) == 0; }
  /// Whether all verdicts that headers owe are here. Throws InvalidArgument, on all ranks, if some rank cannot take its rows;
  /// `mine` says why this one cannot, or is empty. REQUIRES: all_headers_seen().
  bool check_verdicts(const std::string& mine);
  /// Tells every source that its header, ring and block of this call may be reused.
  void consume_all();
  /// The call has failed: consume_all() at once, or, where it failed on all ranks alike, by and by in close().
  void leave();
  /// Tells every peer that nothing more is put for this call. REQUIRES: all_headers_sent().
  void stop();

  /// Whether `peer` has finished this call.
  bool has_consumed(int peer) const { return read(peer, core::BufferLayout::kSpace) >= progress_value(epoch_, kAllConsumed); }

  const Header& header(int source) const { return headers_[static_cast<size_t>(source)]; }
  /// Rows (dispatch) or records (combine) that `source` sends to `destination`. REQUIRES: header_seen(source).
  int64_t rows(int source, int destination) const {
    return rows_[static_cast<size_t>(source) * static_cast<size_t>(context_->num_ranks) + static_cast<size_t>(destination)];
  }
  /// Rows of `source` for local expert `e` of this rank. REQUIRES: header_seen(source), counts were sent.
  int32_t expert_rows(int source, int e) const {
    return expert_rows_[static_cast<size_t>(source) * static_cast<size_t>(max_local_) + static_cast<size_t>(e)];
  }

  uint64_t read(int source, core::BufferLayout::Signal which) const { return context_->read(context_->layout.signal(lane_, copy_, source, which)); }
  void raise(int peer, core::BufferLayout::Signal which, uint64_t value) {
    util::probe::at(util::probe::Step::raise);
    context_->window->signal(peer, context_->layout.signal(lane_, copy_, context_->rank, which), value);
  }
  /// Records of this call that `source` has put into its ring here, or that `peer` has taken from ours there.
  int64_t count_of(int source, core::BufferLayout::Signal which) const;

  // verify.h, in call_verify.cc. All but check_address() and put() REQUIRE sums_.
  struct Sums;
  struct DropSums {
    void operator()(Sums* sums) const;
  };
  SumKey key(Region region, int source, int destination, int64_t index) const { return {region, lane_, epoch_, source, destination, index}; }
  /// Stores or puts, as the peer is reached.
  void put(int peer, size_t offset, const void* data, size_t num_bytes);
  /// Puts the checksum of a row at `offset` of the peer's arena.
  void send_sum(int peer, size_t offset, const RowSum& sum);
  /// Once all rows for `peer` have been put, before the signal that tells so. Again: nothing.
  void send_total(int peer);
  RowSum sum_at(size_t offset) const { return *reinterpret_cast<const RowSum*>(context_->local + offset); }
  /// Counts a row of `source` as taken, for check_total().
  void count_sum(int source, const RowSum& sum);
  /// Throws TransportError if the rows taken from `source` are not the `num_rows` that it sent.
  void check_total(Region region, int source, int64_t num_rows) const;
  /// Throws TransportError, naming the row, if the sums differ.
  void check_sum(Region region, int source, int64_t row, const char* part, uint64_t sent, uint64_t found) const {
    if (sent != found) [[unlikely]]
      fail_sum(region, source, row, part, sent, found);
  }
  /// Throws TransportError if bytes of the arena of `peer` that are about to be written (or read in place) lie outside of their region.
  /// In builds that check, or with checksums.
  void check_address(Region region, int peer, int64_t row, size_t offset, size_t num_bytes) const {
    if (kChecked || sums_) [[unlikely]]
      check_inside(region, peer, row, offset, num_bytes);
  }

  Context* const context_;
  const int lane_;
  const uint64_t epoch_;
  const int copy_;
  CallFacts facts_;
  std::unique_ptr<Sums, DropSums> sums_;  ///< null without checksums

  // Filled by the derived call before the first exchange_headers().
  Header mine_{};
  PerRank<int32_t> my_rows_;                          ///< [R]
  PerRank<int64_t> my_pull_first_;                    ///< [R] Header::pull_first for each addressee, or empty
  std::vector<std::vector<int32_t>> my_expert_rows_;  ///< [R][local experts of that rank], or empty

 private:
  size_t facts_of(int source) const { return context_->layout.header_at(lane_, copy_, source) + facts_at(context_->layout.header_bytes); }
  void send_header(int peer);
  void take_header(int source);
  Hash header_hash(int source, int destination) const { return Hash(key(Region::header, source, destination, -1)); }
  void seal_header(int peer);
  void check_header(int source) const;
  [[noreturn]] void fail_sum(Region region, int source, int64_t row, const char* part, uint64_t sent, uint64_t found) const;
  void check_inside(Region region, int peer, int64_t row, size_t offset, size_t num_bytes) const;
  /// Throws InvalidArgument, which all ranks do.
  [[noreturn]] void fail_together(const std::string& text);
  std::string where() const { return name() + " (lane " + std::to_string(lane_) + ", epoch " + std::to_string(epoch_) + ")"; }

  const void* told_ = &facts_;  ///< what lies at the end of the header: the facts or, of a refused call, the Reason
  const bool first_use_;        ///< no earlier call used this copy since the last recover()
  int max_local_ = 0;
  int num_headers_sent_ = 0, num_headers_seen_ = 0, num_closed_ = 0;
  bool failed_together_ = false, stopped_ = false;
  struct Peer {
    bool header_sent = false, header_seen = false, closed = false;
  };
  PerRank<Peer> peers_;
  InlineVector<Header, 4> headers_;  ///< of ranks whose header was seen
  PerPair<int32_t> rows_;            ///< likewise
  std::vector<int32_t> expert_rows_;
};

}  // namespace turnout::engine
