/* A small job for tests in C, and how they check. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "turnout/turnout.h"

enum { kHidden = 192, kTokens = 3, kTopk = 2, kExperts = 4 };

#define CHECK(condition)                                                                                              \
  do {                                                                                                                \
    if (!(condition)) {                                                                                               \
      fprintf(stderr, "%s:%d: not so: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, turnout_last_error()); \
      exit(1);                                                                                                        \
    }                                                                                                                 \
  } while (0)
#define CHECK_OK(call) CHECK((call) == TURNOUT_OK)
#define CHECK_SAYS(call, status, words)                   \
  do {                                                    \
    CHECK((call) == (status));                            \
    CHECK(strstr(turnout_last_error(), (words)) != NULL); \
  } while (0)

static inline turnout_buffer_config small_config(void) {
  turnout_buffer_config config;
  memset(&config, 0, sizeof config);
  config.struct_size = sizeof config;
  config.num_experts = kExperts;
  config.dtype = TURNOUT_FP32;
  config.hidden = kHidden;
  config.max_tokens_per_rank = kTokens;
  config.max_topk = kTopk;
  config.max_side_bytes = 16;
  return config;
}

/* Token t of rank r: row value 10 r + t + 1, experts t and 3 - t, weights 0.75 and 0.25. */
typedef struct problem {
  float x[kTokens * kHidden], weights[kTokens * kTopk];
  int32_t experts[kTokens * kTopk], side[kTokens];
  turnout_tensor side_tensor;
  turnout_dispatch_args args;
} problem;

static inline void make_problem(problem* p, int rank) {
  memset(p, 0, sizeof *p);
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kHidden; ++h) p->x[t * kHidden + h] = (float)(10 * rank + t + 1);
    p->experts[t * kTopk] = t;
    p->experts[t * kTopk + 1] = 3 - t;
    p->weights[t * kTopk] = 0.75f;
    p->weights[t * kTopk + 1] = 0.25f;
    p->side[t] = 1000 * rank + t;
  }
  p->side_tensor = turnout_tensor_dense(p->side, TURNOUT_I32, kTokens, 1);
  p->args.struct_size = sizeof p->args;
  p->args.x = turnout_tensor_dense(p->x, TURNOUT_FP32, kTokens, kHidden);
  p->args.topk_idx = turnout_tensor_dense(p->experts, TURNOUT_I32, kTokens, kTopk);
  p->args.topk_weights = turnout_tensor_dense(p->weights, TURNOUT_FP32, kTokens, kTopk);
  p->args.side = &p->side_tensor;
  p->args.num_side = 1;
  p->args.layout = TURNOUT_EXPERT_MAJOR;
}

static inline turnout_combine_args combine_of(const turnout_dispatch_view* view, const turnout_handle* handle) {
  turnout_combine_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.y = view->x;
  args.handle = handle;
  args.apply = TURNOUT_WEIGHTS_SOURCE;
  return args;
}
