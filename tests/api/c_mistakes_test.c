/* Wrong input through the C interface: each mistake of one rank is told to both, with words, and the buffer works after it. */
#include "c_job.h"

/* Says of one call what its rank 0 gets wrong. */
typedef struct mistake {
  const char* words;
  void (*make)(problem* p);
} mistake;
static void id_e(problem* p) { p->experts[2] = kExperts; }
static void id_minus_two(problem* p) { p->experts[2] = -2; }
static void id_of_64_bits(problem* p) {
  static int64_t wide[kTokens * kTopk];
  wide[0] = INT64_MIN;
  p->args.topk_idx = turnout_tensor_dense(wide, TURNOUT_I64, kTokens, kTopk);
}
static void id_two_to_31(problem* p) {
  static int64_t wide[kTokens * kTopk];
  wide[5] = (int64_t)1 << 31;
  p->args.topk_idx = turnout_tensor_dense(wide, TURNOUT_I64, kTokens, kTopk);
}
static void null_rows(problem* p) { p->args.x.data = NULL; }
static void odd_rows(problem* p) { p->args.x.data = (char*)p->args.x.data + 1; }
static void wrong_dtype(problem* p) { p->args.topk_weights.dtype = TURNOUT_I64; }
static void wrong_shape(problem* p) { p->args.topk_weights.shape[1] = 1; }
static void wrong_stride(problem* p) { p->args.x.strides[1] = 2; }
static void four_dimensions(problem* p) { p->args.x.ndim = 4; }
static void too_many_tokens(problem* p) { p->args.x.shape[0] = p->args.topk_idx.shape[0] = kTokens + 1; }
static void too_many_choices(problem* p) { p->args.topk_idx.shape[1] = kTopk + 1; }
static void negative_capacity(problem* p) {
  p->args.has_capacity = 1;
  p->args.capacity = -1;
}
static void half_a_capacity(problem* p) { p->args.capacity = 5; }
static void no_side(problem* p) { p->args.side = NULL; }
static void endless_side(problem* p) { p->args.num_side = SIZE_MAX; }
static void no_such_lane(problem* p) { p->args.lane = 3; }
static void on_a_gpu(problem* p) { p->args.x.device_kind = TURNOUT_CUDA; }
static void on_a_stream(problem* p) { p->args.stream = p; }
static void negative_sms(problem* p) { p->args.num_sms = -1; }

