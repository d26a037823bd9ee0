/* Owns the engine "composed": the layer as people write it on a plain BLAS, with every head's full
 * score matrix in memory. */
#include "engines.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct composed_state {
  const bench_problem *problem;
  float *q, *k, *v, *concat; /* [B][L][E] each */
  float *scores;             /* [H][L][L], one batch entry at a time */
} composed_state;

static size_t score_count(const bench_problem *problem) {
  const bench_shape *shape = &problem->shape;
  return (size_t)shape->heads * (size_t)shape->length * (size_t)shape->length;
}

static size_t bytes(const void *state, int thread_index) {
  (void)thread_index;
  return score_count(((const composed_state *)state)->problem) * sizeof(float);
}

static double needs(const bench_problem *problem) {
  const double rows = 4.0 * (double)problem->rows * (double)problem->shape.width;
  return (rows + (double)score_count(problem)) * (double)sizeof(float);
}

static void destroy(void *state) {
  composed_state *composed = state;
  if (!composed)
    return;
  free(composed->q);
  free(composed->k);
  free(composed->v);
  free(composed->concat);
  free(composed->scores);
  free(composed);
}

static void *create(const bench_problem *problem, const bench_type *type) {
  (void)type;
  composed_state *composed = bench_zeroed(sizeof *composed);
  if (!composed)
    return NULL;
  const size_t n = (size_t)problem->rows * (size_t)problem->shape.width;
  composed->problem = problem;
  composed->q = bench_floats(n);
  composed->k = bench_floats(n);
  composed->v = bench_floats(n);
  composed->concat = bench_floats(n);
  composed->scores = bench_floats(score_count(problem));
  if (composed->q && composed->k && composed->v && composed->concat && composed->scores)
    return composed;
  destroy(composed);
  return NULL;
}

void bench_project(const bench_problem *problem, const bench_weights *weights, int which,
                   int64_t rows, const float *x, float *y, int64_t y_stride) {
  const int width = (int)problem->shape.width;
  const int columns = (int)bench_projected_width(&problem->shape, which);
  const enum CBLAS_TRANSPOSE orientation = problem->options->out_in ? CblasTrans : CblasNoTrans;
  for (int64_t i = 0; i < rows; i++)
    memcpy(y + i * y_stride, weights->biases[which], (size_t)columns * sizeof *y);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, orientation, (int)rows, columns, width, 1.0f, x, width,
              weights->matrices[which], problem->options->out_in ? width : columns, 1.0f, y,
              (int)y_stride);
}

static void hide_future(float *scores, int64_t length) {
  for (int64_t i = 0; i < length; i++)
    for (int64_t j = i + 1; j < length; j++)
      scores[i * length + j] = -INFINITY;
}

static void hide_masked(float *scores, const uint8_t *mask, int64_t length) {
  for (int64_t at = 0; at < length * length; at++)
    if (!mask[at])
      scores[at] = -INFINITY;
}

void bench_softmax(float *scores, int64_t n_rows, int64_t n) {
  for (int64_t i = 0; i < n_rows; i++) {
    float *row = scores + i * n;
    float largest = row[0];
    for (int64_t j = 1; j < n; j++)
      largest = row[j] > largest ? row[j] : largest;
    float sum = 0.0f;
    for (int64_t j = 0; j < n; j++) {
      row[j] = expf(row[j] - largest);
      sum += row[j];
    }
    const float factor = 1.0f / sum;
    for (int64_t j = 0; j < n; j++)
      row[j] *= factor;
  }
}

void bench_attend(const bench_problem *problem, const float *q, const float *k, const float *v,
                  float *scores, float *concat) {
  const bench_shape *shape = &problem->shape;
  const int length = (int)shape->length;
  const int width = (int)shape->width;
  const int size = (int)(shape->width / shape->heads);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, length, length, size,
              1.0f / sqrtf((float)size), q, width, k, width, 0.0f, scores, length);
  if (shape->causal)
    hide_future(scores, length);
  if (problem->mask)
    hide_masked(scores, problem->mask, length);
  bench_softmax(scores, length, length);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, length, size, length, 1.0f, scores, length,
              v, width, 0.0f, concat, width);
}

static bool run(void *state, int thread_index, int64_t call) {
  const composed_state *composed = state;
  const bench_problem *problem = composed->problem;
  const bench_shape *shape = &problem->shape;
  const bench_weights *weights = bench_problem_set(problem, call);
  (void)thread_index;
  bench_project(problem, weights, 0, problem->rows, problem->input, composed->q, shape->width);
  bench_project(problem, weights, 1, problem->rows, problem->input, composed->k, shape->width);
  bench_project(problem, weights, 2, problem->rows, problem->input, composed->v, shape->width);
  for (int64_t b = 0; b < shape->batch; b++)
    for (int64_t h = 0; h < shape->heads; h++) {
      const int64_t at = b * shape->length * shape->width + h * (shape->width / shape->heads);
      bench_attend(problem, composed->q + at, composed->k + at, composed->v + at,
                   composed->scores + h * shape->length * shape->length, composed->concat + at);
    }
  bench_project(problem, weights, 3, problem->rows, composed->concat, problem->output,
                shape->width);
  return true;
}

const bench_engine bench_composed = {
    .name = "composed",
    .computes_layer = true,
    .calls_blas = true,
    .needs = needs,
    .create = create,
    .run = run,
    .bytes = bytes,
    .destroy = destroy,
};
