// A combine in flight. Every rank makes the partial sum of each row that it received, in the wire's form, and streams it
// back through the staging ring of the row's source; the source adds a token's partials in the order of the sum tree as
// soon as all of them are there. Own rows are added where they lie. With wire=rows every expert's row is a record of its
// own and the source adds them in k order.
//
// Rows that are partial sums already (rank_major, no weights, payload wire) and lie in the arena of their rank, as a lease
// does, are not sent at all: their source reads them in place, and the call ends here once every source has.
#pragma once
#include <memory>
#include <vector>

#include "engine/cpu/call.h"
#include "engine/routing.h"
#include "turnout/buffer.h"

namespace turnout::engine {

struct CombineOutcome {
  std::shared_ptr<ResultMemory> memory;  ///< null if all of it is the caller's
  std::byte* x = nullptr;
  int64_t x_stride = 0;  ///< bytes
  std::vector<float> side;
  std::vector<int32_t> num_lost;
};

class CombineCall final : public Call {
 public:
  /// REQUIRES: args were checked against `routing`, and outlive the call.
  CombineCall(const std::shared_ptr<Context>& context, int lane, uint64_t epoch, uint64_t first_epoch, const KnownFacts& known,
              const CombineArgs& args, std::shared_ptr<const internal::Routing> routing);

  bool progress() override;
  bool sent() const override { return all_headers_sent() && sends_left_ == 0; }
  bool done() const override { return finished_; }
  Waiting waiting() const override;
  void give_up() noexcept override;
  CombineOutcome take();

  const CombineArgs& args() const { return args_; }
  const internal::Routing& routing() const { return *routing_; }

 private:
  /// Start of a record; `lost` is the number of the row's terms that are missing, or k for wire=rows.
  struct Meta {
    int32_t ordinal;  ///< position of the token in the source's list for this rank
    int32_t lost_or_k;
    float weight;  ///< wire=rows with weights=rows
    float reserved;
  };
  /// What a rank sends back to a source: one entry per record, in order.
  struct Outgoing {
    int64_t row;  ///< rank_major row of this rank
    int32_t k;    ///< wire=rows: which term; else -1
  };
  struct TokenTerms;

  bool rows_wire() const { return args_.wire == Wire::rows; }
  DType wire_dtype() const;
  bool in_double() const { return args_.y.dtype == DType::fp64; }
  bool can_be_pulled() const;
  bool all_pulled() const;
  const std::byte* pulled_row(int rank, int64_t ordinal) const;
  void list_outgoing(int source);
  const Meta* next_record(int source) const;
  bool stream_ended(int source) const;

  // combine_send.cc
  bool send();
  bool send_to(int source);
  void write_record(int source, int64_t i, std::byte* record) const;
  int32_t send_partial(int64_t row, std::byte* record) const;
  int32_t partial_sum(int64_t row, void* out, float* out_scales) const;
  const std::byte* y_row(int64_t position) const;
  float weight_at(int64_t at) const;  ///< entry of the weights that were given
  float own_weight(size_t flat) const;
  float side_of(int64_t row, int k) const;

  // combine_reduce.cc
  bool reduce();
  bool gather(int64_t token, TokenTerms& terms);
  bool gather_partials(int64_t token, TokenTerms& terms);
  bool gather_rows(int64_t token, TokenTerms& terms);
  int32_t gather_own(int64_t ordinal, int64_t token, TokenTerms& terms);
  void merge_side(int64_t token, int rank, const float* side);
  void prefetch(const TokenTerms& terms) const;
  void add(const TokenTerms& terms) const;
  void add_into(std::byte* out, const TokenTerms& terms) const;
  int make_partials(const TokenTerms& terms, std::vector<RowRef>& rows) const;

  // combine_verify.cc. All REQUIRE sums_.
  RowSum record_sum(const SumKey& of, const std::byte* record) const;
  uint64_t pulled_sum(int rank, int64_t ordinal, const std::byte* row) const;
  void put_checked(int source, int64_t i);
  void seal_pulled_rows();
  const Meta* checked(int source, const std::byte* record) const;
  void check_taken();
  void check_totals() const;

  const CombineArgs& args_;
  std::shared_ptr<const internal::Routing> routing_;
  size_t wire_bytes_ = 0, scale_bytes_ = 0;  ///< of a partial sum
  size_t side_floats_ = 0, row_at_ = 0, scales_at_ = 0, record_bytes_ = 0;
  int64_t slots_ = 0;  ///< records per ring
  int64_t hidden_ = 0;

  // Send side.
  std::vector<std::vector<Outgoing>> outgoing_;  ///< [R], or none if rows are read in place
  PerRank<int64_t> next_;                        ///< [R]
  int64_t sends_left_ = 0;

  // Reduce side.
  PerRank<int64_t> ordinal_;   ///< [R] tokens of the list passed so far
  PerRank<int64_t> taken_;     ///< [R] records read
  PerRank<int64_t> released_;  ///< [R] records whose slots were given back
  int64_t next_token_ = 0;
  bool pull_ = false;      ///< sources read this rank's rows in place
  bool large_ = false;     ///< the result does not fit in a cache
  bool consumed_ = false;  ///< this rank needs nothing more of its peers' rows
  bool checked_ = false, finished_ = false, given_up_ = false;

  CombineOutcome out_;
};

}  // namespace turnout::engine
