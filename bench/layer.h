/* What the engines of libmha are made of. */
#ifndef MHA_BENCH_LAYER_H
#define MHA_BENCH_LAYER_H

#include "engines.h"
#include "mha.h"
#include "problem.h"
#include "status.h"

/* How a layer computes and how its caches keep their tokens. */
typedef struct bench_layer_plan {
  mha_engine_choice choice;
  bool cached;
  int64_t page_tokens; /* 0 = no pages */
  bool scattered;      /* neighbours of an entry lie anywhere in the pool, as in one long in use */
} bench_layer_plan;

/* mha_forward through the public header: an engine's state. */
typedef struct bench_layer {
  const bench_problem *problem;
  const bench_type *type;
  bench_layer_plan plan;
  mha_weights **layers;                     /* [n_sets] */
  mha_cache **caches;                       /* [n_sets]; NULL without caches */
  mha_context *contexts[BENCH_MAX_THREADS]; /* one for each thread count */
  size_t workspace[BENCH_MAX_THREADS];
  mha_rules rules;
  mha_forward_args args;
} bench_layer;

/* The functions of an engine that computes by a plan, as bench_engine wants them. NULL if the state
 * cannot be made, after a message on stderr. */
void *bench_layer_start(const bench_problem *problem, const bench_type *type,
                        bench_layer_plan plan);
bool bench_layer_run(void *opaque, int thread_index, int64_t call);
size_t bench_layer_bytes(const void *opaque, int thread_index);
void bench_layer_destroy(void *opaque);

/* A cache by the state's plan, of as many tokens as the shape has; empty. */
bool bench_layer_create_pages(const bench_layer *state, mha_cache **cache);

/* A layer that borrows the matrices of a set, or has copies of its own: of another type, or with
 * MHA_PACK_WEIGHTS in flags. False after a message on stderr. mha_weights_destroy it in either
 * case. */
bool bench_layer_create(const bench_problem *problem, const bench_weights *set,
                        const bench_type *type, uint32_t flags, mha_weights **layer);

/* The past tokens of a cache among keys or values of a set, [B][past+Lq][G·d]. */
mha_tensor bench_layer_past(const bench_shape *shape, const float *rows);

/* The call of mha_forward, without a cache; args refers to rules. */
void bench_layer_describe(const bench_problem *problem, mha_rules *rules, mha_forward_args *args);

#endif
