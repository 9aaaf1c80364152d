/* Communicator: who the ranks are and how they reach each other (communicator.h, bootstrap.h). */
#pragma once
#include "turnout/c/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct turnout_communicator turnout_communicator;
typedef struct turnout_store turnout_store;
typedef struct turnout_bytes turnout_bytes; /* where a get callback leaves what it found */

/* What a communicator may be told. */
typedef struct turnout_communicator_options {
  size_t struct_size;
  const char* transport;       /* null or "auto", "inproc" (threads), "shm" (processes of one machine) */
  const int32_t* node_of_rank; /* node of every rank: num_nodes_given entries, one per rank; null: from the machine */
  size_t num_nodes_given;
  int64_t timeout_ms;      /* of each bootstrap step; 0: TURNOUT_BOOTSTRAP_TIMEOUT_MS, else 60 s */
  uint64_t scheduler_seed; /* inproc, for tests: non-zero delays and reorders puts and signals by this seed */
} turnout_communicator_options;

/* Keys and values shared by all ranks, supplied by the caller. Calls may come from several threads. A callback returns
 * TURNOUT_OK, or anything else if the store cannot be reached, which becomes TURNOUT_TRANSPORT_ERROR. */
typedef struct turnout_store_callbacks {
  size_t struct_size;
  void* context; /* given to every callback */
  /* Publishes `num_bytes` bytes under `key`. */
  turnout_status (*set)(void* context, const char* key, const void* data, size_t num_bytes);
  /* Waits up to `timeout_ms` for `key` and gives its bytes to turnout_bytes_assign(value, ...); without that call there was none. */
  turnout_status (*get)(void* context, const char* key, int64_t timeout_ms, turnout_bytes* value);
  /* Forgets `key`; may be null. */
  void (*erase)(void* context, const char* key);
} turnout_store_callbacks;

/* Copies `num_bytes` bytes into `value`. Only inside a get callback. */
TURNOUT_API turnout_status turnout_bytes_assign(turnout_bytes* value, const void* data, size_t num_bytes);

/* A store that calls back. The callbacks and their context must outlive the store and every communicator and buffer made
 * from it. Errors: INVALID_ARGUMENT (set or get is null). */
TURNOUT_API turnout_status turnout_store_from_callbacks(const turnout_store_callbacks* callbacks, turnout_store** store);

/* A store in this process's memory, for ranks that are threads: make one, give it to all. */
TURNOUT_API turnout_status turnout_thread_store(turnout_store** store);

/* Communicators keep what they need of a store: it may be destroyed before them. */
TURNOUT_API void turnout_store_destroy(turnout_store* store);

/* From the environment of torchrun, mpirun, srun or `turnout launch`; without any of them, one rank. Collective. `options`
 * may be null, here and below. Errors: INVALID_ARGUMENT (a variable), TRANSPORT_ERROR, PEER_TIMEOUT (ranks that did not come). */
TURNOUT_API turnout_status turnout_communicator_from_env(const turnout_communicator_options* options, turnout_communicator** communicator);

/* From a store. Collective over `num_ranks` ranks, 0 <= rank < num_ranks. `name` (null: "world") tells apart communicators that
 * share a store. Errors as from_env. */
TURNOUT_API turnout_status turnout_communicator_from_store(turnout_store* store, int32_t rank, int32_t num_ranks, const char* name,
                                                           const turnout_communicator_options* options, turnout_communicator** communicator);

/* Local: never waits for a peer. Buffers keep what they need of a communicator: it may be destroyed before them. */
TURNOUT_API void turnout_communicator_destroy(turnout_communicator* communicator);

typedef struct turnout_communicator_info {
  size_t struct_size;
  int32_t rank, num_ranks;
  int32_t node, num_nodes;
  int32_t local_rank;    /* index within the node */
  const char* transport; /* valid as long as the communicator */
} turnout_communicator_info;

/* Fills `info`, whose struct_size is set. */
TURNOUT_API turnout_status turnout_communicator_get_info(const turnout_communicator* communicator, turnout_communicator_info* info);

/* Every rank's `num_bytes` bytes, in rank order, to `all` (num_ranks * num_bytes). Collective; num_bytes must be the same on all
 * ranks (else INVALID_ARGUMENT). Errors: PEER_TIMEOUT, TRANSPORT_ERROR. */
TURNOUT_API turnout_status turnout_communicator_all_gather(turnout_communicator* communicator, const void* mine, size_t num_bytes, void* all);

/* Returns when every rank has arrived. Collective. Errors: PEER_TIMEOUT, TRANSPORT_ERROR. */
TURNOUT_API turnout_status turnout_communicator_barrier(turnout_communicator* communicator);

/* A communicator of `members`: `num_members` ascending ranks of this one, this rank among them. Collective over the members.
 * `name` (null: "sub") tells apart groups of the same members. */
TURNOUT_API turnout_status turnout_communicator_sub_group(turnout_communicator* communicator, const int32_t* members, size_t num_members,
                                                          const char* name, turnout_communicator** group);

/* Runs `body` on `num_ranks` threads, each a virtual rank with a communicator of its own, which it does not destroy and which
 * is gone when it returns. Returns when all are done: TURNOUT_OK, or the status, text and record of the lowest rank that failed. */
TURNOUT_API turnout_status turnout_run_virtual_ranks(int32_t num_ranks, turnout_status (*body)(turnout_communicator* communicator, void* context),
                                                     void* context, const turnout_communicator_options* options);

#ifdef __cplusplus
}
#endif
