/* Buffer: symmetric memory with dispatch and combine (buffer.h, config.h, handle.h). T tokens of this rank, H elements per row,
 * K experts per token, R ranks, Le experts of this rank, N rows of a result, C capacity. */
#pragma once
#include "turnout/c/communicator.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct turnout_buffer turnout_buffer;
typedef struct turnout_handle turnout_handle; /* the routing of a dispatch; any number of uses */
typedef struct turnout_dispatch_result turnout_dispatch_result;
typedef struct turnout_combine_result turnout_combine_result;
typedef struct turnout_pending_dispatch turnout_pending_dispatch; /* issued, not waited for */
typedef struct turnout_pending_combine turnout_pending_combine;

/* What all ranks must agree on; a difference is INVALID_ARGUMENT on all, with a table. */
typedef struct turnout_buffer_config {
  size_t struct_size;
  int32_t num_experts;           /* 1 or more */
  int32_t dtype;                 /* widest row type (turnout_dtype). Zero is TURNOUT_U8: set it. */
  int64_t hidden;                /* widest row, in elements of dtype */
  int64_t max_tokens_per_rank;   /* most tokens that a rank gives to one dispatch */
  int32_t max_topk;              /* most experts per token, at most 64; 0: 8 */
  int32_t num_lanes;             /* independent sequences of calls; 0: 1 */
  int32_t max_outstanding;       /* calls of a lane in flight at once; 0: 2 */
  int32_t num_threads;           /* local: threads that move rows, the calling one included; 0: 1 */
  size_t max_side_bytes;         /* most bytes of side arrays per row */
  const int32_t* expert_to_rank; /* owner of each expert: num_experts entries; null: in order, evenly */
  const int32_t* replica_of;     /* logical number of each expert: num_experts entries; null: each its own */
  size_t receive_bytes;          /* receive region; 0: max_outstanding results of a balanced routing (config.h) */
  size_t staging_bytes;          /* per peer, lane and call in flight; 0: chosen */
  int64_t timeout_ms;            /* local: for a silent peer, or one inside the call; 0: 60 s */
  int64_t busy_timeout_ms;       /* local: for a living peer that has not come to the call; 0: 30 min */
  int64_t report_every_ms;       /* local: a log line names who is waited for; 0: 30 s */
  int32_t touch_pages;           /* local: non-zero writes the receive region's pages before the first call */
  int32_t device_kind;           /* turnout_device_kind of tokens and results, the same on all ranks */
  int32_t device_index;          /* local: which GPU of this process; on the CPU 0 */
} turnout_buffer_config;

/* Memory for results that are not leases. Calls may come from any thread. */
typedef struct turnout_allocator {
  size_t struct_size;
  void* context;
  void* (*allocate)(void* context, size_t num_bytes); /* null: out of memory: TRANSPORT_ERROR here, elsewhere as allocator.h says */
  void (*deallocate)(void* context, void* data, size_t num_bytes);
} turnout_allocator;

/* Bytes of symmetric memory that each rank takes. Errors: INVALID_ARGUMENT naming the field. */
TURNOUT_API turnout_status turnout_required_bytes(const turnout_buffer_config* config, int32_t num_ranks, size_t* num_bytes);

/* Collective. `allocator` may be null; its callbacks must outlive the results. Errors: INVALID_ARGUMENT (a field, ranks that
 * disagree), TRANSPORT_ERROR (memory), PEER_TIMEOUT. */
TURNOUT_API turnout_status turnout_buffer_create(turnout_communicator* communicator, const turnout_buffer_config* config,
                                                 const turnout_allocator* allocator, turnout_buffer** buffer);
/* Local: never waits for a peer. Results and handles may be destroyed later. */
TURNOUT_API void turnout_buffer_destroy(turnout_buffer* buffer);

typedef struct turnout_dispatch_args {
  size_t struct_size;
  turnout_tensor x;            /* [T, H], any dtype, last stride 1; moved as bytes */
  turnout_tensor topk_idx;     /* [T, K] int32 or int64 dense; -1 = none, duplicates count. Not with `handle`. */
  turnout_tensor topk_weights; /* [T, K] fp32 or bf16 dense; optional. Not with `handle`. */
  const turnout_tensor* side;  /* num_side arrays [T, w] that travel with the rows, last stride 1 */
  size_t num_side;
  const turnout_handle* handle; /* reuse this routing: no counting */
  int32_t mode;                 /* turnout_mode */
  int32_t layout;               /* turnout_layout */
  int32_t has_capacity;         /* non-zero: `capacity` rows per rank (or per local expert: expert_slab, where it is required) */
  int32_t expert_alignment;     /* expert_major: groups start at multiples of this; 0: 1 */
  int64_t capacity;             /* the same on all ranks; 0 is allowed */
  int32_t quantize;             /* turnout_quantize, of bf16, fp16 or fp32 x */
  int32_t result;               /* turnout_result_kind */
  turnout_tensor out;           /* optional: rows go here ([>= N, H], last stride 1; slab: dense) */
  int32_t receive;              /* turnout_receive; of dispatch_async */
  int32_t on_failure;           /* turnout_on_failure; mask is not in this version */
  int32_t lane;
  int32_t num_sms; /* GPU: most multiprocessors that the call takes; 0: as many as it gains from */
  void* stream;    /* GPU: the cudaStream_t whose order the call keeps; null: the default stream. On the CPU null. */
} turnout_dispatch_args;

