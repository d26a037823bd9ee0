/* Owns the yardsticks: the bare product and the plain memory read. */
#include "engines.h"

#include <cblas.h>
#include <stdlib.h>

/* ---- sgemm: C = A·B, n × n each ---- */

typedef struct sgemm_state {
  int n;
  float *a, *b, *c;
} sgemm_state;

static double sgemm_flops(const bench_problem *problem) {
  const double n = (double)problem->options->yardstick;
  return 2 * n * n * n;
}

static void sgemm_destroy(void *opaque) {
  sgemm_state *state = opaque;
  if (!state)
    return;
  free(state->a);
  free(state->b);
  free(state->c);
  free(state);
}

static void *sgemm_create(const bench_problem *problem, const bench_type *type) {
  (void)type;
  sgemm_state *state = bench_zeroed(sizeof *state);
  if (!state)
    return NULL;
  const size_t n = (size_t)problem->options->yardstick;
  state->n = (int)n;
  state->a = bench_floats(n * n);
  state->b = bench_floats(n * n);
  state->c = bench_floats(n * n);
  if (!state->a || !state->b || !state->c) {
    sgemm_destroy(state);
    return NULL;
  }
  for (size_t i = 0; i < n * n; i++) {
    state->a[i] = (float)(i % 17) - 8.0f;
    state->b[i] = (float)(i % 13) - 6.0f;
    state->c[i] = 0.0f;
  }
  return state;
}

static bool sgemm_run(void *opaque, int thread_index, int64_t call) {
  const sgemm_state *state = opaque;
  const int n = state->n;
  (void)thread_index;
  (void)call;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0f, state->a, n, state->b, n,
              0.0f, state->c, n);
  return true;
}

const bench_engine bench_sgemm = {
    .name = "sgemm",
    .calls_blas = true,
    .flops = sgemm_flops,
    .create = sgemm_create,
    .run = sgemm_run,
    .destroy = sgemm_destroy,
};

/* ---- read: the weights and what is cached, once, as fast as loads go ---- */

#define ACCUMULATORS 16

typedef struct read_state {
  const bench_problem *problem;
  size_t n_bytes;         /* as many as a set of the type has, from the begin of a set on */
  volatile uint64_t sink; /* keeps the loop alive */
} read_state;

static uint64_t sum_words(const uint64_t *words, size_t n) {
  uint64_t sums[ACCUMULATORS] = {0};
  size_t i = 0;
  for (; i + ACCUMULATORS <= n; i += ACCUMULATORS)
    for (size_t lane = 0; lane < ACCUMULATORS; lane++)
      sums[lane] += words[i + lane];
  uint64_t sum = 0;
  for (; i < n; i++)
    sum += words[i];
  for (size_t lane = 0; lane < ACCUMULATORS; lane++)
    sum += sums[lane];
  return sum;
}

static double read_flops(const bench_problem *problem) {
  (void)problem;
  return 0;
}

static void *read_create(const bench_problem *problem, const bench_type *type) {
  read_state *state = bench_zeroed(sizeof *state);
  if (!state)
    return NULL;
  state->problem = problem;
  state->n_bytes = bench_problem_type_bytes(problem, type);
  return state;
}

/* Each thread reads one stretch, a multiple of a cache line. */
static bool read_run(void *opaque, int thread_index, int64_t call) {
  read_state *state = opaque;
  const int n_threads = state->problem->options->threads[thread_index];
  const void *block = bench_problem_set(state->problem, call)->block;
  const uint64_t *words = block;
  const size_t n = state->n_bytes / sizeof *words;
  const size_t share = (n + (size_t)n_threads - 1) / (size_t)n_threads;
  const size_t stretch = (share + 7) / 8 * 8;
  uint64_t sum = 0;
#pragma omp parallel for num_threads(n_threads) schedule(static, 1) reduction(+ : sum)
  for (int i = 0; i < n_threads; i++) {
    const size_t first = (size_t)i * stretch < n ? (size_t)i * stretch : n;
    sum += sum_words(words + first, n - first < stretch ? n - first : stretch);
  }
  state->sink = sum;
  return true;
}

const bench_engine bench_read = {
    .name = "read",
    .has_types = true,
    .rotating_only = true,
    .flops = read_flops,
    .create = read_create,
    .run = read_run,
    .destroy = free,
};
