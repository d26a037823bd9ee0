/* The engines that take turns, and the naive one, which runs once. */
#ifndef MHA_BENCH_ENGINES_H
#define MHA_BENCH_ENGINES_H

#include "problem.h"

/* What a row of the table measures. Without --backward all are BENCH_FORWARD. */
typedef enum bench_pass { BENCH_FORWARD, BENCH_KEEP, BENCH_BACKWARD, BENCH_N_PASSES } bench_pass;

typedef struct bench_engine {
  const char *name;
  bool computes_layer;   /* false: a yardstick, which leaves problem->output alone */
  bool calls_blas;       /* runs with the BLAS's own thread count set to the row's */
  bool can_be_disturbed; /* measured also beside another process, if asked for */
  bool (*is_here)(void); /* whether this build has it; NULL = always */
  bool has_types;        /* has a row for each type, others for float32 alone */
  bool rotating_only;    /* makes sense only where every weight is used about once */
  /* Floating-point operations of a call; NULL = bench_flops of the shape. */
  double (*flops)(const bench_problem *problem);
  /* Bytes that create takes beside the problem's; NULL = not worth asking. */
  double (*needs)(const bench_problem *problem);
  /* NULL after a message on stderr. */
  void *(*create)(const bench_problem *problem, const bench_type *type);
  /* One call with options->threads[thread_index] threads; the call-th set of weights is used.
   * False after a message on stderr. */
  bool (*run)(void *state, int thread_index, int64_t call);
  /* The same, keeping what backward needs; NULL = no --backward. */
  bool (*keep)(void *state, int thread_index);
  /* Everything in problem->gradients, for problem->d_output and what keep has kept, which stays as
   * it is, with whatever number of threads it was made. */
  bool (*backward)(void *state, int thread_index);
  size_t (*kept_bytes)(const void *state);
  /* Bytes that the engine is to be blamed for; NULL = none. */
  size_t (*bytes)(const void *state, int thread_index);
  void (*destroy)(void *state); /* accepts NULL */
} bench_engine;

extern const bench_engine bench_sgemm;             /* bare n³ product: 100 percent */
extern const bench_engine bench_read;              /* plain read of a set */
extern const bench_engine bench_composed;          /* four sgemm, and two and a softmax per head */
extern const bench_engine bench_composed_cached;   /* the same over a cache, two sgemv per head */
extern const bench_engine bench_libmha;            /* with and without a cache */
extern const bench_engine bench_xsmm;              /* the same with MHA_ENGINE_XSMM */
extern const bench_engine bench_composed_backward; /* composed forth and back, probabilities kept */
extern const bench_engine bench_libmha_backward;   /* mha_forward with a tape and mha_backward */

/* mha_forward over a cache: the first without pages, then pages of 16, 64 and 256 tokens anywhere
 * in their pool, then in order. */
#define BENCH_N_PAGES 7
extern const bench_engine bench_pages[BENCH_N_PAGES];

/* y = x·W + b for `rows` rows of x [rows][E], through one sgemm; which is 0 to 3, and the rows of
 * y are `y_stride` numbers apart. */
void bench_project(const bench_problem *problem, const bench_weights *weights, int which,
                   int64_t rows, const float *x, float *y, int64_t y_stride);

/* One head of one batch entry; q, k, v and concat point to its first elements, [L][d] with rows E
 * apart. `scores` [L][L] receives the probabilities. */
void bench_attend(const bench_problem *problem, const float *q, const float *k, const float *v,
                  float *scores, float *concat);

/* Softmax of each of `n_rows` rows of n numbers, in place. */
void bench_softmax(float *scores, int64_t n_rows, int64_t n);

/* What the naive engine did. */
typedef struct bench_naive_result {
  double seconds;    /* of the whole layer */
  bool extrapolated; /* only sampled rows were computed */
  int64_t n_rows;    /* sampled rows */
  int64_t *rows;     /* their indices */
  float *output;     /* [n_rows][E] */
} bench_naive_result;

/* False after a message on stderr. Destroy the result in either case. */
bool bench_naive_run(const bench_problem *problem, bench_naive_result *result);

void bench_naive_destroy(bench_naive_result *result);

#endif
