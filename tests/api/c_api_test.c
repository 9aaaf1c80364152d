/* The C interface, from C: rows go out and come back over two ranks, and every status can be had, with its words. */
#include "c_job.h"

static const float* row_of(const turnout_tensor* x, int64_t row) { return (const float*)x->data + row * x->strides[0]; }

/* Scales each row by its expert's number + 1, in place, and checks that the side value came with its row. */
static void run_experts(const turnout_dispatch_view* view, int rank) {
  const int64_t* offsets = view->expert_offsets.data;
  for (int e = 0; e < kExperts / 2; ++e) {
    for (int64_t row = offsets[e]; row < offsets[e + 1]; ++row) {
      float* values = (float*)(uintptr_t)row_of(&view->x, row);
      const int32_t tag = ((const int32_t*)view->side[0].data)[row * view->side[0].strides[0]];
      CHECK(values[0] == (float)(10 * (tag / 1000) + tag % 1000 + 1));
      for (int h = 0; h < kHidden; ++h) values[h] *= (float)(rank * kExperts / 2 + e + 1);
    }
  }
}

static void check_sums(const turnout_tensor* x, int rank) {
  CHECK(x->ndim == 2 && x->shape[0] == kTokens && x->shape[1] == kHidden && x->dtype == TURNOUT_FP32);
  for (int t = 0; t < kTokens; ++t) {
    const float wanted = (float)(10 * rank + t + 1) * (0.75f * (float)(t + 1) + 0.25f * (float)(4 - t));
    for (int h = 0; h < kHidden; ++h) CHECK(row_of(x, t)[h] == wanted);
  }
}

/* The layer once with calls that wait and once with calls that are waited for, through a cached handle. */
static turnout_status layer(turnout_communicator* communicator, void* context) {
  (void)context;
  turnout_communicator_info who = {.struct_size = sizeof who};
  CHECK_OK(turnout_communicator_get_info(communicator, &who));
  CHECK(who.num_ranks == 2 && who.num_nodes == 1 && who.local_rank == who.rank && strcmp(who.transport, "inproc") == 0);
  const turnout_buffer_config config = small_config();
  turnout_buffer* buffer = NULL;
  CHECK_OK(turnout_buffer_create(communicator, &config, NULL, &buffer));
  turnout_buffer_info info = {.struct_size = sizeof info};
  CHECK_OK(turnout_buffer_get_info(buffer, &info));
  size_t required = 0;
  CHECK_OK(turnout_required_bytes(&config, 2, &required));
  CHECK(info.num_bytes == required && info.num_local_experts == 2 && *info.status_word == 0);

  problem p;
  make_problem(&p, who.rank);
  turnout_dispatch_result* got = NULL;
  CHECK_OK(turnout_dispatch(buffer, &p.args, &got));
  turnout_dispatch_view view = {.struct_size = sizeof view};
  CHECK_OK(turnout_dispatch_result_view(got, &view));
  CHECK(view.x.shape[0] == 6 && view.num_side == 1 && *(const int64_t*)view.num_rows.data == 6);
  turnout_handle* handle = NULL;
  CHECK_OK(turnout_dispatch_result_handle(got, &handle));
  turnout_handle_info routing = {.struct_size = sizeof routing};
  CHECK_OK(turnout_handle_get_info(handle, &routing));
  CHECK(routing.num_tokens == kTokens && routing.num_topk == kTopk && routing.num_rows == 6 && routing.layout == TURNOUT_EXPERT_MAJOR);
  run_experts(&view, who.rank);
  turnout_combine_args back = combine_of(&view, handle);
  turnout_combine_result* sums = NULL;
  CHECK_OK(turnout_combine(buffer, &back, &sums));
  turnout_combine_view sum_view = {.struct_size = sizeof sum_view};
  CHECK_OK(turnout_combine_result_view(sums, &sum_view));
  check_sums(&sum_view.x, who.rank);
  turnout_combine_result_destroy(sums);
  CHECK_OK(turnout_dispatch_result_release(got));
  CHECK_OK(turnout_dispatch_result_release(got));
  turnout_dispatch_result_destroy(got);

  memset(&p.args.topk_idx, 0, sizeof p.args.topk_idx);
  memset(&p.args.topk_weights, 0, sizeof p.args.topk_weights);
  p.args.handle = handle;
  p.args.receive = TURNOUT_RESIDENT;
  turnout_pending_dispatch* pending = NULL;
  CHECK_OK(turnout_dispatch_async(buffer, &p.args, &pending));
  turnout_handle* kept = NULL;
  turnout_tensor arrived;
  CHECK_OK(turnout_dispatch_arrived(pending, &arrived));
  CHECK(arrived.dtype == TURNOUT_I64 && arrived.shape[0] == 2);
  CHECK_OK(turnout_dispatch_wait(pending, &got));
  CHECK_OK(turnout_dispatch_result_handle(got, &kept));
  turnout_dispatch_result* twice = got;
  CHECK_SAYS(turnout_dispatch_wait(pending, &twice), TURNOUT_INVALID_ARGUMENT, "waited for already");
  CHECK(twice == NULL);
  turnout_pending_dispatch_destroy(pending);
  CHECK_OK(turnout_dispatch_result_view(got, &view));
  run_experts(&view, who.rank);
  turnout_pending_combine* pending_sums = NULL;
  back = combine_of(&view, handle);
  CHECK_OK(turnout_combine_async(buffer, &back, &pending_sums));
  turnout_handle_destroy(handle); /* the call keeps what it needs */
  CHECK_OK(turnout_combine_wait(pending_sums, &sums));
  turnout_pending_combine_destroy(pending_sums);
  CHECK_OK(turnout_combine_result_view(sums, &sum_view));
  check_sums(&sum_view.x, who.rank);

  CHECK_OK(turnout_buffer_synchronize(buffer));
  CHECK_OK(turnout_buffer_check(buffer));
  CHECK_OK(turnout_buffer_close(buffer));
  CHECK_SAYS(turnout_buffer_check(buffer), TURNOUT_INVALID_ARGUMENT, "closed");
  turnout_buffer_destroy(buffer);
  turnout_combine_result_destroy(sums); /* results and handles outlive their buffer */
  turnout_dispatch_result_destroy(got);
  turnout_handle_destroy(kept);
  return TURNOUT_OK;
}

