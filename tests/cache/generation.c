/* Owns the run that is on: its inputs and cache, the arguments of each call, and the call's judge.
 */
#include "generation.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

generation_run run;

/* ---- What to try ----------------------------------------------------------------------------- */

test_case generation_case(uint64_t seed) {
  return (test_case){.seed = seed,
                     .B = 2,
                     .Lq = 21,
                     .H = 4,
                     .G = 2,
                     .d = 4,
                     .dv = 3,
                     .Eq = 10,
                     .Eo = 7,
                     .biases = TEST_ALL,
                     .source = TEST_SELF,
                     .causal = true,
                     .mask_extents = TEST_FULL,
                     .bias_extents = TEST_FULL,
                     .want = TEST_WANT_ALL};
}

void generation_set_mask(test_case *c, int kind) {
  c->causal = kind != 1 && kind != 9;
  c->window = kind == 2 || kind == 3 || kind == 9;
  c->left = kind == 3 ? 0 : 5;
  c->right = kind == 9 ? 2 : -1;
  c->has_mask = kind == 4;
  c->has_bias = c->bias_hides = kind == 5;
  c->alibi = kind == 6;
  c->softcap = kind == 7 ? 1.5F : 0.0F;
  c->sinks = kind == 8;
}

void generation_set_ring(generation_plan *plan, int64_t window, int64_t rollback,
                         int64_t capacity) {
  plan->c.window = true;
  plan->c.left = window - 1;
  plan->c.right = -1;
  plan->window = window;
  plan->rollback = rollback;
  plan->capacity = capacity;
}

/* ---- The run that is on ---------------------------------------------------------------------- */

/* The same tests run with pages, which whoever runs them says: as many as all entries may need,
 * while they leave shared ones. */
static void set_pages(mha_cache_options *o) {
  const char *given = getenv("MHA_TEST_PAGE_TOKENS");
  const int64_t T = run.plan.page_tokens ? run.plan.page_tokens
                    : given              ? strtoll(given, NULL, 10)
                                         : 0;
  o->page_tokens = T;
  o->n_pages = T > 0 ? run.plan.n_pages : 0;
  if (T > 0 && o->n_pages == 0)
    o->n_pages = 2 * o->n_entries * ((o->capacity + T - 1) / T);
}

mha_cache_options generation_cache_options(void) {
  const generation_plan *plan = &run.plan;
  const test_case *c = &run.f.c;
  mha_cache_options o;
  MHA_INIT(&o);
  o.n_entries = plan->entries ? plan->entries : c->B;
  o.capacity = plan->capacity ? plan->capacity : c->Lq;
  o.n_kv_heads = c->G;
  o.head_size = c->d;
  o.value_head_size = c->dv;
  o.window = plan->window;
  o.rollback = plan->rollback;
  o.type = (int32_t)plan->type;
  set_pages(&o);
  o.allocator = &run.f.allocator.mha;
  return o;
}

void generation_open(const generation_plan *plan) {
  mha_error error;
  memset(&run, 0, sizeof run);
  run.plan = *plan;
  test_build(&run.f, &plan->c);
  const test_case *c = &run.f.c;
  assert_true(c->B <= GENERATION_MOST_ENTRIES);
  const mha_cache_options o = generation_cache_options();
  run.plan.capacity = o.capacity;
  test_problem(&run.f, &run.p);
  test_expect(mha_weights_create(&run.f.config, &run.f.matrices, &run.weights, &error), MHA_OK,
              &error);
  test_expect(mha_context_create(&run.f.options, &run.context, &error), MHA_OK, &error);
  test_expect(mha_cache_create(&o, &run.cache, &error), MHA_OK, &error);
  for (int64_t b = 0; b < c->B; b++)
    run.entries[b] = plan->entries ? plan->entries - 1 - b : b;
  run.outputs = test_allocate((size_t)(c->B * c->Lq * c->Eo), sizeof *run.outputs);
}

void generation_close(void) {
  mha_cache_destroy(run.cache);
  mha_context_destroy(run.context);
  mha_weights_destroy(run.weights);
  test_allocator_check(&run.f.allocator);
  test_problem_free(&run.p);
  test_release(&run.f);
  free(run.outputs);
}

