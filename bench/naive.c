/* Owns the engine "naive": triple loops in the order i, j, k over [in][out] matrices, as a first
 * version is written. It runs once. Where a pass would take too long it computes sampled rows
 * and its time is extrapolated. */
#include "engines.h"
#include "statistics.h"

#include <math.h>
#include <stdlib.h>

typedef struct naive_state {
  const bench_problem *problem;
  const bench_weights *weights;
  float *q, *concat; /* [n_rows][E], the sampled rows alone */
  float *k, *v;      /* [B][L][E] */
  float *scores;     /* [L] */
  const bench_naive_result *result;
} naive_state;

/* y [E] = x·W + b for one row: j and k of the three loops. */
static void project_row(const naive_state *naive, int which, const float *x, float *y) {
  const int64_t width = naive->problem->shape.width;
  const float *matrix = naive->weights->matrices[which];
  const float *bias = naive->weights->biases[which];
  for (int64_t j = 0; j < width; j++) {
    float sum = 0.0f;
    for (int64_t k = 0; k < width; k++)
      sum += x[k] * matrix[k * width + j];
    y[j] = sum + bias[j];
  }
}

static float softmax_row(float *scores, int64_t n) {
  float largest = scores[0];
  float sum = 0.0f;
  for (int64_t j = 1; j < n; j++)
    largest = scores[j] > largest ? scores[j] : largest;
  for (int64_t j = 0; j < n; j++) {
    scores[j] = expf(scores[j] - largest);
    sum += scores[j];
  }
  return sum;
}

/* One query of one head over n keys; k, v point to the head's column in the first row, mask to the
 * query's row or is NULL. */
static void attend_head(const naive_state *naive, const float *q, const float *k, const float *v,
                        const uint8_t *mask, int64_t n, float *output) {
  const int64_t width = naive->problem->shape.width;
  const int64_t size = width / naive->problem->shape.heads;
  const float scale = 1.0f / sqrtf((float)size);
  float *scores = naive->scores;
  for (int64_t j = 0; j < n; j++) {
    float dot = 0.0f;
    for (int64_t c = 0; c < size; c++)
      dot += q[c] * k[j * width + c];
    scores[j] = mask && !mask[j] ? -INFINITY : scale * dot;
  }
  const float sum = softmax_row(scores, n);
  for (int64_t c = 0; c < size; c++) {
    float value = 0.0f;
    for (int64_t j = 0; j < n; j++)
      value += scores[j] * v[j * width + c];
    output[c] = value / sum;
  }
}

/* Keys that row i of [B·L] sees. */
static int64_t visible_keys(const bench_shape *shape, int64_t row) {
  return shape->causal ? row % shape->length + 1 : shape->length;
}

static void attend_row(const naive_state *naive, int64_t row, const float *q, float *concat) {
  const bench_shape *shape = &naive->problem->shape;
  const int64_t size = shape->width / shape->heads;
  const int64_t first_key = row / shape->length * shape->length * shape->width;
  const uint8_t *mask = naive->problem->mask;
  if (mask)
    mask += row % shape->length * shape->length;
  for (int64_t h = 0; h < shape->heads; h++)
    attend_head(naive, q + h * size, naive->k + first_key + h * size,
                naive->v + first_key + h * size, mask, visible_keys(shape, row), concat + h * size);
}

/* Evenly spaced midpoints, so that causal rows see as many keys as an average row does. */
static bool choose_rows(const bench_problem *problem, bench_naive_result *result) {
  const double share = problem->options->naive_flops / bench_flops(&problem->shape);
  result->extrapolated = share < 1;
  result->n_rows = problem->rows;
  if (result->extrapolated)
    result->n_rows = (int64_t)ceil(share * (double)problem->rows);
  result->rows = bench_zeroed((size_t)result->n_rows * sizeof *result->rows);
  result->output = bench_floats((size_t)(result->n_rows * problem->shape.width));
  for (int64_t i = 0; result->rows && i < result->n_rows; i++)
    result->rows[i] = (2 * i + 1) * problem->rows / (2 * result->n_rows);
  return result->rows && result->output;
}

static bool create(naive_state *naive) {
  const size_t width = (size_t)naive->problem->shape.width;
  const size_t n = (size_t)naive->problem->rows * width;
  naive->q = bench_floats((size_t)naive->result->n_rows * width);
  naive->concat = bench_floats((size_t)naive->result->n_rows * width);
  naive->k = bench_floats(n);
  naive->v = bench_floats(n);
  naive->scores = bench_floats((size_t)naive->problem->shape.length);
  if (!naive->q || !naive->concat || !naive->k || !naive->v || !naive->scores)
    return false;
  /* Sampled queries need the keys and values of all rows; those of the sample are done again. */
  if (naive->result->extrapolated) {
    bench_project(naive->problem, naive->weights, 1, naive->problem->rows, naive->problem->input,
                  naive->k, naive->problem->shape.width);
    bench_project(naive->problem, naive->weights, 2, naive->problem->rows, naive->problem->input,
                  naive->v, naive->problem->shape.width);
  }
  return true;
}

static void destroy(naive_state *naive) {
  free(naive->q);
  free(naive->k);
  free(naive->v);
  free(naive->concat);
  free(naive->scores);
}

static double time_inputs(const naive_state *naive) {
  const int64_t width = naive->problem->shape.width;
  const double start = bench_now();
  for (int64_t i = 0; i < naive->result->n_rows; i++) {
    const int64_t at = naive->result->rows[i] * width;
    project_row(naive, 0, naive->problem->input + at, naive->q + i * width);
    project_row(naive, 1, naive->problem->input + at, naive->k + at);
    project_row(naive, 2, naive->problem->input + at, naive->v + at);
  }
  return bench_now() - start;
}

static double time_attention(const naive_state *naive) {
  const int64_t width = naive->problem->shape.width;
  const double start = bench_now();
  for (int64_t i = 0; i < naive->result->n_rows; i++)
    attend_row(naive, naive->result->rows[i], naive->q + i * width, naive->concat + i * width);
  return bench_now() - start;
}

static double time_output(const naive_state *naive) {
  const int64_t width = naive->problem->shape.width;
  const double start = bench_now();
  for (int64_t i = 0; i < naive->result->n_rows; i++)
    project_row(naive, 3, naive->concat + i * width, naive->result->output + i * width);
  return bench_now() - start;
}

/* Of all (query, key) pairs, how many for each one in the sample. */
static double pair_factor(const bench_problem *problem, const bench_naive_result *result) {
  double sampled = 0;
  for (int64_t i = 0; i < result->n_rows; i++)
    sampled += (double)visible_keys(&problem->shape, result->rows[i]);
  return (double)problem->shape.batch * bench_visible_pairs(&problem->shape) / sampled;
}

bool bench_naive_run(const bench_problem *problem, bench_naive_result *result) {
  naive_state naive = {.problem = problem, .weights = problem->sets, .result = result};
  *result = (bench_naive_result){.seconds = 0};
  const bool good = choose_rows(problem, result) && create(&naive);
  if (good) {
    const double row_factor = (double)problem->rows / (double)result->n_rows;
    result->seconds = row_factor * time_inputs(&naive);
    result->seconds += pair_factor(problem, result) * time_attention(&naive);
    result->seconds += row_factor * time_output(&naive);
  }
  destroy(&naive);
  return good;
}

void bench_naive_destroy(bench_naive_result *result) {
  free(result->rows);
  free(result->output);
}