/* Mistakes of rank 0; both ranks are told, and the buffer works after each. Then calls at the wrong time. */
static turnout_status mistakes(turnout_communicator* communicator, void* context) {
  (void)context;
  static const mistake all[] = {{"topk_idx[1][0] is 4", id_e},
                                {"topk_idx[1][0] is -2", id_minus_two},
                                {"topk_idx[0][0] is -9223372036854775808", id_of_64_bits},
                                {"topk_idx[2][1] is 2147483648", id_two_to_31},
                                {"null data", null_rows},
                                {"not aligned", odd_rows},
                                {"topk_weights is i64", wrong_dtype},
                                {"topk_weights is", wrong_shape},
                                {"last stride 1", wrong_stride},
                                {"x.ndim is 4", four_dimensions},
                                {"at most 3", too_many_tokens},
                                {"topk_idx has 3 experts", too_many_choices},
                                {"capacity is -1", negative_capacity},
                                {"capacity is 5, but has_capacity is 0", half_a_capacity},
                                {"side is null", no_side},
                                {"num_side is", endless_side},
                                {"lane is 3", no_such_lane},
                                {"x is on cuda", on_a_gpu},
                                {"a stream is given", on_a_stream},
                                {"num_sms is -1", negative_sms}};
  turnout_communicator_info who = {.struct_size = sizeof who};
  CHECK_OK(turnout_communicator_get_info(communicator, &who));
  const turnout_buffer_config config = small_config();
  turnout_buffer *buffer = NULL, *other = NULL;
  CHECK_OK(turnout_buffer_create(communicator, &config, NULL, &buffer));
  CHECK_OK(turnout_buffer_create(communicator, &config, NULL, &other));
  problem p;
  turnout_dispatch_result* got = NULL;
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
    make_problem(&p, who.rank);
    if (who.rank == 0) all[i].make(&p);
    CHECK_SAYS(turnout_dispatch(buffer, &p.args, &got), TURNOUT_INVALID_ARGUMENT, who.rank == 0 ? all[i].words : "refused by rank 0");
  }
  /* All tokens to expert 0: 6 rows there, of which a capacity admits the first. */
  for (int64_t capacity = 0; capacity <= 6; capacity += capacity == 1 ? 4 : 1) {
    make_problem(&p, who.rank);
    for (int i = 0; i < kTokens * kTopk; ++i) p.experts[i] = i % kTopk == 0 ? 0 : -1;
    p.args.has_capacity = 1;
    p.args.capacity = capacity;
    CHECK_OK(turnout_dispatch(buffer, &p.args, &got));
    turnout_dispatch_view view = {.struct_size = sizeof view};
    CHECK_OK(turnout_dispatch_result_view(got, &view));
    CHECK(*(const int64_t*)view.num_rows.data == (who.rank == 0 ? capacity : 0));
    CHECK(*(const int64_t*)view.num_dropped.data == (who.rank == 0 ? 6 - capacity : 0));
    turnout_dispatch_result_destroy(got);
  }
  make_problem(&p, who.rank);
  CHECK_OK(turnout_dispatch(buffer, &p.args, &got));
  turnout_dispatch_view view = {.struct_size = sizeof view};
  CHECK_OK(turnout_dispatch_result_view(got, &view));
  turnout_handle* handle = NULL;
  CHECK_OK(turnout_dispatch_result_handle(got, &handle));
  turnout_combine_args back = combine_of(&view, handle);
  turnout_combine_result* sums = NULL;
  CHECK_SAYS(turnout_combine(other, &back, &sums), TURNOUT_INVALID_ARGUMENT, "another Buffer");
  back.stream = &p;
  CHECK_SAYS(turnout_combine(buffer, &back, &sums), TURNOUT_INVALID_ARGUMENT, "combine: a stream is given");
  back.stream = NULL;
  back.num_sms = -7;
  CHECK_SAYS(turnout_combine(buffer, &back, &sums), TURNOUT_INVALID_ARGUMENT, "combine: num_sms is -7");
  back.num_sms = 16; /* of no meaning on a CPU */
  CHECK_OK(turnout_combine(buffer, &back, &sums));
  turnout_combine_result_destroy(sums);
  sums = NULL;
  CHECK_OK(turnout_dispatch_result_release(got));
  CHECK_SAYS(turnout_combine(buffer, &back, &sums), TURNOUT_INVALID_ARGUMENT, "released");
  CHECK(sums == NULL);
  turnout_dispatch_result_destroy(got);
  turnout_pending_dispatch* pending = NULL;
  CHECK_OK(turnout_buffer_close(buffer));
  CHECK_SAYS(turnout_dispatch(buffer, &p.args, &got), TURNOUT_INVALID_ARGUMENT, "closed");
  CHECK_SAYS(turnout_dispatch_async(buffer, &p.args, &pending), TURNOUT_INVALID_ARGUMENT, "closed");
  CHECK_SAYS(turnout_combine(buffer, &back, &sums), TURNOUT_INVALID_ARGUMENT, "closed");
  CHECK(pending == NULL && got == NULL);
  turnout_buffer_destroy(buffer);
  CHECK_SAYS(turnout_combine(other, &back, &sums), TURNOUT_INVALID_ARGUMENT, "another Buffer (or one that is closed)");
  turnout_handle_destroy(handle);
  turnout_buffer_destroy(other);

  /* Which lane it was for cannot be read: with several, all stop until recover(). */
  turnout_buffer_config two_lanes = small_config();
  two_lanes.num_lanes = 2;
  CHECK_OK(turnout_buffer_create(communicator, &two_lanes, NULL, &buffer));
  make_problem(&p, who.rank);
  p.args.lane = 1;
  if (who.rank == 0) p.args.struct_size = 0;
  CHECK_SAYS(turnout_dispatch(buffer, &p.args, &got), TURNOUT_INVALID_ARGUMENT,
             who.rank == 0 ? "struct_size is 0" : "rank 0 aborted: dispatch: lane is -1");
  CHECK_OK(turnout_buffer_recover(buffer));
  make_problem(&p, who.rank);
  p.args.lane = 1;
  CHECK_OK(turnout_dispatch(buffer, &p.args, &got));
  turnout_dispatch_result_destroy(got);
  turnout_buffer_destroy(buffer);
  return TURNOUT_OK;
}