float *generation_close_for_outputs(void) {
  float *outputs = run.outputs;
  run.outputs = NULL;
  generation_close();
  return outputs;
}

float *generation_cache_numbers(bool values, int64_t *n) {
  mha_tensor k, v;
  test_expect(mha_cache_view(run.cache, &k, &v, NULL), MHA_OK, NULL);
  const mha_tensor *t = values ? &v : &k;
  *n = t->batch * t->batch_stride;
  return (float *)(uintptr_t)t->data;
}

unsigned char *generation_cached_row(bool values, int64_t b, int64_t token) {
  mha_tensor k, v;
  test_expect(mha_cache_view(run.cache, &k, &v, NULL), MHA_OK, NULL);
  const mha_tensor *t = values ? &v : &k;
  int64_t row = -1;
  mha_error error;
  test_expect(mha_cache_row(run.cache, run.entries[b], token, &row, &error), MHA_OK, &error);
  assert_int_equal(t->element, run.plan.type);
  return test_stored_at((unsigned char *)(uintptr_t)t->data, run.plan.type, row * t->row_stride);
}

void generation_renew_problem(void) {
  test_problem_free(&run.p);
  test_problem(&run.f, &run.p);
}

void generation_share_tokens(int64_t n) {
  for (int64_t t = 0; t < n; t++)
    memcpy(test_at(&run.f.query, 1, t, 0, 0), test_at(&run.f.query, 0, t, 0, 0),
           (size_t)run.f.c.Eq * sizeof(float));
  generation_renew_problem();
}

void generation_truncate(int64_t length) {
  for (int64_t b = 0; b < run.f.c.B; b++) {
    mha_error error;
    test_expect(mha_cache_truncate(run.cache, run.entries[b], length, &error), MHA_OK, &error);
    run.length[b] = length;
  }
}

/* ---- One call -------------------------------------------------------------------------------- */

/* Rows of one of the caller's arrays, poison where no token is. */
static float *gather_rows(generation_step *s, const test_view *from, int64_t rows,
                          const int64_t *counts) {
  const int64_t width = from->size, stride = width + run.plan.gap;
  const int64_t B = run.f.c.B;
  if (rows == 0)
    return test_pool_floats(&s->pool, 1);
  float *to = test_pool_floats(&s->pool, B * rows * stride - run.plan.gap);
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < at_most(rows, counts[b]); i++)
      memcpy(to + (b * rows + i) * stride, test_at(from, b, s->before[b] + i, 0, 0),
             (size_t)width * sizeof *to);
  return to;
}

/* Index of cell (b, h, query i of the call, j) in the mask of the whole sequence. */
static int64_t whole_cell(const generation_step *s, int64_t b, int64_t h, int64_t i, int64_t j) {
  const test_case *c = &run.f.c;
  return ((b * c->H + h) * c->Lq + s->before[b] + i) * c->Lk + j;
}

static void gather_masks(generation_step *s) {
  const test_case *c = &run.f.c;
  const int64_t cells = c->B * c->H * s->queries * s->columns;
  s->mask = run.p.attend ? test_pool_bytes(&s->pool, (size_t)cells) : NULL;
  s->bias = run.p.bias ? test_pool_floats(&s->pool, cells) : NULL;
  for (int64_t b = 0, at = 0; b < c->B; b++)
    for (int64_t h = 0; h < c->H; h++)
      for (int64_t i = 0; i < s->queries; i++)
        for (int64_t j = 0; j < s->columns; j++, at++) {
          if (i >= s->live[b] || j >= s->after[b])
            continue;
          if (s->mask)
            s->mask[at] = run.p.attend[whole_cell(s, b, h, i, j)];
          if (s->bias)
            s->bias[at] = (float)run.p.bias[whole_cell(s, b, h, i, j)];
        }
  if (s->mask)
    s->rules.attend = (mha_mask){s->mask, c->B, c->H, s->queries, s->columns, 0, 0, 0, 0, 0};
  if (s->bias)
    s->rules.bias = (mha_bias){s->bias, c->B, c->H, s->queries, s->columns, 0, 0, 0, 0, 0};
}