/* What rank 0 gets wrong is refused on both ranks, and the next call is good: the ranks stay together. */
static turnout_status refusals(turnout_communicator* communicator, void* context) {
  (void)context;
  turnout_communicator_info who = {.struct_size = sizeof who};
  CHECK_OK(turnout_communicator_get_info(communicator, &who));
  turnout_buffer_config config = small_config();
  turnout_buffer* buffer = NULL;
  if (who.rank == 0) config.dtype = 99;
  CHECK_SAYS(turnout_buffer_create(communicator, &config, NULL, &buffer), TURNOUT_INVALID_ARGUMENT, who.rank == 0 ? "config.dtype is 99" : "rank 0");
  CHECK(buffer == NULL);
  config = small_config();
  CHECK_OK(turnout_buffer_create(communicator, &config, NULL, &buffer));
  turnout_dispatch_result* got = NULL;
  const char* const words[] = {"topk_idx[1][0] is 11", "layout is 7", "x.dtype is -3", "struct_size is 0", "fields that this library"};
  struct {
    turnout_dispatch_args args;
    int newer;
  } larger;
  for (int wrong = 0; wrong < 5; ++wrong) {
    problem p;
    make_problem(&p, who.rank);
    const turnout_dispatch_args* args = &p.args;
    if (who.rank == 0) {
      if (wrong == 0) p.experts[2] = kExperts + 7;
      if (wrong == 1) p.args.layout = 7;
      if (wrong == 2) p.args.x.dtype = -3;
      if (wrong == 3) p.args.struct_size = 0;
      if (wrong == 4) {
        memset(&larger, 0, sizeof larger);
        larger.args = p.args;
        larger.args.struct_size = sizeof larger;
        larger.newer = 1;
        args = &larger.args;
      }
    }
    CHECK_SAYS(turnout_dispatch(buffer, args, &got), TURNOUT_INVALID_ARGUMENT, who.rank == 0 ? words[wrong] : "rank 0");
    CHECK(got == NULL && turnout_last_wait_record() == NULL);
  }
  problem p;
  make_problem(&p, who.rank);
  p.args.struct_size = offsetof(turnout_dispatch_args, on_failure); /* an older header */
  CHECK_OK(turnout_dispatch(buffer, &p.args, &got));
  turnout_dispatch_result_destroy(got);
  CHECK_SAYS(turnout_dispatch(NULL, &p.args, &got), TURNOUT_INVALID_ARGUMENT, "buffer is null");
  turnout_buffer_destroy(buffer);
  return TURNOUT_OK;
}

