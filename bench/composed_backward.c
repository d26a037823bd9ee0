/* Owns the engine "composed" of --backward: forth and back as people write it on a plain BLAS, with
 * the probabilities of all heads and entries kept in between. */
#include "engines.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* [B][L][E] each. */
enum { Q, K, V, CONCAT, D_Q, D_K, D_V, D_CONCAT, N_ROWS };

typedef struct composed_state {
  const bench_problem *problem;
  float *rows[N_ROWS];
  float *probabilities; /* [B][H][L][L] */
  float *d_scores;      /* [L][L], one head at a time */
} composed_state;

static size_t square(const bench_shape *shape) {
  return (size_t)shape->length * (size_t)shape->length;
}

static size_t row_floats(const bench_problem *problem) {
  return (size_t)problem->rows * (size_t)problem->shape.width;
}

static size_t kept_floats(const bench_problem *problem) {
  const bench_shape *shape = &problem->shape;
  return (size_t)(shape->batch * shape->heads) * square(shape) + D_Q * row_floats(problem);
}

static size_t scratch_floats(const bench_problem *problem) {
  return square(&problem->shape) + (N_ROWS - D_Q) * row_floats(problem);
}

static size_t kept_bytes(const void *state) {
  return kept_floats(((const composed_state *)state)->problem) * sizeof(float);
}

static size_t bytes(const void *state, int thread_index) {
  (void)thread_index;
  return scratch_floats(((const composed_state *)state)->problem) * sizeof(float);
}

static double needs(const bench_problem *problem) {
  return (double)sizeof(float) * ((double)kept_floats(problem) + (double)scratch_floats(problem));
}

static void destroy(void *opaque) {
  composed_state *state = opaque;
  if (!state)
    return;
  for (int i = 0; i < N_ROWS; i++)
    free(state->rows[i]);
  free(state->probabilities);
  free(state->d_scores);
  free(state);
}

static void *create(const bench_problem *problem, const bench_type *type) {
  (void)type;
  composed_state *state = bench_zeroed(sizeof *state);
  if (!state)
    return NULL;
  bool good = true;
  state->problem = problem;
  for (int i = 0; good && i < N_ROWS; i++)
    good = (state->rows[i] = bench_floats(row_floats(problem))) != NULL;
  state->probabilities =
      good ? bench_floats(kept_floats(problem) - D_Q * row_floats(problem)) : NULL;
  state->d_scores = good ? bench_floats(square(&problem->shape)) : NULL;
  if (state->probabilities && state->d_scores)
    return state;
  destroy(state);
  return NULL;
}

/* Offset of a head's first number in Q, K, V, concat and their gradients. */
static int64_t head_at(const bench_shape *shape, int64_t b, int64_t h) {
  return b * shape->length * shape->width + h * (shape->width / shape->heads);
}

static float *probabilities_of(const composed_state *state, int64_t b, int64_t h) {
  const bench_shape *shape = &state->problem->shape;
  return state->probabilities + (size_t)(b * shape->heads + h) * square(shape);
}

static bool keep(void *opaque, int thread_index) {
  const composed_state *state = opaque;
  const bench_problem *problem = state->problem;
  const bench_shape *shape = &problem->shape;
  const bench_weights *weights = bench_problem_set(problem, 0);
  (void)thread_index;
  for (int i = Q; i <= V; i++)
    bench_project(problem, weights, i, problem->rows, problem->input, state->rows[i], shape->width);
  for (int64_t b = 0; b < shape->batch; b++)
    for (int64_t h = 0; h < shape->heads; h++) {
      const int64_t at = head_at(shape, b, h);
      bench_attend(problem, state->rows[Q] + at, state->rows[K] + at, state->rows[V] + at,
                   probabilities_of(state, b, h), state->rows[CONCAT] + at);
    }
  bench_project(problem, weights, 3, problem->rows, state->rows[CONCAT], problem->output,
                shape->width);
  return true;
}

/* Back through projection `which` of x [rows][E] to y: dW = xᵀ·dy, db = Σ dy, dx = dy·Wᵀ + beta·dx.
 */
static void project_back(const bench_problem *problem, int which, const float *x, const float *dy,
                         float beta, float *dx) {
  const bench_gradients *gradients = &problem->gradients;
  const bool out_in = problem->options->out_in;
  const int rows = (int)problem->rows;
  const int width = (int)problem->shape.width;
  float *bias = gradients->biases[which];
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, width, width, rows, 1.0f, out_in ? dy : x,
              width, out_in ? x : dy, width, 0.0f, gradients->matrices[which], width);
  memset(bias, 0, (size_t)width * sizeof *bias);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t c = 0; c < width; c++)
      bias[c] += dy[i * width + c];
  cblas_sgemm(CblasRowMajor, CblasNoTrans, out_in ? CblasNoTrans : CblasTrans, rows, width, width,
              1.0f, dy, width, bench_problem_set(problem, 0)->matrices[which], width, beta, dx,
              width);
}

/* dS = P∘(dP − Σ_j P·dP) row by row, in place of dP. Where a key is hidden P is 0, and so is dS. */
static void softmax_back(const float *probabilities, float *d_scores, int64_t length) {
  for (int64_t i = 0; i < length; i++) {
    const float *p = probabilities + i * length;
    float *d = d_scores + i * length;
    const float mean = cblas_sdot((int)length, p, 1, d, 1);
    for (int64_t j = 0; j < length; j++)
      d[j] = p[j] * (d[j] - mean);
  }
}

/* dV = Pᵀ·dO, dP = dO·Vᵀ, dQ = scale·dS·K, dK = scale·dSᵀ·Q of one head, whose numbers begin `at`.
 */
static void attend_back(const composed_state *state, int64_t at, const float *probabilities) {
  const bench_shape *shape = &state->problem->shape;
  float *const *rows = state->rows;
  const float *d_output = rows[D_CONCAT] + at;
  const int length = (int)shape->length;
  const int width = (int)shape->width;
  const int size = (int)(shape->width / shape->heads);
  const float scale = 1.0f / sqrtf((float)size);
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, length, size, length, 1.0f, probabilities,
              length, d_output, width, 0.0f, rows[D_V] + at, width);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, length, length, size, 1.0f, d_output, width,
              rows[V] + at, width, 0.0f, state->d_scores, length);
  softmax_back(probabilities, state->d_scores, length);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, length, size, length, scale,
              state->d_scores, length, rows[K] + at, width, 0.0f, rows[D_Q] + at, width);
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, length, size, length, scale, state->d_scores,
              length, rows[Q] + at, width, 0.0f, rows[D_K] + at, width);
}

static bool backward(void *opaque, int thread_index) {
  const composed_state *state = opaque;
  const bench_problem *problem = state->problem;
  const bench_shape *shape = &problem->shape;
  (void)thread_index;
  project_back(problem, 3, state->rows[CONCAT], problem->d_output, 0.0f, state->rows[D_CONCAT]);
  for (int64_t b = 0; b < shape->batch; b++)
    for (int64_t h = 0; h < shape->heads; h++)
      attend_back(state, head_at(shape, b, h), probabilities_of(state, b, h));
  for (int i = 0; i < 3; i++)
    project_back(problem, i, problem->input, state->rows[D_Q + i], i > 0 ? 1.0f : 0.0f,
                 problem->gradients.input);
  return true;
}

const bench_engine bench_composed_backward = {
    .name = "composed",
    .computes_layer = true,
    .calls_blas = true,
    .needs = needs,
    .create = create,
    .keep = keep,
    .backward = backward,
    .bytes = bytes,
    .kept_bytes = kept_bytes,
    .destroy = destroy,
};