static void place_results(generation_step *s) {
  const test_case *c = &run.f.c;
  const int64_t rows = c->B * s->queries, stride = c->Eo + run.plan.gap;
  const int64_t floats = rows > 0 ? rows * stride - run.plan.gap : 1;
  s->y = test_pool_floats(&s->pool, floats);
  s->y_before = test_pool_floats(&s->pool, floats);
  if (c->accumulate)
    for (int64_t row = 0; row < rows; row++)
      test_fill_normal(&run.f.random, s->y + row * stride, c->Eo, 1.0);
  memcpy(s->y_before, s->y, (size_t)floats * sizeof *s->y);
  /* these grow with the square of the length: nothing where nobody asks */
  const int64_t cells = rows * s->columns;
  s->weights = test_pool_floats(&s->pool, c->want & TEST_WANT_WEIGHTS ? cells * c->H : 0);
  s->average = test_pool_floats(&s->pool, c->want & TEST_WANT_AVERAGE ? cells : 0);
  s->lse = test_pool_floats(&s->pool, rows * c->H);
  s->results.weights = c->want & TEST_WANT_WEIGHTS ? s->weights : NULL;
  s->results.average = c->want & TEST_WANT_AVERAGE ? s->average : NULL;
  s->results.log_sum_exp = c->want & TEST_WANT_LSE ? s->lse : NULL;
}

/* Given positions, by query row of the call; padding has one that no layer could take. */
static void gather_positions(generation_step *s) {
  const test_case *c = &run.f.c;
  if (!run.f.query_positions)
    return;
  s->positions = test_pool_bytes(&s->pool, (size_t)(c->B * s->queries) * sizeof *s->positions);
  for (int64_t b = 0; b < c->B; b++)
    for (int64_t i = 0; i < s->queries; i++)
      s->positions[b * s->queries + i] =
          i < s->live[b] ? run.f.query_positions[b * c->Lq + s->before[b] + i] : INT64_MIN;
}

static void fill_args(generation_step *s) {
  const test_case *c = &run.f.c;
  mha_forward_args *a = &s->args;
  const int64_t gap = run.plan.gap;
  const bool self = c->source == TEST_SELF;
  const bool appends = s->mode != MHA_CACHE_ATTEND;
  MHA_INIT(a);
  a->flags = s->queries == 0 || s->keys == 0 ? MHA_ALLOW_EMPTY : 0;
  a->accumulate = c->accumulate;
  a->cache_mode = (int32_t)s->mode;
  a->batch = c->B;
  a->query_length = s->queries;
  a->key_length = self || !appends ? 0 : s->keys;
  a->query = s->x;
  a->key = self || !appends ? NULL : s->k;
  a->value = c->source == TEST_CROSS && appends ? s->v : NULL;
  a->output = s->y;
  a->query_row_stride = gap ? c->Eq + gap : 0;
  a->key_row_stride = gap && a->key ? c->Ek + gap : 0;
  a->value_row_stride = gap && a->value ? c->Ev + gap : 0;
  a->output_row_stride = gap ? c->Eo + gap : 0;
  a->rules = &s->rules;
  a->results = &s->results;
  a->cache = run.cache;
  a->cache_entries = run.plan.entries ? run.entries : NULL;
  a->new_lengths = s->counts;
  a->expected_lengths = run.length;
  a->query_position = c->query_position;
  a->key_position = self || !appends ? 0 : c->key_position;
  a->query_positions = s->positions;
}

void step_prepare(generation_step *s) {
  const test_case *c = &run.f.c;
  const int64_t rows = s->mode == MHA_CACHE_ATTEND ? s->queries : s->keys;
  int64_t new_keys[GENERATION_MOST_ENTRIES] = {0};
  for (int64_t b = 0; b < c->B; b++) {
    const int64_t n = s->counts ? s->counts[b] : rows;
    new_keys[b] = s->mode == MHA_CACHE_ATTEND ? 0 : n;
    s->live[b] = at_most(s->counts ? n : s->queries, s->queries);
    s->before[b] = run.length[b];
    s->after[b] = run.length[b] + new_keys[b];
    s->columns = at_least(s->columns, s->after[b]);
  }
  if (s->mode == MHA_CACHE_ATTEND) /* queries of the last tokens */
    for (int64_t b = 0; b < c->B; b++)
      s->before[b] -= s->live[b];
  s->rules = run.f.rules;
  s->results = run.f.results;
  s->rules.alignment = s->mode == MHA_CACHE_ATTEND ? MHA_ALIGN_BOTTOM_RIGHT : run.f.rules.alignment;
  s->x = gather_rows(s, &run.f.query, s->queries, s->live);
  s->k = gather_rows(s, &run.f.key, s->keys, new_keys);
  s->v = gather_rows(s, &run.f.value, s->keys, new_keys);
  gather_masks(s);
  place_results(s);
  gather_positions(s);
  fill_args(s);
}

