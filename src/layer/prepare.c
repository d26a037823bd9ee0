/* Owns what happens to Q and K between projection and attention: RMS normalisation, then rotary
 * positions, row by row, in place. */
#include "prepare.h"

#include "base/error.h"
#include "base/memory.h"
#include "norm.h"
#include "rope.h"

#include <string.h>

/* Rows per task: enough work to be worth taking. */
enum { ROWS_PER_TASK = 16, MAX_ARRAYS = 2 };

/* ---- positions ---- */

static int64_t entry_count(const mha_preparing *a) {
  return a->visibility->query_starts ? a->visibility->B : a->shape.batch;
}

/* Rows of entry b that are computed, and the first of them in the array's own counting. */
static int64_t entry_rows(const mha_preparing *a, int64_t b, int64_t *first) {
  const mha_visibility *v = a->visibility;
  *first = b * a->shape.length;
  if (v->query_starts) {
    *first = a->keys ? mha_key_start(v, b) : mha_query_start(v, b);
    if (a->keys && v->cached)
      return mha_cache_rows_new(v->cached, b);
    return a->keys ? mha_key_count(v, b) : mha_query_count(v, b);
  }
  return a->live.counts ? mha_min(a->live.counts[b], a->shape.length) : a->shape.length;
}

/* a + b, false if that overflows; either may be negative. */
static bool add_signed(int64_t a, int64_t b, int64_t *sum) {
  if (b > 0 ? a > INT64_MAX - b : a < INT64_MIN - b)
    return false;
  *sum = a + b;
  return true;
}

/* Position of row i of entry b, row `row` of the array. False if it overflows. */
static bool find_position(const mha_preparing *a, int64_t b, int64_t i, int64_t row,
                          int64_t *position) {
  const int64_t before = a->visibility->cached ? mha_own_key_offset(a->visibility, b) : 0;
  *position = a->positions.given ? a->positions.given[row] : i;
  return (a->positions.given || add_signed(*position, before, position)) &&
         add_signed(*position, a->positions.offset, position);
}

mha_status mha_prepare_check(const mha_preparing *a, mha_error *error) {
  const mha_config *c = &a->weights->config;
  const int64_t last = mha_rope_last_position(c);
  if (c->rope == MHA_ROPE_NONE || a->shape.length == 0)
    return MHA_OK;
  for (int64_t b = 0; b < entry_count(a); b++) {
    int64_t first = 0;
    const int64_t n = entry_rows(a, b, &first);
    /* counted positions grow: the first and the last tell of all */
    const int64_t step = a->positions.given || n < 2 ? 1 : n - 1;
    for (int64_t i = 0; i < n; i += step) {
      int64_t position = 0;
      if (!find_position(a, b, i, first + i, &position) || position < 0 || position > last)
        return mha_fail(error, MHA_ERROR_LENGTH,
                        "%s %lld of batch entry %lld has position %lld; rule: between 0 and %lld, "
                        "the last that the rotary positions have",
                        a->positions.name, (long long)i, (long long)b, (long long)position,
                        (long long)last);
    }
  }
  return MHA_OK;
}

/* ---- rows ---- */

typedef struct prepare_job {
  const mha_preparing *arrays;
  int n;
  int64_t first_task[MAX_ARRAYS];
} prepare_job;

static int64_t row_count(const mha_preparing *a) {
  return a->shape.batch * a->shape.length;
}

/* The entry of row `row` of the array and the row's number there; false if it is not computed, as
 * packed rows behind the last sequence are not. */
static bool locate_row(const mha_preparing *a, int64_t row, int64_t *b, int64_t *i) {
  const mha_visibility *v = a->visibility;
  int64_t first = 0;
  if (!v->query_starts) {
    *b = row / a->shape.length;
    *i = row % a->shape.length;
    return *i < entry_rows(a, *b, &first);
  }
  if (row >= a->live.limit)
    return false;
  int64_t low = 0; /* the last entry that does not begin behind the row */
  int64_t high = v->B;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (void)entry_rows(a, middle, &first);
    if (first <= row)
      low = middle;
    else
      high = middle;
  }
  const int64_t n = entry_rows(a, low, &first);
  *b = low;
  *i = row - first;
  return *i >= 0 && *i < n;
}

static float *row_place(const mha_preparing *a, int64_t b, int64_t i, int64_t row) {
  if (a->cached)
    return a->data + mha_cache_rows_place(a->cached, b, i) * a->shape.width;
  return a->data + (a->visibility->query_starts
                        ? row * a->shape.row_stride
                        : b * a->shape.batch_stride + i * a->shape.row_stride);
}

