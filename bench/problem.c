/* Owns the buffers: inputs, outputs and weights of one shape. */
#include "problem.h"

#include "mha.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

float *bench_floats(size_t n) {
  const size_t bytes = (n * sizeof(float) + 63) / 64 * 64;
  float *memory = aligned_alloc(64, bytes > 0 ? bytes : 64);
  if (!memory)
    fprintf(stderr, "mha-bench: there is no memory for %zu bytes\n", bytes);
  return memory;
}

void *bench_zeroed(size_t bytes) {
  void *memory = calloc(1, bytes);
  if (!memory)
    fprintf(stderr, "mha-bench: there is no memory for %zu bytes\n", bytes);
  return memory;
}

/* Uniform with variance deviation². */
static void fill(float *numbers, size_t n, float deviation, uint64_t *state) {
  const float factor = deviation * sqrtf(12.0f) / 16777216.0f;
  for (size_t i = 0; i < n; i++) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    numbers[i] = ((float)(*state >> 40) - 8388608.0f) * factor;
  }
}

/* Of all four projections together. */
static size_t projected_columns(const bench_shape *shape) {
  return (size_t)(2 * shape->width + 2 * bench_projected_width(shape, 1));
}

/* Of the keys, or of the values: what the cache holds when the call has appended its token. */
static size_t cache_floats(const bench_shape *shape) {
  const int64_t tokens = shape->past > 0 ? shape->past + shape->length : 0;
  return (size_t)(shape->batch * tokens * bench_projected_width(shape, 1));
}

/* Matrices keep the variance of their input, except that queries get three times the deviation:
 * scores of deviation 3 make rows of softmax that depend on a handful of keys, so that a wrong key
 * shows in the output however long the sequence is. Of deviation 30, many of a row lie 87 to 104
 * below the largest, where exp is subnormal. Cached rows have deviation 1, as projected
 * ones. */
static void fill_set(const bench_problem *problem, bench_weights *set) {
  const size_t width = (size_t)problem->shape.width;
  const size_t columns = projected_columns(&problem->shape);
  const float deviation = 1.0f / sqrtf((float)width);
  uint64_t state = UINT64_C(0x9e3779b97f4a7c15);
  float *at = set->block;
  fill(problem->input, (size_t)problem->rows * width, 1.0f, &state);
  fill(at, width * width, (problem->shape.kind == BENCH_GAPS ? 30.0f : 3.0f) * deviation, &state);
  at += width * width;
  fill(at, (columns - width) * width, deviation, &state);
  at += (columns - width) * width;
  fill(at, columns, 0.1f, &state);
  at += columns;
  fill(at, 2 * cache_floats(&problem->shape), 1.0f, &state);
}

static bool create_set(const bench_problem *problem, bench_weights *set) {
  const bench_shape *shape = &problem->shape;
  float *at = bench_floats(problem->set_bytes / sizeof(float));
  set->block = at;
  if (!at)
    return false;
  for (int i = 0; i < 4; i++) {
    set->matrices[i] = at;
    at += shape->width * bench_projected_width(shape, i);
  }
  for (int i = 0; i < 4; i++) {
    set->biases[i] = at;
    at += bench_projected_width(shape, i);
  }
  if (shape->past > 0) {
    set->keys = at;
    set->values = at + cache_floats(shape);
  }
  return true;
}

/* A loss that looks at every number of the output alike. */
static bool create_gradients(bench_problem *problem) {
  const bench_shape *shape = &problem->shape;
  const size_t n = (size_t)problem->rows * (size_t)shape->width;
  bench_gradients *gradients = &problem->gradients;
  uint64_t state = UINT64_C(0xd1b54a32d192ed03);
  if (!problem->options->backward)
    return true;
  gradients->n = n + projected_columns(shape) * (size_t)(shape->width + 1);
  gradients->block = bench_floats(gradients->n);
  problem->d_output = bench_floats(n);
  if (!gradients->block || !problem->d_output)
    return false;
  fill(problem->d_output, n, 1.0f, &state);
  gradients->input = gradients->block;
  float *at = gradients->block + n;
  for (int i = 0; i < 4; i++) {
    gradients->matrices[i] = at;
    at += shape->width * bench_projected_width(shape, i);
  }
  for (int i = 0; i < 4; i++) {
    gradients->biases[i] = at;
    at += bench_projected_width(shape, i);
  }
  return true;
}