/* Devices that are none, and what only a GPU has. */
static turnout_status devices(turnout_communicator* communicator, void* context) {
  (void)context;
  turnout_communicator_info who = {.struct_size = sizeof who};
  CHECK_OK(turnout_communicator_get_info(communicator, &who));
  turnout_buffer* buffer = NULL;
  static const struct {
    int32_t kind, index;
    const char* words;
  } wrong[] = {{7, 0, "config.device_kind is 7"}, {TURNOUT_CPU, 3, "device.index is 3"}, {TURNOUT_CUDA, -1, "device.index is -1"}};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; ++i) {
    turnout_buffer_config config = small_config();
    if (who.rank == 0) config.device_kind = wrong[i].kind, config.device_index = wrong[i].index;
    CHECK_SAYS(turnout_buffer_create(communicator, &config, NULL, &buffer), TURNOUT_INVALID_ARGUMENT, who.rank == 0 ? wrong[i].words : "rank 0");
    CHECK(buffer == NULL);
  }
  /* One rank on a GPU and one not: a table. All on a GPU that no machine has: the reason. */
  turnout_buffer_config config = small_config();
  if (who.rank == 0) config.device_kind = TURNOUT_CUDA;
  CHECK_SAYS(turnout_buffer_create(communicator, &config, NULL, &buffer), TURNOUT_INVALID_ARGUMENT, "device");
  config.device_kind = TURNOUT_CUDA;
  config.device_index = 1000000;
  CHECK(turnout_buffer_create(communicator, &config, NULL, &buffer) == TURNOUT_TRANSPORT_ERROR && buffer == NULL);
  size_t on_gpu = 0, on_cpu = 0;
  CHECK_OK(turnout_required_bytes(&config, 2, &on_gpu));
  CHECK_SAYS(turnout_required_bytes(&config, 1000, &on_gpu), TURNOUT_INVALID_ARGUMENT, "at most 72 on GPUs");
  config = small_config();
  CHECK_OK(turnout_required_bytes(&config, 2, &on_cpu));
  CHECK(on_gpu != on_cpu);
  CHECK_OK(turnout_buffer_create(communicator, &config, NULL, &buffer));
  CHECK_SAYS(turnout_buffer_suspend(buffer), TURNOUT_INVALID_ARGUMENT, "on the CPU");
  CHECK_SAYS(turnout_buffer_resume(buffer), TURNOUT_INVALID_ARGUMENT, "on the CPU");
  CHECK_SAYS(turnout_buffer_suspend(NULL), TURNOUT_INVALID_ARGUMENT, "buffer is null");
  turnout_buffer_destroy(buffer);
  return TURNOUT_OK;
}

int main(void) {
  CHECK_OK(turnout_run_virtual_ranks(2, devices, NULL, NULL));
  CHECK_OK(turnout_run_virtual_ranks(2, mistakes, NULL, NULL));
  puts("c_mistakes_test: all good");
  return 0;
}
