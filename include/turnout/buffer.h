// Buffer: symmetric memory with dispatch() and combine(); the class users meet.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "turnout/allocator.h"
#include "turnout/communicator.h"
#include "turnout/config.h"
#include "turnout/error.h"
#include "turnout/handle.h"
#include "turnout/tensor.h"
#include "turnout/types.h"

namespace turnout {
inline namespace v0 {

namespace internal {
class BufferImpl;
class PendingImpl;
class Memory;
}  // namespace internal

/// Arguments of dispatch(). T tokens of this rank, H elements per row, K experts per token.
struct DispatchArgs {
  TensorView x{};                  ///< [T, H], any dtype, last stride 1; rows are moved as bytes
  TensorView topk_idx{};           ///< [T, K] int32 or int64 dense; -1 = none; duplicates count twice. Not with `handle`.
  TensorView topk_weights{};       ///< [T, K] fp32 or bf16 dense; optional. Not with `handle` (its weights are used again).
  std::vector<TensorView> side{};  ///< up to 16 [T, w] arrays that travel with the rows (scales), last stride 1
  const Handle* handle = nullptr;  ///< reuse this routing: no counting. Layout, capacity and alignment are its: left out, or the same
  Mode mode = Mode::automatic;
  Layout layout = Layout::rank_major;
  /// Absent: exact (the host waits for the counts; never fails for size). Given: rows per receiving rank, padding
  /// included, or rows per local expert (expert_slab, where it is required). The same on all ranks, 0 allowed.
  std::optional<int64_t> capacity{};
  int expert_alignment = 1;            ///< expert_major: groups start at multiples of this
  Quantize quantize = Quantize::none;  ///< of bf16, fp16 or fp32 x; scales arrive as result.x_scales
  ScaleOrder scale_order = ScaleOrder::rows;
  TensorView out_scales{};  ///< optional, expert_slab with scale_order = columns: they go here; as x_scales, strides included
  ResultKind result = ResultKind::automatic;
  /// Optional: rows of the result go here ([>= rows, H], last stride 1, with a capacity >= capacity rows; slab also [Le, C, H], dense).
  /// Shares no memory with what is given. Too little room here, or for result = lease, raises on all ranks and nothing is delivered.
  TensorView out{};
  Receive receive = Receive::deferred;  ///< of dispatch_async
  int num_sms = 0;                      ///< GPU: most multiprocessors that the call takes; 0: as many as it gains from
  OnFailure on_failure = OnFailure::raise;
  bool zero_tail = false;  ///< with a capacity: what nothing came for becomes 0 in rows, scales, side arrays and weights
  int lane = 0;            ///< one that is not there raises on all ranks; if there are several, they stay aborted until recover()
  Stream stream{};
};

/// What arrived. Views are valid until release() or destruction. Le = local experts; N = rows, with a capacity that (`num_rows` are real).
class TURNOUT_API DispatchResult {
 public:
  TensorView x;                  ///< rank_major and expert_major [N, H], expert_slab [Le, C, H]; row stride may exceed H
  TensorView x_scales;           ///< fused quantisation: fp32 [N, ceil(H/128)] or ue8m0; slab [Le, C, ceil(H/128)]; see ScaleOrder
  std::vector<TensorView> side;  ///< as given, with the rows of x
  TensorView topk_idx;           ///< rank_major: int32 [N, K] local expert, -1 where not local
  TensorView topk_weights;       ///< fp32: rank_major [N, K] (0 where not local), expert_major [N], slab [Le, C]
  TensorView num_rows;           ///< int64 [1]: rows present (expert_major: padding included)
  TensorView expert_counts;      ///< int32 [Le]: rows of each local expert, without padding
  TensorView expert_offsets;     ///< int64 [Le + 1]: where each group starts, in rows of x (expert_major) or in sorted_rows (rank_major)
  TensorView sorted_rows;        ///< rank_major: int32 [sum of expert_counts]: rows of x grouped by expert, for a gathering GEMM
  TensorView num_dropped;        ///< int64 [1]: (token, expert) rows (rank_major: token rows) that exceeded the capacity
  TensorView arrived;            ///< receive = resident: int64 [num_ranks] arrival counters, rows of each source present so far (rank_major)
  Handle handle;
  bool is_lease = false;  ///< x lies in the receive region

  DispatchResult();
  DispatchResult(DispatchResult&&) noexcept;
  DispatchResult& operator=(DispatchResult&&) noexcept;
  ~DispatchResult();
  /// Gives the rows back now; views of this become undefined. Copies of x, x_scales and side are refused by later calls until
  /// something else lies there, or always pass if the memory was of a caller's Allocator, who alone knows of it. Idempotent.
  void release();

 private:
  friend class internal::BufferImpl;
  std::shared_ptr<internal::Memory> memory_;
};

/// Which weights combine() applies, in fp32, where the sum is made, before any rounding.
enum class CombineWeights : uint8_t {
  none,    ///< plain sum over a token's rows
  source,  ///< the handle's topk_weights (expert_major and expert_slab)
  rows,    ///< `weights`: one per row of y
  tokens,  ///< `weights`: those of this rank's tokens, given as late as here; with wire = rows (expert_major and expert_slab)
};

/// Arguments of combine().
struct CombineArgs {
  TensorView y{};  ///< as the handle's rows: [N or more, H'], only N are read, or [Le, C, H']; fp16, bf16, fp32 or fp64, last stride 1
  const Handle* handle = nullptr;
  CombineWeights apply = CombineWeights::none;
  TensorView weights{};       ///< fp32 or bf16; CombineWeights::rows: [N] or [Le, C]; tokens: [T, K]
  TensorView side{};          ///< optional fp32, one scalar per row, carried back to [T, K]: [N] or [Le, C]; rank_major [N, K]; dense
  Wire wire = Wire::payload;  ///< rows: expert_major and expert_slab only
  TensorView out{};           ///< optional [T, H'] of y's dtype; no memory of y, weights or side
  Mode mode = Mode::automatic;
  OnFailure on_failure = OnFailure::raise;
  int num_sms = 0;  ///< as in DispatchArgs
  int lane = 0;
  Stream stream{};
};

/// What came back.
class TURNOUT_API CombineResult {
 public:
  TensorView x;         ///< [T, H'] of y's dtype; 0 for a token without rows
  TensorView side;      ///< fp32 [T, K], 0 where there is no row
  TensorView num_lost;  ///< int32 [T]: (token, expert) terms omitted for capacity or a masked rank

  CombineResult();
  CombineResult(CombineResult&&) noexcept;
  CombineResult& operator=(CombineResult&&) noexcept;
  ~CombineResult();
  void release();

 private:
  friend class internal::BufferImpl;
  std::shared_ptr<internal::Memory> memory_;
};

/// A call that was issued and not yet waited for. Movable. Destroying it without wait() waits for it and drops the result.
template <class Result>
class TURNOUT_API Pending {
 public:
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  ~Pending();
  /// Receives what the call brought. Throws as the call itself; InvalidArgument the second time.
  Result wait();
  /// receive = resident: rows of each source rank present so far, int64 [num_ranks], readable (acquire) at any time.
  TensorView arrived() const;

 private:
  friend class Buffer;
  explicit Pending(std::shared_ptr<internal::PendingImpl> impl);
  std::shared_ptr<internal::PendingImpl> impl_;
};
using PendingDispatch = Pending<DispatchResult>;
using PendingCombine = Pending<CombineResult>;

/// Symmetric memory of a group of ranks. Every call is collective: all ranks make the same calls on a lane in the same
/// order, each with its own tokens (0 is a number of tokens). Calls on one lane from several threads are serialised;
/// lanes are independent. The destructor is local and never waits for a peer.
class TURNOUT_API Buffer {
 public:
  /// Collective. `allocator` serves results that are not leases; it must outlive them.
  /// Throws: InvalidArgument (also if ranks disagree: a table on all ranks), TransportError (memory), PeerTimeout.
  Buffer(Communicator& communicator, const BufferConfig& config, Allocator* allocator = nullptr);
  Buffer(Buffer&&) noexcept;
  Buffer& operator=(Buffer&&) noexcept;
  ~Buffer();

  /// Sends each token to the ranks of its experts. Throws: InvalidArgument before anything moved in throughput mode (the
  /// call counts on all ranks, and all raise), PeerTimeout, PeerFailed.
  DispatchResult dispatch(const DispatchArgs& args);
  /// Issues the send and returns; receive with wait(). The inputs must stay unchanged until then. Issuing waits until all ranks
  /// have come: calls that a thread issues on several Buffers or lanes it issues in the same order on all ranks, or PeerTimeout ends it.
  PendingDispatch dispatch_async(const DispatchArgs& args);
  /// Brings the rows of a dispatch back to their tokens and adds them. Throws as dispatch().
  CombineResult combine(const CombineArgs& args);
  PendingCombine combine_async(const CombineArgs& args);

  /// Changes the owner of every expert from the next call on. Collective by agreement: all ranks with the same map
  /// before the same call; a difference raises at that call. Handles made before keep their own map.
  void set_expert_to_rank(const std::vector<int>& expert_to_rank);

  /// Throws what an earlier asynchronous failure left; cheap, does not wait.
  void check();
  /// check() after everything issued has finished.
  void synchronize();
  /// Ends the sticky abort that an expired wait left. Collective; every pending call is lost.
  void recover();
  /// Non-zero once the Buffer is aborted; may be read at any time.
  const uint64_t* status_word() const;
  /// GPU, collective, no call under way: gives the arena's memory back (leases lose their rows) / maps fresh memory at the same
  /// addresses. Throws: InvalidArgument on a CPU or out of turn, TransportError (memory; shared by cudaIpc).
  void suspend(), resume();
  /// Later calls, and those that other threads are in, raise InvalidArgument; peers that wait for this rank PeerFailed. Local, idempotent.
  void close();

  const BufferConfig& config() const;
  int rank() const;
  int num_ranks() const;
  int num_local_experts() const;
  uint64_t num_fresh_results() const;  ///< dispatches with result = automatic that found no lease
  size_t num_bytes() const;            ///< symmetric memory of this rank, = required_bytes(config(), num_ranks())
  const std::shared_ptr<internal::BufferImpl>& impl() const { return impl_; }

 private:
  std::shared_ptr<internal::BufferImpl> impl_;
};

}  // namespace v0
}  // namespace turnout