/* One key in eight is hidden, never a query's own. */
static bool create_mask(bench_problem *problem) {
  const int64_t L = problem->shape.length;
  if (problem->shape.kind != BENCH_MASK)
    return true;
  problem->mask = bench_zeroed((size_t)(L * L));
  for (int64_t i = 0; problem->mask && i < L; i++)
    for (int64_t j = 0; j < L; j++)
      problem->mask[i * L + j] = (5 * i + 3 * j) % 8 != 0 || i == j;
  return problem->mask != NULL;
}

size_t bench_problem_type_bytes(const bench_problem *problem, const bench_type *type) {
  const bench_shape *shape = &problem->shape;
  const size_t columns = projected_columns(shape);
  return mha_element_bytes(type->matrices, (int64_t)columns * shape->width) +
         columns * sizeof(float) + 2 * mha_element_bytes(type->cache, (int64_t)cache_floats(shape));
}

/* Between two uses of a set the others are used, rotation_bytes in all or more, whatever type they
 * are stored in. */
static int64_t count_sets(const bench_problem *problem) {
  const bench_options *o = problem->options;
  size_t smallest = problem->set_bytes;
  for (int i = 0; i < o->types.n; i++) {
    const size_t bytes = bench_problem_type_bytes(problem, &o->types.types[i]);
    smallest = bytes < smallest ? bytes : smallest;
  }
  return o->rotation_bytes == 0 ? 1 : 1 + (int64_t)((o->rotation_bytes + smallest - 1) / smallest);
}

static bool create_sets(bench_problem *problem) {
  const size_t columns = projected_columns(&problem->shape);
  const size_t weights = columns * ((size_t)problem->shape.width + 1);
  problem->set_bytes = (weights + 2 * cache_floats(&problem->shape)) * sizeof(float);
  problem->n_sets = problem->rotates ? count_sets(problem) : 1;
  problem->sets = bench_zeroed((size_t)problem->n_sets * sizeof *problem->sets);
  if (!problem->sets)
    return false;
  for (int64_t i = 0; i < problem->n_sets; i++) {
    bench_weights *set = &problem->sets[i];
    if (!create_set(problem, set))
      return false;
    if (i == 0)
      fill_set(problem, set);
    else
      memcpy(set->block, problem->sets[0].block, problem->set_bytes);
  }
  return true;
}

bool bench_problem_create(const bench_options *options, const bench_shape *shape,
                          bench_problem *problem) {
  memset(problem, 0, sizeof *problem);
  problem->options = options;
  problem->shape = *shape;
  problem->rows = shape->batch * shape->length;
  problem->rotates = !options->backward && (problem->rows == 1 || shape->past > 0);
  const size_t n = (size_t)problem->rows * (size_t)shape->width;
  problem->input = bench_floats(n);
  problem->output = bench_floats(n);
  return problem->input && problem->output && create_mask(problem) && create_sets(problem) &&
         create_gradients(problem);
}

void bench_problem_destroy(bench_problem *problem) {
  for (int64_t i = 0; problem->sets && i < problem->n_sets; i++)
    free(problem->sets[i].block);
  free(problem->sets);
  free(problem->mask);
  free(problem->gradients.block);
  free(problem->d_output);
  free(problem->input);
  free(problem->output);
}

const bench_weights *bench_problem_set(const bench_problem *problem, int64_t call) {
  return &problem->sets[call % problem->n_sets];
}
