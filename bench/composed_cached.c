/* Owns the engine "composed" for shapes with a cache: one token per call, as people write it on a
 * plain BLAS, over keys and values that lie token by token. */
#include "engines.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct cached_state {
  const bench_problem *problem;
  float *q, *concat; /* [B][E] each */
  float *scores;     /* [H][past+1], one batch entry at a time */
} cached_state;

static int64_t count_keys(const bench_shape *shape) {
  return shape->past + shape->length;
}

static size_t score_count(const bench_shape *shape) {
  return (size_t)(shape->heads * count_keys(shape));
}

static size_t bytes(const void *state, int thread_index) {
  (void)thread_index;
  return score_count(&((const cached_state *)state)->problem->shape) * sizeof(float);
}

static void destroy(void *opaque) {
  cached_state *state = opaque;
  if (!state)
    return;
  free(state->q);
  free(state->concat);
  free(state->scores);
  free(state);
}

static void *create(const bench_problem *problem, const bench_type *type) {
  (void)type;
  cached_state *state = bench_zeroed(sizeof *state);
  if (!state)
    return NULL;
  const size_t n = (size_t)problem->rows * (size_t)problem->shape.width;
  state->problem = problem;
  state->q = bench_floats(n);
  state->concat = bench_floats(n);
  state->scores = bench_floats(score_count(&problem->shape));
  if (state->q && state->concat && state->scores)
    return state;
  destroy(state);
  return NULL;
}

/* y = x·W + b: a vector's product for a single row, a matrix's for several. */
static void project(const bench_problem *problem, const bench_weights *set, int which,
                    const float *x, float *y, int64_t y_stride) {
  const int width = (int)problem->shape.width;
  const int columns = (int)bench_projected_width(&problem->shape, which);
  if (problem->rows > 1) {
    bench_project(problem, set, which, problem->rows, x, y, y_stride);
    return;
  }
  memcpy(y, set->biases[which], (size_t)columns * sizeof *y);
  if (problem->options->out_in)
    cblas_sgemv(CblasRowMajor, CblasNoTrans, columns, width, 1.0f, set->matrices[which], width, x,
                1, 1.0f, y, 1);
  else
    cblas_sgemv(CblasRowMajor, CblasTrans, width, columns, 1.0f, set->matrices[which], columns, x,
                1, 1.0f, y, 1);
}

/* One head of one batch entry: q, concat [d] are the head's own, keys, values [past+1][G·d] begin
 * at its column block. */
static void attend(const bench_shape *shape, const float *q, const float *keys, const float *values,
                   float *scores, float *concat) {
  const int n = (int)count_keys(shape);
  const int size = (int)(shape->width / shape->heads);
  const int row = (int)bench_projected_width(shape, 1);
  cblas_sgemv(CblasRowMajor, CblasNoTrans, n, size, 1.0f / sqrtf((float)size), keys, row, q, 1,
              0.0f, scores, 1);
  bench_softmax(scores, 1, n);
  cblas_sgemv(CblasRowMajor, CblasTrans, n, size, 1.0f, values, row, scores, 1, 0.0f, concat, 1);
}

static void attend_entry(const cached_state *state, const bench_weights *set, int64_t b) {
  const bench_shape *shape = &state->problem->shape;
  const int64_t size = shape->width / shape->heads;
  const int64_t entry = b * count_keys(shape) * bench_projected_width(shape, 1);
  for (int64_t h = 0; h < shape->heads; h++) {
    const int64_t group = h / (shape->heads / shape->kv_heads);
    const int64_t head = b * shape->width + h * size;
    const int64_t first = entry + group * size;
    attend(shape, state->q + head, set->keys + first, set->values + first,
           state->scores + h * count_keys(shape), state->concat + head);
  }
}

/* The new token's key and value go straight into the last row of the cache, over those of the
 * call before. */
static bool run(void *opaque, int thread_index, int64_t call) {
  const cached_state *state = opaque;
  const bench_problem *problem = state->problem;
  const bench_shape *shape = &problem->shape;
  const bench_weights *set = bench_problem_set(problem, call);
  const int64_t row = bench_projected_width(shape, 1);
  const int64_t entry = count_keys(shape) * row;
  (void)thread_index;
  project(problem, set, 0, problem->input, state->q, shape->width);
  project(problem, set, 1, problem->input, set->keys + shape->past * row, entry);
  project(problem, set, 2, problem->input, set->values + shape->past * row, entry);
  for (int64_t b = 0; b < shape->batch; b++)
    attend_entry(state, set, b);
  project(problem, set, 3, state->concat, problem->output, shape->width);
  return true;
}

const bench_engine bench_composed_cached = {
    .name = "composed",
    .computes_layer = true,
    .calls_blas = true,
    .create = create,
    .run = run,
    .bytes = bytes,
    .destroy = destroy,
};