void step_commit(const generation_step *s) {
  for (int64_t b = 0; b < run.f.c.B; b++) {
    int64_t length = -1;
    test_expect(mha_cache_length(run.cache, run.entries[b], &length, NULL), MHA_OK, NULL);
    assert_int_equal(length, s->after[b]);
    run.length[b] = s->after[b];
    run.highest[b] = at_least(run.highest[b], s->after[b]);
  }
}

void step_call(generation_step *s) {
  mha_error error;
  step_prepare(s);
  test_expect(mha_forward(run.context, run.weights, &s->args, &error), MHA_OK, &error);
  step_commit(s);
}

float *step_output(const generation_step *s) {
  const int64_t rows = run.f.c.B * s->queries, width = run.f.c.Eo;
  float *to = test_allocate((size_t)(rows * width), sizeof *to);
  for (int64_t row = 0; row < rows; row++)
    memcpy(to + row * width, s->y + row * (width + run.plan.gap), (size_t)width * sizeof *to);
  return to;
}

void step_free(generation_step *s) {
  test_pool_free(&s->pool);
}

/* ---- The judge of one call ------------------------------------------------------------------- */

static double *copy_rows(const double *from, int64_t length, int64_t width, const int64_t *first,
                         const int64_t *counts, int64_t rows) {
  const int64_t B = run.f.c.B;
  double *to = test_allocate((size_t)(B * rows * width), sizeof *to);
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < at_most(rows, counts[b]); i++)
      memcpy(to + (b * rows + i) * width, from + (b * length + first[b] + i) * width,
             (size_t)width * sizeof *to);
  return to;
}

static int64_t *copy_positions(const int64_t *from, int64_t length, const int64_t *first,
                               const int64_t *counts, int64_t rows) {
  const int64_t B = run.f.c.B;
  int64_t *to = test_allocate((size_t)(B * rows), sizeof *to);
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < at_most(rows, counts[b]); i++)
      to[b * rows + i] = from[b * length + first[b] + i];
  return to;
}

static double *widen(const float *from, int64_t rows, int64_t width, int64_t stride) {
  double *to = test_allocate((size_t)(rows * width), sizeof *to);
  for (int64_t at = 0; at < rows * width; at++)
    to[at] = (double)from[at / width * stride + at % width];
  return to;
}

/* Columns of keys that a ring has dropped show no score. */
static void drop_columns(const generation_step *s, oracle_result *result) {
  const test_case *c = &run.f.c;
  for (int64_t b = 0; run.plan.window && b < c->B; b++) {
    const int64_t first = run.highest[b] - run.plan.capacity;
    for (int64_t row = b * c->H * s->queries; row < (b + 1) * c->H * s->queries; row++)
      for (int64_t j = 0; j < first; j++) {
        for (int stage = 0; stage < 3; stage++)
          result->stage[stage].value[row * s->columns + j] = -INFINITY;
        assert_true(result->stage[3].value[row * s->columns + j] == 0.0);
      }
  }
}

/* The most that rounding number `at` of a row to the cache's type changes it. */
static double half_a_step(const double *row, int64_t at) {
  const int64_t block = test_block_of(run.plan.type), first = at / block * block;
  double largest = 0;
  if (run.plan.type == MHA_F16)
    return 0x1p-11 * fabs(row[at]) + 0x1p-25;
  if (run.plan.type == MHA_BF16)
    return 0x1p-8 * fabs(row[at]);
  for (int64_t k = first; k < first + block; k++)
    largest = fmax(largest, fabs(row[k]));
  /* the scale is rounded to 11 bits, by which 127 steps may miss 127 */
  return largest / 127.0 * (0.5 + 127.0 * 0x1p-11) * (1.0 + 0x1p-10) + 0x1p-25;
}

