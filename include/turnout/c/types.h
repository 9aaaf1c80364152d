/* Status and errors, the small closed sets, tensors. Numbers are those of types.h and never change. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "turnout/visibility.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a call ended, by who can act (error.h). */
typedef enum turnout_status {
  TURNOUT_OK = 0,
  TURNOUT_INVALID_ARGUMENT = 1, /* the caller: an argument, or ranks that disagree about one */
  TURNOUT_TRANSPORT_ERROR = 2,  /* the operator: memory, permissions, network, a store that fails */
  TURNOUT_PEER_TIMEOUT = 3,     /* a peer did not come, or did not finish, in time */
  TURNOUT_PEER_FAILED = 4,      /* a peer is gone */
  TURNOUT_OTHER = 5             /* anything else: no ordinary memory, a failure of a callback */
} turnout_status;

/* What the last failed call of this thread has to say; "" if none failed. Valid until the next one fails on this thread. */
TURNOUT_API const char* turnout_last_error(void);

/* What a wait was waiting for when it gave up. */
typedef struct turnout_wait_record {
  int32_t rank;         /* who waited */
  const int32_t* peers; /* for whom: num_peers ranks */
  size_t num_peers;
  int32_t lane;
  const char* call;       /* "dispatch", "combine", "bootstrap" */
  uint64_t epoch;         /* number of the call on its lane */
  const char* phase;      /* "header", "rows", "space", "consumed", "verdict", "failed", or the step of the bootstrap */
  uint64_t expected;      /* value waited for */
  uint64_t seen;          /* value seen last */
  const char* peer_state; /* "alive", "busy", "silent", "gone", "closed" (its buffer), "failed" */
} turnout_wait_record;

/* The record of the last failed call of this thread, if it was TURNOUT_PEER_TIMEOUT or TURNOUT_PEER_FAILED; else null.
 * It and what it points to are valid until the next call fails on this thread. */
TURNOUT_API const turnout_wait_record* turnout_last_wait_record(void);

/* "INVALID_ARGUMENT" and so on; "?" for other numbers. */
TURNOUT_API const char* turnout_status_name(turnout_status status);

/* "major.minor.patch" of the loaded library. */
TURNOUT_API const char* turnout_version(void);

typedef enum turnout_dtype {
  TURNOUT_U8 = 0,
  TURNOUT_I8 = 1,
  TURNOUT_I32 = 2,
  TURNOUT_I64 = 3,
  TURNOUT_FP8_E4M3 = 4,
  TURNOUT_FP8_E5M2 = 5,
  TURNOUT_UE8M0 = 6,
  TURNOUT_FP16 = 7,
  TURNOUT_BF16 = 8,
  TURNOUT_FP32 = 9,
  TURNOUT_FP64 = 10
} turnout_dtype;

/* How a call trades latency for bandwidth; automatic chooses by the bytes of the largest call that the buffer allows. */
typedef enum turnout_mode { TURNOUT_MODE_AUTOMATIC = 0, TURNOUT_THROUGHPUT = 1, TURNOUT_LOW_LATENCY = 2 } turnout_mode;

typedef enum turnout_layout {
  TURNOUT_RANK_MAJOR = 0,   /* one row per (token, destination rank), by (source rank, token) */
  TURNOUT_EXPERT_MAJOR = 1, /* one row per (token, local expert), grouped by expert, in (source rank, token, k) order */
  TURNOUT_EXPERT_SLAB = 2   /* [local experts, capacity, hidden] with a count per expert */
} turnout_layout;

/* The form in which partial sums cross a link on the way back. */
typedef enum turnout_wire {
  TURNOUT_WIRE_PAYLOAD = 0, /* the dtype of the rows given to combine */
  TURNOUT_WIRE_FP32 = 1,
  TURNOUT_WIRE_FP8 = 2, /* e4m3 with one fp32 scale per block of 128 */
  TURNOUT_WIRE_ROWS = 3 /* every expert's row crosses; the source adds them in k order with one rounding */
} turnout_wire;

typedef enum turnout_quantize {
  TURNOUT_QUANTIZE_NONE = 0,
  TURNOUT_QUANTIZE_FP8_E4M3 = 1,      /* blocks of 128, fp32 scales */
  TURNOUT_QUANTIZE_FP8_E4M3_UE8M0 = 2 /* blocks of 128, scales rounded up to a power of two, one byte each */
} turnout_quantize;

/* Where a result lives: a block of the receive region (lease, no copy) or memory of its own. */
typedef enum turnout_result_kind { TURNOUT_RESULT_AUTOMATIC = 0, TURNOUT_RESULT_LEASE = 1, TURNOUT_RESULT_FRESH = 2 } turnout_result_kind;

/* What happens between the issue of a call and its wait: nothing of ours, or a thread of ours receives. */
typedef enum turnout_receive { TURNOUT_DEFERRED = 0, TURNOUT_RESIDENT = 1 } turnout_receive;

/* What a failed peer does to a call. */
typedef enum turnout_on_failure { TURNOUT_RAISE = 0, TURNOUT_MASK = 1 } turnout_on_failure;

/* Which weights a combine applies, in fp32, where the sum is made. */
typedef enum turnout_combine_weights {
  TURNOUT_WEIGHTS_NONE = 0,   /* plain sum over a token's rows */
  TURNOUT_WEIGHTS_SOURCE = 1, /* the topk_weights of the dispatch (expert_major and expert_slab) */
  TURNOUT_WEIGHTS_ROWS = 2,   /* `weights`: one per row of y */
  TURNOUT_WEIGHTS_TOKENS = 3  /* `weights`: those of this rank's tokens; with wire rows (expert_major and expert_slab) */
} turnout_combine_weights;

typedef enum turnout_device_kind { TURNOUT_CPU = 0, TURNOUT_CUDA = 1 } turnout_device_kind;

/* A typed, strided view of memory that somebody else owns; ndim = 0: not given. Inputs are never written. */
typedef struct turnout_tensor {
  void* data;    /* may be null without elements */
  int32_t dtype; /* turnout_dtype */
  int32_t ndim;  /* 0 to 3 */
  int64_t shape[3];
  int64_t strides[3];  /* in elements */
  int32_t device_kind; /* turnout_device_kind */
  int32_t device_index;
} turnout_tensor;

/* A dense matrix [rows, cols] (cols = 0: a vector [rows]) on the CPU. */
TURNOUT_API turnout_tensor turnout_tensor_dense(const void* data, turnout_dtype dtype, int64_t rows, int64_t cols);

#ifdef __cplusplus
}
#endif