/* Sends each token to the ranks of its experts and returns what arrived here. Collective: all ranks make the same calls on a
 * lane in the same order. Errors: INVALID_ARGUMENT (on all ranks), PEER_TIMEOUT, PEER_FAILED, OTHER (the allocator). */
TURNOUT_API turnout_status turnout_dispatch(turnout_buffer* buffer, const turnout_dispatch_args* args, turnout_dispatch_result** result);
/* Issues the send; inputs stay unchanged until the wait. The struct and the arrays of tensors may go at once. */
TURNOUT_API turnout_status turnout_dispatch_async(turnout_buffer* buffer, const turnout_dispatch_args* args, turnout_pending_dispatch** pending);
/* Receives. Errors as turnout_dispatch; INVALID_ARGUMENT the second time. `pending` is still to be destroyed. */
TURNOUT_API turnout_status turnout_dispatch_wait(turnout_pending_dispatch* pending, turnout_dispatch_result** result);
/* TURNOUT_RESIDENT: int64 [R], rows of each source present so far; read with acquire, valid until the wait. */
TURNOUT_API turnout_status turnout_dispatch_arrived(const turnout_pending_dispatch* pending, turnout_tensor* arrived);
/* Not waited for: waits, and drops the result. */
TURNOUT_API void turnout_pending_dispatch_destroy(turnout_pending_dispatch* pending);

/* Views into a result, valid until it is released or destroyed. ndim = 0: not in this result. */
typedef struct turnout_dispatch_view {
  size_t struct_size;
  turnout_tensor x;           /* [N, H] or [Le, C, H]; the row stride may exceed H */
  turnout_tensor x_scales;    /* quantised: fp32 or ue8m0 [N, ceil(H / 128)] or [Le, C, ceil(H / 128)] */
  const turnout_tensor* side; /* num_side arrays, with the rows of x */
  size_t num_side;
  turnout_tensor topk_idx;       /* rank_major: int32 [N, K] local expert, -1 where not local */
  turnout_tensor topk_weights;   /* fp32: rank_major [N, K] (0 where not local), expert_major [N], slab [Le, C] */
  turnout_tensor num_rows;       /* int64 [1]: rows present (expert_major: with padding) */
  turnout_tensor expert_counts;  /* int32 [Le]: rows of each local expert, without padding */
  turnout_tensor expert_offsets; /* int64 [Le + 1]: starts of groups in x (expert_major) or sorted_rows (rank_major) */
  turnout_tensor sorted_rows;    /* rank_major: int32: rows of x grouped by expert */
  turnout_tensor num_dropped;    /* int64 [1]: rows that exceeded the capacity */
  turnout_tensor arrived;        /* int64 [R]: rows of each source (rank_major) */
  int32_t is_lease;              /* x lies in the receive region */
} turnout_dispatch_view;

/* Fills `view`, whose struct_size is set. */
TURNOUT_API turnout_status turnout_dispatch_result_view(const turnout_dispatch_result* result, turnout_dispatch_view* view);
/* A handle of its own, to be destroyed; good after the result is gone. */
TURNOUT_API turnout_status turnout_dispatch_result_handle(const turnout_dispatch_result* result, turnout_handle** handle);
/* Gives the rows back now; views become invalid, and a combine refuses them. Idempotent. */
TURNOUT_API turnout_status turnout_dispatch_result_release(turnout_dispatch_result* result);
TURNOUT_API void turnout_dispatch_result_destroy(turnout_dispatch_result* result);

typedef struct turnout_handle_info {
  size_t struct_size;
  int64_t num_tokens; /* T */
  int64_t num_rows;   /* rows that this rank received (slab: sum of its counts) */
  int32_t num_topk;   /* K */
  int32_t layout;     /* turnout_layout */
} turnout_handle_info;
TURNOUT_API turnout_status turnout_handle_get_info(const turnout_handle* handle, turnout_handle_info* info);
TURNOUT_API void turnout_handle_destroy(turnout_handle* handle);