/* Rank 1 never calls: rank 0 gives up, its buffer stays aborted, recover() ends that, and both go on. */
static turnout_status patience(turnout_communicator* communicator, void* context) {
  (void)context;
  turnout_communicator_info who = {.struct_size = sizeof who};
  CHECK_OK(turnout_communicator_get_info(communicator, &who));
  turnout_buffer_config config = small_config();
  config.busy_timeout_ms = who.rank == 0 ? 50 : 60000;
  turnout_buffer* buffer = NULL;
  CHECK_OK(turnout_buffer_create(communicator, &config, NULL, &buffer));
  turnout_buffer_info info = {.struct_size = sizeof info};
  CHECK_OK(turnout_buffer_get_info(buffer, &info));
  problem p;
  make_problem(&p, who.rank);
  turnout_dispatch_result* got = NULL;
  if (who.rank == 0) {
    CHECK_SAYS(turnout_dispatch(buffer, &p.args, &got), TURNOUT_PEER_TIMEOUT, "rank 1");
    const turnout_wait_record* record = turnout_last_wait_record();
    CHECK(record && record->rank == 0 && record->num_peers == 1 && record->peers[0] == 1 && record->epoch == 1);
    CHECK(strcmp(record->call, "dispatch") == 0 && strcmp(record->phase, "header") == 0 && strcmp(record->peer_state, "busy") == 0);
    CHECK(*info.status_word != 0);
    CHECK(turnout_buffer_check(buffer) == TURNOUT_PEER_TIMEOUT);
  }
  CHECK_OK(turnout_buffer_recover(buffer));
  CHECK(*info.status_word == 0);
  CHECK_OK(turnout_communicator_barrier(communicator));
  turnout_buffer_destroy(buffer);
  return TURNOUT_OK;
}

/* Rank 1 destroys its Buffer and leaves: rank 0 learns that it has closed. */
static turnout_status departure(turnout_communicator* communicator, void* context) {
  (void)context;
  turnout_communicator_info who = {.struct_size = sizeof who};
  CHECK_OK(turnout_communicator_get_info(communicator, &who));
  const turnout_buffer_config config = small_config();
  turnout_buffer* buffer = NULL;
  CHECK_OK(turnout_buffer_create(communicator, &config, NULL, &buffer));
  if (who.rank == 0) {
    problem p;
    make_problem(&p, 0);
    turnout_dispatch_result* got = NULL;
    CHECK_SAYS(turnout_dispatch(buffer, &p.args, &got), TURNOUT_PEER_FAILED, "rank 1");
    CHECK(turnout_last_wait_record() && strcmp(turnout_last_wait_record()->peer_state, "closed") == 0);
  }
  turnout_buffer_destroy(buffer);
  return TURNOUT_OK;
}

/* A store of the caller's: one key, which is enough for one rank and too few to answer when it is told to fail. */
typedef struct tiny_store {
  char keys[64][128];
  unsigned char values[64][256];
  size_t sizes[64], num_keys;
  int fails;
} tiny_store;
static turnout_status tiny_set(void* context, const char* key, const void* data, size_t num_bytes) {
  tiny_store* store = context;
  if (store->fails || store->num_keys == 64 || num_bytes > 256 || strlen(key) > 127) return TURNOUT_OTHER;
  strcpy(store->keys[store->num_keys], key);
  if (num_bytes > 0) memcpy(store->values[store->num_keys], data, num_bytes);
  store->sizes[store->num_keys++] = num_bytes;
  return TURNOUT_OK;
}
static turnout_status tiny_get(void* context, const char* key, int64_t timeout_ms, turnout_bytes* value) {
  tiny_store* store = context;
  (void)timeout_ms;
  for (size_t i = store->num_keys; i-- > 0;) {
    if (strcmp(store->keys[i], key) == 0) return turnout_bytes_assign(value, store->values[i], store->sizes[i]);
  }
  return TURNOUT_OK;
}