/* Keys or values as the cache holds them, [B][columns][width]: the projections, rounded. Tokens
 * that a ring has dropped are 0. */
static double *cached_rows(const generation_step *s, bool values, const oracle_numbers *projected) {
  const test_case *c = &run.f.c;
  const int64_t width = c->G * (values ? c->dv : c->d);
  float *row = test_allocate((size_t)width, sizeof *row);
  double *rows = test_allocate((size_t)(c->B * s->columns * width), sizeof *rows);
  for (int64_t b = 0; b < c->B; b++) {
    const int64_t first = run.plan.window ? at_least(run.highest[b] - run.plan.capacity, 0) : 0;
    for (int64_t t = first; t < s->after[b]; t++) {
      const int64_t at = (b * s->columns + t) * width;
      test_expect(mha_element_convert((int32_t)run.plan.type, generation_cached_row(values, b, t),
                                      MHA_F32, row, width, NULL),
                  MHA_OK, NULL);
      for (int64_t j = 0; j < width; j++) {
        test_near(values ? "cached value" : "cached key", (double)row[j], projected->value[at + j],
                  projected->bound[at + j] + half_a_step(projected->value + at, j));
        rows[at + j] = (double)row[j];
      }
    }
  }
  free(row);
  return rows;
}

/* The same call with the keys and values that the cache holds, of which nothing is projected, and
 * with the queries that were. */
static void attend_to_cached_rows(const generation_step *s, const oracle_problem *problem,
                                  oracle_result *result) {
  const test_case *c = &run.f.c;
  oracle_problem p = *problem;
  oracle_result attended;
  double *key = cached_rows(s, false, &result->k), *value = cached_rows(s, true, &result->v);
  p.wq = p.wk = p.wv = (oracle_matrix){.numbers = NULL};
  p.norm = ORACLE_NORM_NONE;
  p.rope = ORACLE_ROPE_NONE;
  p.Eq = c->H * c->d;
  p.Ek = c->G * c->d;
  p.Ev = c->G * c->dv;
  p.query = result->q.value;
  p.key = key;
  p.value = value;
  oracle_solve(&p, &attended);
  oracle_free(result);
  *result = attended;
  free(key);
  free(value);
}

/* The call as a problem of its own: all tokens so far as keys, the call's rows as queries. */
static void ask_step(const generation_step *s, oracle_result *result) {
  const test_case *c = &run.f.c;
  const int64_t zeros[GENERATION_MOST_ENTRIES] = {0}, rows = c->B * s->queries;
  oracle_problem p = run.p;
  double *bias = s->bias ? widen(s->bias, rows * c->H, s->columns, s->columns) : NULL;
  double *residual = c->accumulate ? widen(s->y_before, rows, c->Eo, c->Eo + run.plan.gap) : NULL;
  double *query = copy_rows(run.p.query, c->Lq, c->Eq, s->before, s->live, s->queries);
  double *key = copy_rows(run.p.key, c->Lk, c->Ek, zeros, s->after, s->columns);
  double *value = copy_rows(run.p.value, c->Lk, c->Ev, zeros, s->after, s->columns);
  int64_t *query_positions =
      copy_positions(run.p.query_positions, c->Lq, s->before, s->live, s->queries);
  int64_t *key_positions = copy_positions(run.p.key_positions, c->Lk, zeros, s->after, s->columns);
  p.Lq = s->queries;
  p.Lk = s->columns;
  p.query = query;
  p.key = key;
  p.value = value;
  p.query_positions = query_positions;
  p.key_positions = key_positions;
  p.attend = s->mask;
  p.bias = bias;
  p.residual = residual;
  p.alignment = ORACLE_OFFSET;
  p.offsets = s->before;
  p.query_lengths = s->live;
  p.key_lengths = s->after;
  oracle_solve(&p, result);
  if (run.plan.type != MHA_F32)
    attend_to_cached_rows(s, &p, result);
  drop_columns(s, result);
  free(bias);
  free(residual);
  free(query);
  free(key);
  free(value);
  free(query_positions);
  free(key_positions);
}