typedef struct turnout_combine_args {
  size_t struct_size;
  turnout_tensor y;             /* as the handle's rows: [N or more, H], only N are read, or [Le, C, H]; fp16, bf16, fp32 or fp64, last stride 1 */
  const turnout_handle* handle; /* of a dispatch of this buffer */
  turnout_tensor weights;       /* fp32 or bf16; TURNOUT_WEIGHTS_ROWS: [N] or [Le, C]; TURNOUT_WEIGHTS_TOKENS: [T, K] */
  turnout_tensor side;          /* optional fp32, carried back to [T, K]: [N] or [Le, C]; rank_major [N, K] */
  turnout_tensor out;           /* optional [T, H] of y's dtype */
  int32_t apply;                /* turnout_combine_weights */
  int32_t wire;                 /* turnout_wire; rows: expert_major and expert_slab only */
  int32_t mode;                 /* turnout_mode */
  int32_t on_failure;           /* turnout_on_failure; mask is not in this version */
  int32_t lane;
  int32_t num_sms; /* as in turnout_dispatch_args */
  void* stream;    /* as in turnout_dispatch_args */
} turnout_combine_args;

/* Brings the rows of a dispatch back to their tokens and adds them. Collective. Errors as turnout_dispatch. */
TURNOUT_API turnout_status turnout_combine(turnout_buffer* buffer, const turnout_combine_args* args, turnout_combine_result** result);
/* As turnout_dispatch_async, turnout_dispatch_wait and turnout_pending_dispatch_destroy; y stays unchanged until the wait. */
TURNOUT_API turnout_status turnout_combine_async(turnout_buffer* buffer, const turnout_combine_args* args, turnout_pending_combine** pending);
TURNOUT_API turnout_status turnout_combine_wait(turnout_pending_combine* pending, turnout_combine_result** result);
TURNOUT_API void turnout_pending_combine_destroy(turnout_pending_combine* pending);

typedef struct turnout_combine_view {
  size_t struct_size;
  turnout_tensor x;        /* [T, H] of y's dtype; 0 for a token without rows */
  turnout_tensor side;     /* fp32 [T, K], 0 where there is no row */
  turnout_tensor num_lost; /* int32 [T]: terms omitted for capacity */
} turnout_combine_view;
/* As those of turnout_dispatch_result. */
TURNOUT_API turnout_status turnout_combine_result_view(const turnout_combine_result* result, turnout_combine_view* view);
TURNOUT_API turnout_status turnout_combine_result_release(turnout_combine_result* result);
TURNOUT_API void turnout_combine_result_destroy(turnout_combine_result* result);

/* Changes the owner of every expert (num_experts entries) from the next call on; all ranks alike before the same call. */
TURNOUT_API turnout_status turnout_buffer_set_expert_to_rank(turnout_buffer* buffer, const int32_t* expert_to_rank, size_t num_experts);
/* Says what an earlier failure left: OK, PEER_TIMEOUT or PEER_FAILED. Cheap, does not wait. */
TURNOUT_API turnout_status turnout_buffer_check(turnout_buffer* buffer);
/* The same once everything issued has finished. */
TURNOUT_API turnout_status turnout_buffer_synchronize(turnout_buffer* buffer);
/* Ends the abort that an expired wait left. Collective; every pending call is lost. Errors: PEER_TIMEOUT, TRANSPORT_ERROR. */
TURNOUT_API turnout_status turnout_buffer_recover(turnout_buffer* buffer);
/* GPU, collective, no call under way: gives the symmetric memory back (leases lose their rows) / maps fresh memory at the same
 * addresses. Errors: INVALID_ARGUMENT (on a CPU, or out of turn), TRANSPORT_ERROR (no memory; memory that cudaIpc shares). */
TURNOUT_API turnout_status turnout_buffer_suspend(turnout_buffer* buffer);
TURNOUT_API turnout_status turnout_buffer_resume(turnout_buffer* buffer);
/* Later calls are INVALID_ARGUMENT. Local, idempotent. */
TURNOUT_API turnout_status turnout_buffer_close(turnout_buffer* buffer);

typedef struct turnout_buffer_info {
  size_t struct_size;
  int32_t rank, num_ranks;
  int32_t num_local_experts;
  size_t num_bytes;            /* symmetric memory of this rank */
  const uint64_t* status_word; /* non-zero once the buffer is aborted; may be read at any time while the buffer lives */
  uint64_t num_fresh_results;  /* dispatches with TURNOUT_RESULT_AUTOMATIC that found no lease */
} turnout_buffer_info;
TURNOUT_API turnout_status turnout_buffer_get_info(const turnout_buffer* buffer, turnout_buffer_info* info);

#ifdef __cplusplus
}
#endif
