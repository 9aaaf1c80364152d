// A dispatch in flight.
//
// Two ways lead a row to its place. *Direct*: the destination offered a block of its receive region with its header, the
// block holds all rows, so every source computes where its rows go and puts them there: one pass, rank_major only.
// *Streamed*: rows go as records through the staging ring, small enough to stay in cache, and the destination lays them
// out (once per expert, if the layout says so) as they arrive. Streams carry everything else: other layouts, results in
// memory that is not symmetric, and rows so few that they travel with the header in low_latency mode.
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "engine/cpu/call.h"
#include "engine/cpu/row_format.h"
#include "engine/routing.h"
#include "turnout/buffer.h"

namespace turnout::engine {

/// What a finished dispatch hands to the API.
struct DispatchOutcome {
  std::shared_ptr<const internal::Routing> routing;
  std::shared_ptr<ResultMemory> memory;  ///< null if there are no rows in memory of ours
  std::byte* x = nullptr;                ///< first row
  int64_t x_stride = 0;                  ///< bytes
  BlockFormat block;                     ///< of memory
};

class DispatchCall final : public Call {
 public:
  /// REQUIRES: args were checked, and outlive the call. `routing` holds the source side (new or of args.handle).
  /// Throws InvalidArgument if there is no room for a result whose size is known already.
  DispatchCall(const std::shared_ptr<Context>& context, int lane, uint64_t epoch, uint64_t first_epoch, const KnownFacts& known,
               const DispatchArgs& args, std::shared_ptr<internal::Routing> fresh_routing, std::shared_ptr<const internal::Routing> cached);

  bool progress() override;
  bool sent() const override { return all_headers_sent() && planned_ && sends_left_ == 0; }
  bool done() const override { return finished_; }
  Waiting waiting() const override;
  void give_up() noexcept override;

  /// Once. REQUIRES: done().
  DispatchOutcome take();

  /// Rows of each source present so far: [R], readable at any time.
  const int64_t* arrived() const { return arrived_.data(); }
  const DispatchArgs& args() const { return args_; }
  const RowFormat& format() const { return format_; }

 private:
  enum class Path : uint8_t { none, direct, streamed };
  struct Row {  ///< a row that has arrived, in its final form
    const std::byte* x;
    const std::byte* scales;
    const std::byte* record;  ///< side arrays at format_.side_at, or null: side arrays of own token `token`
    int64_t token;
    int64_t index;  ///< rank_major row
  };

  const internal::Routing& routing() const { return cached_ ? *cached_ : *fresh_; }
  bool early(int peer) const;
  Path choose_path(int source, int destination, bool block_fits) const;
  int64_t block_rows(int rank) const;
  /// Of rows that this rank sends or receives. REQUIRES: planned.
  Path path_to(int destination) const { return path_to_[static_cast<size_t>(destination)]; }
  Path path_from(int source) const { return path_from_[static_cast<size_t>(source)]; }
  int64_t admitted(int source, int destination) const;

  // dispatch_send.cc
  bool wants_lease() const { return args_.result != ResultKind::fresh && !args_.out.defined(); }
  void make_offer();
  std::shared_ptr<ResultMemory> memory_of(const std::optional<BlockPool::Block>& block) const;
  std::shared_ptr<ResultMemory> lease_of(size_t num_bytes) const;
  std::shared_ptr<ResultMemory> fresh_memory(size_t num_bytes);
  void check_room();
  std::string no_room(int64_t needed) const;
  std::string no_lease(size_t needed) const;
  bool send();
  bool send_direct();
  bool send_stream(int peer);
  void write_record(int peer, int64_t i, int64_t token);
  void write_direct(int peer, int64_t row, int64_t token);
  void fill_meta(int peer, int64_t token, int32_t* idx, float* weights) const;
  /// The row of a token as it travels: x itself, or quantised, with its scales, in memory that the next call overwrites.
  const std::byte* token_row(int64_t token, const std::byte*& scales) const {
    scales = nullptr;
    return args_.quantize == Quantize::none ? args_.x.row(token) : quantised_row(token, scales);
  }
  const std::byte* quantised_row(int64_t token, const std::byte*& scales) const;

  // dispatch_receive.cc
  void plan_sends();
  void plan_receives();
  void plan_experts();
  bool make_room();
  bool receive();
  bool receive_from(int source, int64_t available);
  void admit(int source, int64_t i, const int32_t* idx, const float* weights);
  void lay_out(const Row& row) const;
  void settle_held();
  /// Puts a row where it stays: past the cache if the call moves more than a cache holds.
  void store_row(void* dst, const void* src, size_t num_bytes) const {
    (large_ ? context_->kernels.copy_row_streaming : context_->kernels.copy_row)(dst, src, num_bytes);
  }
  void finish();
  void zero_padding() const;
  static void finish_routing(internal::Routing& r, int rank);

  // dispatch_verify.cc. All REQUIRE sums_.
  /// Where the parts of a row lie.
  struct Parts {
    const std::byte *x, *scales;
    PerSide<const std::byte*> side;
  };
  Parts parts_of_token(int64_t token) const;
  Parts parts_at(int64_t position) const;
  uint64_t data_sum(const SumKey& of, const Parts& parts) const;
  uint64_t meta_sum(const SumKey& of, const void* idx, const void* weights) const;
  RowSum sum_of_token(int peer, Region region, int64_t i, int64_t token) const;
  void check_records(int source, int64_t first, int64_t end);
  void check_block(int source, int64_t first, int64_t end);
  void check_placed(int source, int64_t first, int64_t end) const;
  void check_totals() const;

  const DispatchArgs& args_;
  RowFormat format_;
  std::shared_ptr<internal::Routing> fresh_;
  std::shared_ptr<const internal::Routing> cached_;
  bool low_latency_ = false;
  bool large_ = false;  ///< the rows of this call do not fit in a cache

  struct Target {                                              ///< where direct rows of this rank go at a destination
    size_t x = 0, scales = 0, topk_idx = 0, topk_weights = 0;  ///< offsets of the arrays in the arena
    int64_t first_row = 0, admitted = 0;
    int64_t block_rows = 0;
  };

  PerRank<Path> path_to_, path_from_;  ///< [R]

  // Send side.
  PerRank<Target> targets_;  ///< [R] if some path is direct
  PerRank<int> direct_peers_;
  PerRank<int64_t> next_;   ///< [R] records or rows sent so far
  int64_t next_token_ = 0;  ///< of the direct rows
  int64_t sends_left_ = 0;  ///< rows not sent yet, direct and streamed

  // Receive side.
  std::shared_ptr<ResultMemory> offer_;
  size_t trim_to_ = 0;  ///< what is kept of the offer that became the result; 0: nothing to trim
  int direct_sources_ = 0;
  bool counted_ = false, planned_ = false, finished_ = false, held_ = false, given_up_ = false;
  bool routed_ = false;        ///< finish_routing() has run
  std::string misfit_;         ///< why the rows cannot be kept
  PerPair<int64_t> admitted_;  ///< [R, R]
  PerRank<int64_t> total_;     ///< [R] admitted rows of each destination
  PerRank<int64_t> received_;  ///< [R]
  int64_t rows_left_ = 0;
  std::vector<int64_t> expert_next_;  ///< [R, Le]: next position of a source's rows in each group
  PerRank<int64_t> arrived_;
  std::shared_ptr<ResultMemory> memory_, held_memory_;
  BlockFormat block_;
  std::byte* x_ = nullptr;
  int64_t x_stride_ = 0;
};

}  // namespace turnout::engine