static void judge_results(const generation_step *s, const oracle_result *result) {
  const test_case *c = &run.f.c;
  const int stage = c->stage == MHA_STAGE_WEIGHTS  ? 3
                    : c->stage == MHA_STAGE_SCALED ? 0
                                                   : (int)c->stage - 1;
  const oracle_numbers *weights = &result->stage[stage];
  if (s->results.weights)
    test_compare("weights", (test_shape){{c->B, c->H, s->queries, s->columns}}, s->weights,
                 weights->value, weights->bound);
  if (s->results.average)
    test_compare("average", (test_shape){{1, c->B, s->queries, s->columns}}, s->average,
                 result->average.value, result->average.bound);
  if (s->results.log_sum_exp)
    test_compare("log_sum_exp", (test_shape){{1, c->B, c->H, s->queries}}, s->lse,
                 result->lse.value, result->lse.bound);
}

void step_judge(const generation_step *s) {
  const test_case *c = &run.f.c;
  oracle_result result;
  ask_step(s, &result);
  float *output = step_output(s);
  test_compare("output", (test_shape){{1, c->B, s->queries, c->Eo}}, output, result.output.value,
               result.output.bound);
  judge_results(s, &result);
  for (int64_t b = 0; b < c->B; b++)
    for (int64_t i = 0; i < s->live[b]; i++)
      memcpy(run.outputs + (b * c->Lq + s->before[b] + i) * c->Eo,
             output + (b * s->queries + i) * c->Eo, (size_t)c->Eo * sizeof(float));
  free(output);
  oracle_free(&result);
}

void step_try(generation_step s) {
  step_call(&s);
  step_judge(&s);
  step_free(&s);
}

/* ---- Many calls ------------------------------------------------------------------------------ */

void generation_advance(int64_t n, const int64_t *counts) {
  step_try((generation_step){.queries = n, .keys = n, .counts = counts});
}

float *generation_advance_for_bits(int64_t n, const int64_t *counts) {
  generation_step s = {.queries = n, .keys = n, .counts = counts};
  step_call(&s);
  float *output = step_output(&s);
  step_free(&s);
  return output;
}

int64_t generation_largest_chunk(void) {
  const generation_plan *p = &run.plan;
  return p->window ? p->capacity - p->window - p->rollback + 1 : p->capacity;
}

void generation_prefill(int64_t tokens) {
  for (int64_t left = tokens; left > 0; left -= at_most(left, generation_largest_chunk()))
    free(generation_advance_for_bits(at_most(left, generation_largest_chunk()), NULL));
}

static void advance_unevenly(int64_t n) {
  const test_case *c = &run.f.c;
  int64_t counts[GENERATION_MOST_ENTRIES];
  for (int64_t b = 0; b < c->B; b++)
    counts[b] = at_most(test_random_range(&run.f.random, 0, n), c->Lq - run.length[b]);
  generation_advance(n, counts);
}

static bool is_complete(void) {
  bool complete = true;
  for (int64_t b = 0; b < run.f.c.B; b++)
    complete = complete && run.length[b] == run.f.c.Lq;
  return complete;
}

void generation_finish(generation_schedule schedule) {
  const int64_t L = run.f.c.Lq, most = at_most(generation_largest_chunk(), L);
  for (int64_t t = 0; !is_complete();) {
    int64_t n = schedule == GENERATION_AT_ONCE ? most : schedule == GENERATION_ONE_BY_ONE ? 1 : 0;
    if (n == 0)
      n = test_random_range(&run.f.random, 1, at_most(most, 7));
    if (schedule == GENERATION_UNEVEN) {
      advance_unevenly(n);
    } else {
      n = at_most(n, L - t);
      generation_advance(n, NULL);
      t += n;
    }
  }
}

void generation_compare_with_whole(void) {
  oracle_result whole;
  const test_case *c = &run.f.c;
  if (!c->causal || c->accumulate || run.plan.type != MHA_F32)
    return;
  test_ask_oracle(&run.f, &whole);
  test_compare("output of all calls", (test_shape){{1, c->B, c->Lq, c->Eo}}, run.outputs,
               whole.output.value, whole.output.bound);
  oracle_free(&whole);
}

void generation_try(const generation_plan *plan, generation_schedule schedule) {
  generation_open(plan);
  generation_finish(schedule);
  generation_compare_with_whole();
  generation_close();
}