static void* no_memory(void* context, size_t num_bytes) {
  (void)num_bytes;
  ++*(int*)context;
  return NULL;
}
static void forget(void* context, void* data, size_t num_bytes) {
  (void)context;
  (void)num_bytes;
  free(data);
}

/* One rank over callbacks; an allocator without memory; a store that fails. */
static void check_callbacks(void) {
  tiny_store memory;
  memset(&memory, 0, sizeof memory);
  turnout_store_callbacks callbacks = {.struct_size = sizeof callbacks, .context = &memory, .set = tiny_set, .get = tiny_get};
  turnout_store* store = NULL;
  CHECK_OK(turnout_store_from_callbacks(&callbacks, &store));
  const turnout_communicator_options options = {.struct_size = sizeof options, .transport = "inproc", .timeout_ms = 5000};
  turnout_communicator* communicator = NULL;
  CHECK_OK(turnout_communicator_from_store(store, 0, 1, NULL, &options, &communicator));
  const int32_t mine = 7;
  int32_t all = 0;
  CHECK_OK(turnout_communicator_all_gather(communicator, &mine, sizeof mine, &all));
  CHECK(all == 7);

  const turnout_buffer_config config = small_config();
  int times = 0;
  const turnout_allocator none = {.struct_size = sizeof none, .context = &times, .allocate = no_memory, .deallocate = forget};
  turnout_buffer* buffer = NULL;
  CHECK_OK(turnout_buffer_create(communicator, &config, &none, &buffer));
  problem p;
  make_problem(&p, 0);
  p.args.result = TURNOUT_RESULT_FRESH;
  turnout_dispatch_result* got = NULL;
  CHECK_SAYS(turnout_dispatch(buffer, &p.args, &got), TURNOUT_TRANSPORT_ERROR, "memory");
  CHECK(times > 0);
  turnout_buffer_destroy(buffer);
  turnout_communicator_destroy(communicator);

  memory.fails = 1;
  CHECK_SAYS(turnout_communicator_from_store(store, 0, 2, NULL, &options, &communicator), TURNOUT_TRANSPORT_ERROR, "callback set");
  CHECK(communicator == NULL);
  turnout_store_destroy(store);
}

static turnout_status two_fail(turnout_communicator* communicator, void* context) {
  turnout_communicator_info who = {.struct_size = sizeof who};
  CHECK_OK(turnout_communicator_get_info(communicator, &who));
  if (who.rank == 1) return turnout_required_bytes(context, 2, NULL);
  return TURNOUT_OK;
}

int main(void) {
  CHECK(strcmp(turnout_last_error(), "") == 0 && turnout_last_wait_record() == NULL);
  CHECK(strcmp(turnout_version(), "0.1.0") == 0);
  CHECK(strcmp(turnout_status_name(TURNOUT_PEER_FAILED), "PEER_FAILED") == 0);
  CHECK_OK(turnout_run_virtual_ranks(2, layer, NULL, NULL));
  CHECK_OK(turnout_run_virtual_ranks(2, refusals, NULL, NULL));
  CHECK_OK(turnout_run_virtual_ranks(2, patience, NULL, NULL));
  CHECK_OK(turnout_run_virtual_ranks(2, departure, NULL, NULL));
  check_callbacks();
  /* The words of a rank's failure reach the caller of run_virtual_ranks. */
  CHECK_SAYS(turnout_run_virtual_ranks(3, two_fail, NULL, NULL), TURNOUT_INVALID_ARGUMENT, "config is null");
  CHECK_SAYS(turnout_run_virtual_ranks(0, layer, NULL, NULL), TURNOUT_INVALID_ARGUMENT, "num_ranks is 0");
  turnout_communicator* communicator = NULL;
  const turnout_communicator_options unknown = {.struct_size = sizeof unknown, .transport = "pigeon"};
  CHECK(turnout_communicator_from_env(&unknown, &communicator) != TURNOUT_OK);
  CHECK(strstr(turnout_last_error(), "pigeon") != NULL && communicator == NULL);
  CHECK_OK(turnout_communicator_from_env(NULL, &communicator));
  turnout_communicator_destroy(communicator);
  puts("c_api_test: all good");
  return 0;
}