/* A row's place and position; NULL if it is not computed. */
static float *find_row(const mha_preparing *a, int64_t row, int64_t *position) {
  int64_t b = 0;
  int64_t i = 0;
  if (!locate_row(a, row, &b, &i))
    return NULL;
  (void)find_position(a, b, i, row, position);
  return row_place(a, b, i, row);
}

static mha_status prepare_task(void *argument, int64_t index, int32_t worker) {
  (void)worker;
  const prepare_job *job = argument;
  int k = job->n - 1;
  while (job->first_task[k] > index)
    k--;
  const mha_preparing *a = &job->arrays[k];
  const int64_t first = (index - job->first_task[k]) * ROWS_PER_TASK;
  const int64_t end = mha_min(first + ROWS_PER_TASK, row_count(a));
  for (int64_t row = first; row < end; row++) {
    int64_t position = 0;
    float *x = find_row(a, row, &position);
    if (!x)
      continue;
    if (a->raw)
      memcpy(a->raw + (x - a->data), x, (size_t)a->shape.width * sizeof *x);
    mha_norm_row(&a->weights->config, a->norm, a->heads, x);
    mha_rope_row(&a->weights->config, a->weights->rope_frequencies, position, a->heads, x);
  }
  return MHA_OK;
}

mha_status mha_prepare(const mha_threads *threads, const mha_preparing *arrays, int n) {
  prepare_job job = {.arrays = arrays, .n = n};
  mha_task_list list = {.work = prepare_task, .job = &job};
  for (int k = 0; k < n; k++) {
    const mha_config *c = &arrays[k].weights->config;
    const double rows = (double)row_count(&arrays[k]);
    job.first_task[k] = list.n_tasks;
    if (c->norm == MHA_NORM_NONE && c->rope == MHA_ROPE_NONE)
      continue;
    list.n_tasks += (row_count(&arrays[k]) + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    list.operations += rows * MHA_OPERATIONS_PER_READ * (double)arrays[k].shape.width;
  }
  return mha_parallel_run(threads, &list);
}

/* ---- the way back ---- */

typedef struct back_job {
  const mha_preparing *rows;
  double *sums; /* [MHA_PREPARE_PARTS][width], or NULL */
} back_job;

/* Numbers of the normalisation's weight. */
static int64_t weight_width(const mha_preparing *a) {
  const mha_config *c = &a->weights->config;
  return c->norm == MHA_NORM_FULL ? a->heads * c->head_size : c->head_size;
}

int64_t mha_prepare_sums(const mha_preparing *a) {
  return a->weights->config.norm == MHA_NORM_NONE ? 0 : MHA_PREPARE_PARTS * weight_width(a);
}

/* One of the parts, by the array's size alone. */
static mha_status back_task(void *argument, int64_t index, int32_t worker) {
  (void)worker;
  const back_job *job = argument;
  const mha_preparing *a = job->rows;
  const mha_config *c = &a->weights->config;
  const int64_t share = (row_count(a) + MHA_PREPARE_PARTS - 1) / MHA_PREPARE_PARTS;
  const int64_t end = mha_min((index + 1) * share, row_count(a));
  double *sums = job->sums ? job->sums + index * weight_width(a) : NULL;
  if (sums)
    memset(sums, 0, (size_t)weight_width(a) * sizeof *sums);
  for (int64_t row = index * share; row < end; row++) {
    int64_t position = 0;
    float *x = find_row(a, row, &position);
    if (!x)
      continue;
    mha_rope_row_back(c, a->weights->rope_frequencies, position, a->heads, x);
    if (c->norm != MHA_NORM_NONE)
      mha_norm_row_back(c, a->norm, a->heads, a->raw + (x - a->data), x, sums);
  }
  return MHA_OK;
}

mha_status mha_prepare_back(const mha_threads *threads, const mha_preparing *a, double *sums) {
  const mha_config *c = &a->weights->config;
  back_job job = {a, sums};
  const mha_task_list list = {.work = back_task,
                              .job = &job,
                              .n_tasks = MHA_PREPARE_PARTS,
                              .operations = MHA_OPERATIONS_PER_READ * (double)row_count(a) *
                                            (double)a->shape.width};
  if (c->norm == MHA_NORM_NONE && c->rope == MHA_ROPE_NONE)
    return MHA_OK;
  const mha_status status = mha_parallel_run(threads, &list);
  for (int64_t k = 1; !status && sums && k < MHA_PREPARE_PARTS; k++)
    for (int64_t j = 0; j < weight_width(a); j++)
      sums[j] += sums[k * weight_width(a) + j];
  return status;
}
