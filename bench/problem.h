/* One shape's buffers, shared by all engines. */
#ifndef MHA_BENCH_PROBLEM_H
#define MHA_BENCH_PROBLEM_H

#include "options.h"

/* One copy of a layer and of what its cache holds: a single block, so that all that a call must
 * touch can be read from end to end. */
typedef struct bench_weights {
  float *block;
  const float *matrices[4]; /* query, key, value, output: E×bench_projected_width, orientation as
                               the options say */
  const float *biases[4];   /* bench_projected_width each */
  float *keys, *values;     /* [B][past+Lq][G·d] with past rows filled; NULL where past is 0 */
} bench_weights;

/* The gradient of everything that a layer is made of, in one block of n floats. */
typedef struct bench_gradients {
  float *block;
  size_t n;
  float *input;       /* [B][Lq][E], of all that the input serves as */
  float *matrices[4]; /* as in bench_weights */
  float *biases[4];
} bench_gradients;

typedef struct bench_problem {
  const bench_options *options;
  bench_shape shape;
  int64_t rows;              /* B·Lq */
  float *input;              /* [B][Lq][E] */
  float *output;             /* [B][Lq][E] */
  uint8_t *mask;             /* [Lq][Lq], 0 = hidden; NULL if the shape has none */
  float *d_output;           /* [B][Lq][E], given; NULL without --backward */
  bench_gradients gradients; /* wanted; without --backward there is no block */
  bool rotates;   /* every weight is used once, or about once: a single row, or a cache */
  int64_t n_sets; /* copies of the layer: more than one only where rotates is set, so that each
                     call finds its set in memory rather than in a cache of the CPU. Never with
                     --backward */
  bench_weights *sets;
  size_t set_bytes; /* of one block */
} bench_problem;

/* False after a message on stderr. Destroy it in either case. */
bool bench_problem_create(const bench_options *options, const bench_shape *shape,
                          bench_problem *problem);

/* Bytes of a set with its numbers stored so. */
size_t bench_problem_type_bytes(const bench_problem *problem, const bench_type *type);

void bench_problem_destroy(bench_problem *problem);

/* The set of the call-th call. */
const bench_weights *bench_problem_set(const bench_problem *problem, int64_t call);

/* 64-byte aligned memory for n floats; NULL after a message on stderr. free() it. */
float *bench_floats(size_t n);

/* Zeroed memory; NULL after a message on stderr. free() it. */
void *bench_zeroed(size_t bytes);

#endif
