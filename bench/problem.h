/* One shape's buffers, shared by all engines. */
#ifndef MHA_BENCH_PROBLEM_H
#define MHA_BENCH_PROBLEM_H

#include "options.h"

/* One copy of a layer: a single block, so that it can be read from end to end. */
typedef struct bench_weights {
  float *block;
  const float *matrices[4]; /* query, key, value, output: E×E, orientation as the options say */
  const float *biases[4];   /* E each */
} bench_weights;

typedef struct bench_problem {
  const bench_options *options;
  bench_shape shape;
  int64_t rows;   /* B·Lq */
  float *input;   /* [B][Lq][E] */
  float *output;  /* [B][Lq][E] */
  int64_t n_sets; /* copies of the layer: more than one only for a single row, so that each
                     call finds its weights in memory rather than in a cache */
  bench_weights *sets;
  size_t set_bytes; /* of one block */
} bench_problem;

/* False after a message on stderr. Destroy it in either case. */
bool bench_problem_create(const bench_options *options, const bench_shape *shape,
                          bench_problem *problem);

void bench_problem_destroy(bench_problem *problem);

/* The set of the call-th call. */
const bench_weights *bench_problem_set(const bench_problem *problem, int64_t call);

/* 64-byte aligned memory for n floats; NULL after a message on stderr. free() it. */
float *bench_floats(size_t n);

/* Zeroed memory; NULL after a message on stderr. free() it. */
void *bench_zeroed(size_t bytes);

#endif
