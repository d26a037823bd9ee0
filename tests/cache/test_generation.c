/* A layer with a cache: the same tokens at once, in chunks or one by one, in full caches and rings,
 * each call judged by itself; what must change no bit; what is refused. */
#include "fixture.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { MOST_ENTRIES = 4 };

/* ---- A sequence that is generated ------------------------------------------------------------ */

/* What to try: the tokens of `c` (Lq of them in each of its B entries), and their cache. */
typedef struct plan {
  test_case c;
  int64_t capacity; /* 0 = as many as there are tokens */
  int64_t window, rollback;
  int64_t entries; /* of the cache; 0 = B. With more, batch entries use them from behind */
  int64_t gap;     /* between rows of inputs and outputs */
} test_plan;

/* The tokens, the judge's view of them, and how far each entry is. */
typedef struct run {
  test_plan plan;
  test_fixture f;
  oracle_problem p;
  mha_weights *weights;
  mha_context *context;
  mha_cache *cache;
  int64_t entries[MOST_ENTRIES];                       /* of the cache, by batch entry */
  int64_t length[MOST_ENTRIES], highest[MOST_ENTRIES]; /* by batch entry */
  float *outputs;                                      /* [B][Lq][Eo] of all calls */
} run;

static run r; /* one at a time; too large for a stack */

static void *allocate(size_t n, size_t bytes) {
  void *memory = calloc(n + 1, bytes);
  assert_non_null(memory);
  return memory;
}

static mha_cache_options cache_options(const test_plan *plan, const test_case *c,
                                       test_allocator *allocator) {
  mha_cache_options o;
  MHA_INIT(&o);
  o.n_entries = plan->entries ? plan->entries : c->B;
  o.capacity = plan->capacity ? plan->capacity : c->Lq;
  o.n_kv_heads = c->G;
  o.head_size = c->d;
  o.value_head_size = c->dv;
  o.window = plan->window;
  o.rollback = plan->rollback;
  o.allocator = &allocator->mha;
  return o;
}

static void open_run(const test_plan *plan) {
  mha_error error;
  memset(&r, 0, sizeof r);
  r.plan = *plan;
  test_build(&r.f, &plan->c);
  const test_case *c = &r.f.c;
  assert_true(c->B <= MOST_ENTRIES);
  const mha_cache_options o = cache_options(plan, c, &r.f.allocator);
  r.plan.capacity = o.capacity;
  test_problem(&r.f, &r.p);
  test_expect(mha_weights_create(&r.f.config, &r.f.matrices, &r.weights, &error), MHA_OK, &error);
  test_expect(mha_context_create(&r.f.options, &r.context, &error), MHA_OK, &error);
  test_expect(mha_cache_create(&o, &r.cache, &error), MHA_OK, &error);
  for (int64_t b = 0; b < c->B; b++)
    r.entries[b] = plan->entries ? plan->entries - 1 - b : b;
  r.outputs = allocate((size_t)(c->B * c->Lq * c->Eo), sizeof *r.outputs);
}

static void close_run(void) {
  mha_cache_destroy(r.cache);
  mha_context_destroy(r.context);
  mha_weights_destroy(r.weights);
  test_allocator_check(&r.f.allocator);
  test_problem_free(&r.p);
  test_release(&r.f);
  free(r.outputs);
}

static int64_t at_least(int64_t a, int64_t b) {
  return a > b ? a : b;
}

static int64_t at_most(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* ---- One call -------------------------------------------------------------------------------- */

/* `keys` rows of new tokens and `queries` rows of queries, of which counts[b] are tokens; counts
 * NULL = all. Filled in by call_step, freed by free_step. */
typedef struct step {
  mha_cache_mode mode;
  int64_t queries, keys;
  const int64_t *counts;
  int64_t before[MOST_ENTRIES], after[MOST_ENTRIES], live[MOST_ENTRIES]; /* live queries */
  int64_t columns;                                                       /* Lk */
  test_pool pool;
  float *x, *k, *v, *y, *y_before;
  unsigned char *mask;
  float *bias, *weights, *average, *lse;
  int64_t *positions;
  mha_rules rules;
  mha_results results;
  mha_forward_args args;
} step;

/* Rows of one of the caller's arrays, poison where no token is. */
static float *gather_rows(step *s, const test_view *from, int64_t rows, const int64_t *counts) {
  const int64_t width = from->size, stride = width + r.plan.gap;
  const int64_t B = r.f.c.B;
  if (rows == 0)
    return test_pool_floats(&s->pool, 1);
  float *to = test_pool_floats(&s->pool, B * rows * stride - r.plan.gap);
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < at_most(rows, counts[b]); i++)
      memcpy(to + (b * rows + i) * stride, test_at(from, b, s->before[b] + i, 0, 0),
             (size_t)width * sizeof *to);
  return to;
}

/* Index of cell (b, h, query i of the call, j) in the mask of the whole sequence. */
static int64_t whole_cell(const step *s, int64_t b, int64_t h, int64_t i, int64_t j) {
  const test_case *c = &r.f.c;
  return ((b * c->H + h) * c->Lq + s->before[b] + i) * c->Lk + j;
}

static void gather_masks(step *s) {
  const test_case *c = &r.f.c;
  const int64_t cells = c->B * c->H * s->queries * s->columns;
  s->mask = r.p.attend ? test_pool_bytes(&s->pool, (size_t)cells) : NULL;
  s->bias = r.p.bias ? test_pool_floats(&s->pool, cells) : NULL;
  for (int64_t b = 0, at = 0; b < c->B; b++)
    for (int64_t h = 0; h < c->H; h++)
      for (int64_t i = 0; i < s->queries; i++)
        for (int64_t j = 0; j < s->columns; j++, at++) {
          if (i >= s->live[b] || j >= s->after[b])
            continue;
          if (s->mask)
            s->mask[at] = r.p.attend[whole_cell(s, b, h, i, j)];
          if (s->bias)
            s->bias[at] = (float)r.p.bias[whole_cell(s, b, h, i, j)];
        }
  if (s->mask)
    s->rules.attend = (mha_mask){s->mask, c->B, c->H, s->queries, s->columns, 0, 0, 0, 0, 0};
  if (s->bias)
    s->rules.bias = (mha_bias){s->bias, c->B, c->H, s->queries, s->columns, 0, 0, 0, 0, 0};
}

static void place_results(step *s) {
  const test_case *c = &r.f.c;
  const int64_t rows = c->B * s->queries, stride = c->Eo + r.plan.gap;
  const int64_t floats = rows > 0 ? rows * stride - r.plan.gap : 1;
  s->y = test_pool_floats(&s->pool, floats);
  s->y_before = test_pool_floats(&s->pool, floats);
  if (c->accumulate)
    for (int64_t row = 0; row < rows; row++)
      test_fill_normal(&r.f.random, s->y + row * stride, c->Eo, 1.0);
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
static void gather_positions(step *s) {
  const test_case *c = &r.f.c;
  if (!r.f.query_positions)
    return;
  s->positions = test_pool_bytes(&s->pool, (size_t)(c->B * s->queries) * sizeof *s->positions);
  for (int64_t b = 0; b < c->B; b++)
    for (int64_t i = 0; i < s->queries; i++)
      s->positions[b * s->queries + i] =
          i < s->live[b] ? r.f.query_positions[b * c->Lq + s->before[b] + i] : INT64_MIN;
}

static void fill_args(step *s) {
  const test_case *c = &r.f.c;
  mha_forward_args *a = &s->args;
  const int64_t gap = r.plan.gap;
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
  a->cache = r.cache;
  a->cache_entries = r.plan.entries ? r.entries : NULL;
  a->new_lengths = s->counts;
  a->expected_lengths = r.length;
  a->query_position = c->query_position;
  a->key_position = self || !appends ? 0 : c->key_position;
  a->query_positions = s->positions;
}

/* Sizes, inputs and arguments of the next call. */
static void prepare_step(step *s) {
  const test_case *c = &r.f.c;
  const int64_t rows = s->mode == MHA_CACHE_ATTEND ? s->queries : s->keys;
  int64_t new_keys[MOST_ENTRIES] = {0};
  for (int64_t b = 0; b < c->B; b++) {
    const int64_t n = s->counts ? s->counts[b] : rows;
    new_keys[b] = s->mode == MHA_CACHE_ATTEND ? 0 : n;
    s->live[b] = at_most(s->counts ? n : s->queries, s->queries);
    s->before[b] = r.length[b];
    s->after[b] = r.length[b] + new_keys[b];
    s->columns = at_least(s->columns, s->after[b]);
  }
  if (s->mode == MHA_CACHE_ATTEND) /* queries of the last tokens */
    for (int64_t b = 0; b < c->B; b++)
      s->before[b] -= s->live[b];
  s->rules = r.f.rules;
  s->results = r.f.results;
  s->rules.alignment = s->mode == MHA_CACHE_ATTEND ? MHA_ALIGN_BOTTOM_RIGHT : r.f.rules.alignment;
  s->x = gather_rows(s, &r.f.query, s->queries, s->live);
  s->k = gather_rows(s, &r.f.key, s->keys, new_keys);
  s->v = gather_rows(s, &r.f.value, s->keys, new_keys);
  gather_masks(s);
  place_results(s);
  gather_positions(s);
  fill_args(s);
}

static void commit_step(const step *s) {
  for (int64_t b = 0; b < r.f.c.B; b++) {
    int64_t length = -1;
    test_expect(mha_cache_length(r.cache, r.entries[b], &length, NULL), MHA_OK, NULL);
    assert_int_equal(length, s->after[b]);
    r.length[b] = s->after[b];
    r.highest[b] = at_least(r.highest[b], s->after[b]);
  }
}

static void call_step(step *s) {
  mha_error error;
  prepare_step(s);
  test_expect(mha_forward(r.context, r.weights, &s->args, &error), MHA_OK, &error);
  commit_step(s);
}

static void free_step(step *s) {
  test_pool_free(&s->pool);
}

/* ---- The judge of one call ------------------------------------------------------------------- */

static double *copy_rows(const double *from, int64_t length, int64_t width, const int64_t *first,
                         const int64_t *counts, int64_t rows) {
  const int64_t B = r.f.c.B;
  double *to = allocate((size_t)(B * rows * width), sizeof *to);
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < at_most(rows, counts[b]); i++)
      memcpy(to + (b * rows + i) * width, from + (b * length + first[b] + i) * width,
             (size_t)width * sizeof *to);
  return to;
}

static int64_t *copy_positions(const int64_t *from, int64_t length, const int64_t *first,
                               const int64_t *counts, int64_t rows) {
  const int64_t B = r.f.c.B;
  int64_t *to = allocate((size_t)(B * rows), sizeof *to);
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < at_most(rows, counts[b]); i++)
      to[b * rows + i] = from[b * length + first[b] + i];
  return to;
}

static double *widen(const float *from, int64_t rows, int64_t width, int64_t stride) {
  double *to = allocate((size_t)(rows * width), sizeof *to);
  for (int64_t at = 0; at < rows * width; at++)
    to[at] = (double)from[at / width * stride + at % width];
  return to;
}

/* Columns of keys that a ring has dropped show no score. */
static void drop_columns(const step *s, oracle_result *result) {
  const test_case *c = &r.f.c;
  for (int64_t b = 0; r.plan.window && b < c->B; b++) {
    const int64_t first = r.highest[b] - r.plan.capacity;
    for (int64_t row = b * c->H * s->queries; row < (b + 1) * c->H * s->queries; row++)
      for (int64_t j = 0; j < first; j++) {
        for (int stage = 0; stage < 3; stage++)
          result->stage[stage].value[row * s->columns + j] = -INFINITY;
        assert_true(result->stage[3].value[row * s->columns + j] == 0.0);
      }
  }
}

/* The call as a problem of its own: all tokens so far as keys, the call's rows as queries. */
static void ask_step(const step *s, oracle_result *result) {
  const test_case *c = &r.f.c;
  const int64_t zeros[MOST_ENTRIES] = {0}, rows = c->B * s->queries;
  oracle_problem p = r.p;
  double *bias = s->bias ? widen(s->bias, rows * c->H, s->columns, s->columns) : NULL;
  double *residual = c->accumulate ? widen(s->y_before, rows, c->Eo, c->Eo + r.plan.gap) : NULL;
  double *query = copy_rows(r.p.query, c->Lq, c->Eq, s->before, s->live, s->queries);
  double *key = copy_rows(r.p.key, c->Lk, c->Ek, zeros, s->after, s->columns);
  double *value = copy_rows(r.p.value, c->Lk, c->Ev, zeros, s->after, s->columns);
  int64_t *query_positions =
      copy_positions(r.p.query_positions, c->Lq, s->before, s->live, s->queries);
  int64_t *key_positions = copy_positions(r.p.key_positions, c->Lk, zeros, s->after, s->columns);
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
  drop_columns(s, result);
  free(bias);
  free(residual);
  free(query);
  free(key);
  free(value);
  free(query_positions);
  free(key_positions);
}

static void judge_results(const step *s, const oracle_result *result) {
  const test_case *c = &r.f.c;
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

/* Dense copy of a call's output. */
static float *dense_output(const step *s) {
  const int64_t rows = r.f.c.B * s->queries, width = r.f.c.Eo;
  float *to = allocate((size_t)(rows * width), sizeof *to);
  for (int64_t row = 0; row < rows; row++)
    memcpy(to + row * width, s->y + row * (width + r.plan.gap), (size_t)width * sizeof *to);
  return to;
}

static void judge_step(const step *s) {
  const test_case *c = &r.f.c;
  oracle_result result;
  ask_step(s, &result);
  float *output = dense_output(s);
  test_compare("output", (test_shape){{1, c->B, s->queries, c->Eo}}, output, result.output.value,
               result.output.bound);
  judge_results(s, &result);
  for (int64_t b = 0; b < c->B; b++)
    for (int64_t i = 0; i < s->live[b]; i++)
      memcpy(r.outputs + (b * c->Lq + s->before[b] + i) * c->Eo,
             output + (b * s->queries + i) * c->Eo, (size_t)c->Eo * sizeof(float));
  free(output);
  oracle_free(&result);
}

/* Appends counts[b] tokens, at most n, to each entry, and judges the call. */
static void advance(int64_t n, const int64_t *counts) {
  step s = {.queries = n, .keys = n, .counts = counts};
  call_step(&s);
  judge_step(&s);
  free_step(&s);
}

/* The same without a judge; the output's bits, freed by the caller. */
static float *advance_for_bits(int64_t n, const int64_t *counts) {
  step s = {.queries = n, .keys = n, .counts = counts};
  call_step(&s);
  float *output = dense_output(&s);
  free_step(&s);
  return output;
}

/* ---- Schedules ------------------------------------------------------------------------------- */

typedef enum test_schedule { AT_ONCE, IN_CHUNKS, ONE_BY_ONE, UNEVEN, N_SCHEDULES } test_schedule;

static int64_t largest_chunk(void) {
  const test_plan *p = &r.plan;
  return p->window ? p->capacity - p->window - p->rollback + 1 : p->capacity;
}

/* Entries grow by different counts, 0 included. */
static void advance_unevenly(int64_t n) {
  const test_case *c = &r.f.c;
  int64_t counts[MOST_ENTRIES];
  for (int64_t b = 0; b < c->B; b++)
    counts[b] = at_most(test_random_range(&r.f.random, 0, n), c->Lq - r.length[b]);
  advance(n, counts);
}

static bool is_complete(void) {
  bool complete = true;
  for (int64_t b = 0; b < r.f.c.B; b++)
    complete = complete && r.length[b] == r.f.c.Lq;
  return complete;
}

static void generate(test_schedule schedule) {
  const int64_t L = r.f.c.Lq, most = at_most(largest_chunk(), L);
  for (int64_t t = 0; !is_complete();) {
    int64_t n = schedule == AT_ONCE ? most : schedule == ONE_BY_ONE ? 1 : 0;
    if (n == 0)
      n = test_random_range(&r.f.random, 1, at_most(most, 7));
    if (schedule == UNEVEN) {
      advance_unevenly(n);
    } else {
      n = at_most(n, L - t);
      advance(n, NULL);
      t += n;
    }
  }
}

/* Under a causal mask all calls together are the uncached call. */
static void compare_with_whole(void) {
  oracle_result whole;
  const test_case *c = &r.f.c;
  if (!c->causal || c->accumulate)
    return;
  test_ask_oracle(&r.f, &whole);
  test_compare("output of all calls", (test_shape){{1, c->B, c->Lq, c->Eo}}, r.outputs,
               whole.output.value, whole.output.bound);
  oracle_free(&whole);
}

static void try_plan(const test_plan *plan, test_schedule schedule) {
  open_run(plan);
  generate(schedule);
  compare_with_whole();
  close_run();
}

/* ---- At once, in chunks, one by one ---------------------------------------------------------- */

static test_case small_case(uint64_t seed) {
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

/* Mask kind `kind` of N_KINDS. */
enum { N_KINDS = 10 };

static void set_kind(test_case *c, int kind) {
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

static void every_mask_in_every_schedule(void **state) {
  const int64_t groups[] = {4, 2, 1};
  (void)state;
  for (int kind = 0; kind < N_KINDS; kind++)
    for (size_t g = 0; g < COUNT(groups); g++)
      for (int schedule = 0; schedule < N_SCHEDULES; schedule++) {
        test_plan plan = {.c = small_case((uint64_t)kind)};
        set_kind(&plan.c, kind);
        plan.c.G = groups[g];
        plan.c.stage = (mha_stage)((kind + schedule) % 4);
        plan.entries = schedule % 2 ? 3 : 0;
        try_plan(&plan, (test_schedule)schedule);
      }
}

/* B37: keys are cached as they were turned; chunks, offsets and tables do not matter. */
static void b37_cached_keys_and_positions(void **state) {
  (void)state;
  for (int rope = 1; rope <= 2; rope++)
    for (int norm = 0; norm <= 2; norm++)
      for (int how = 0; how < 4; how++)
        for (int schedule = 0; schedule < N_SCHEDULES; schedule++) {
          test_plan plan = {.c = small_case(7)};
          plan.c.rope = (mha_rope)rope;
          plan.c.norm = (mha_norm)norm;
          plan.c.rotary = how % 2 ? 2 : 4;
          plan.c.rope_tables = how == 1;
          plan.c.query_position = how == 2 ? 1000 : how == 1 ? 3 : 0;
          plan.c.positions_given = how == 3;
          try_plan(&plan, (test_schedule)schedule);
        }
}

static test_case sample_case(test_random *random, uint64_t seed) {
  const int64_t heads[][2] = {{1, 1}, {4, 4}, {4, 2}, {4, 1}, {6, 3}, {8, 1}};
  const size_t h = (size_t)test_random_range(random, 0, COUNT(heads) - 1);
  test_case c = {.seed = seed,
                 .B = test_random_range(random, 1, 3),
                 .Lq = test_random_range(random, 1, 60),
                 .H = heads[h][0],
                 .G = heads[h][1],
                 .d = 2 * test_random_range(random, 1, 6),
                 .dv = test_random_range(random, 1, 9),
                 .Eq = 8,
                 .Eo = test_random_range(random, 1, 9),
                 .threads = test_random_range(random, 0, 7) ? 1 : 2,
                 .at_front = test_random_range(random, 0, 1),
                 .out_in = test_random_range(random, 0, 1),
                 .biases = (unsigned)test_random_range(random, 0, TEST_ALL),
                 .source = (test_source)test_random_range(random, TEST_CROSS, TEST_SELF),
                 .accumulate = test_random_range(random, 0, 3) == 0,
                 .causal = test_random_range(random, 0, 3) > 0,
                 .window = test_random_range(random, 0, 1),
                 .left = test_random_range(random, -1, 12),
                 .right = test_random_range(random, -1, 2),
                 .has_mask = test_random_range(random, 0, 2) == 0,
                 .has_bias = test_random_range(random, 0, 2) == 0,
                 .bias_hides = test_random_range(random, 0, 1),
                 .mask_extents = TEST_FULL,
                 .bias_extents = TEST_FULL,
                 .alibi = test_random_range(random, 0, 2) == 0,
                 .sinks = test_random_range(random, 0, 2) == 0,
                 .softcap = test_random_range(random, 0, 2) ? 0.0F : 2.0F,
                 .scale_given = test_random_range(random, 0, 2) == 0,
                 .scale = (float)test_random_uniform(random, -0.5, 0.5),
                 .norm = (mha_norm)test_random_range(random, 0, 2),
                 .rope = (mha_rope)test_random_range(random, 0, 2),
                 .want = (unsigned)test_random_range(random, 0, TEST_WANT_ALL),
                 .stage = (mha_stage)test_random_range(random, 0, 3)};
  c.Lk = c.Lq;
  c.query_position = c.key_position = test_random_range(random, 0, 1) * 11;
  c.rope_tables = test_random_range(random, 0, 1);
  return c;
}

static void a_sample_of_full_caches(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 21);
  for (uint64_t seed = 0; seed < (test_small() ? 40 : 120); seed++) {
    test_plan plan = {.c = sample_case(&random, seed)};
    plan.capacity = plan.c.Lq + test_random_range(&random, 0, 1) * 5;
    plan.entries = test_random_range(&random, 0, 1) * MOST_ENTRIES;
    plan.gap = test_random_range(&random, 0, 1) * 3;
    try_plan(&plan, (test_schedule)test_random_range(&random, 0, N_SCHEDULES - 1));
  }
}

/* Windows that a ring holds, at the least capacities and odd ones; the sequence is many times as
 * long as the capacity. */
static void a_sample_of_rings(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 22);
  for (uint64_t seed = 0; seed < (test_small() ? 40 : 120); seed++) {
    test_plan plan = {.c = sample_case(&random, seed)};
    plan.c.Lq = plan.c.Lk = test_random_range(&random, 30, 55);
    plan.c.window = true;
    plan.c.left = test_random_range(&random, 0, 12);
    plan.window = plan.c.left + 1;
    plan.rollback = test_random_range(&random, 0, 1) * 2;
    plan.capacity = plan.window + plan.rollback + test_random_range(&random, 0, 6);
    plan.entries = test_random_range(&random, 0, 1) * MOST_ENTRIES;
    try_plan(&plan, (test_schedule)test_random_range(&random, 0, N_SCHEDULES - 1));
  }
}

/* Long enough for the parts and tiles of the usual build: a prefill, then single tokens and small
 * chunks across 256 and 512 keys, and a ring of 300 across both. */
static void across_the_borders_of_parts(void **state) {
  const int64_t starts[] = {14, 126, 250, 506};
  (void)state;
  for (int ring = 0; ring < 2; ring++)
    for (size_t at = 0; at < (test_small() ? 1 : COUNT(starts)); at++)
      for (int64_t n = 1; n <= 9; n += at % 2 ? 4 : 2) {
        test_plan plan = {.c = {.seed = at,
                                .Lq = starts[at] + 3 * n + 5,
                                .H = 6,
                                .G = 3,
                                .d = 8,
                                .Eq = 12,
                                .source = TEST_SELF,
                                .causal = true,
                                .rope = MHA_ROPE_HALVES,
                                .want = TEST_WANT_ALL,
                                .stage = (mha_stage)(n % 4)}};
        if (ring) {
          plan.c.window = true;
          plan.c.left = 99;
          plan.c.right = -1;
          plan.window = 100;
          plan.capacity = 301;
        }
        open_run(&plan);
        for (int64_t left = starts[at]; left > 0; left -= at_most(left, largest_chunk()))
          free(advance_for_bits(at_most(left, largest_chunk()), NULL));
        for (int call = 0; call < 3; call++)
          advance(n, NULL);
        for (int call = 0; call < 5; call++)
          advance(1, NULL);
        close_run();
      }
}

/* Fewer or more queries than new keys: query i sits at its own token, the i-th new one. */
static void queries_and_keys_of_different_counts(void **state) {
  (void)state;
  for (int64_t queries = 0; queries <= 5; queries++)
    for (int64_t keys = 0; keys <= 5; keys++)
      for (int counted = 0; counted < 2; counted++) {
        int64_t counts[MOST_ENTRIES] = {keys, keys / 2};
        test_plan plan = {.c = small_case(9)};
        plan.c.source = TEST_CROSS;
        plan.c.Lk = plan.c.Lq;
        plan.c.rope = MHA_ROPE_INTERLEAVED;
        open_run(&plan);
        for (int round = 0; round < 3; round++) {
          step s = {.queries = queries, .keys = keys, .counts = counted ? counts : NULL};
          call_step(&s);
          judge_step(&s);
          free_step(&s);
        }
        close_run();
      }
}

/* B16: the newest key obeys the mask like any other. */
static void b16_the_newest_key_is_masked_too(void **state) {
  (void)state;
  for (int64_t hidden = 0; hidden < 4; hidden += 3) {
    test_plan plan = {.c = small_case(1)};
    plan.c.has_mask = true;
    open_run(&plan);
    for (int64_t at = 0; at < r.f.mask_bytes; at++)
      r.f.mask[at] = at % r.f.c.Lk != hidden;
    test_problem_free(&r.p);
    test_problem(&r.f, &r.p);
    advance(3, NULL);
    step s = {.queries = 1, .keys = 1};
    call_step(&s);
    judge_step(&s);
    for (int64_t row = 0; row < r.f.c.B * r.f.c.H; row++)
      assert_true(s.weights[row * 4 + hidden] == 0.0F);
    free_step(&s);
    close_run();
  }
}

/* ---- What changes no bit --------------------------------------------------------------------- */

/* The numbers of the cache, to be spoiled. */
static float *cache_numbers(bool values, int64_t *per_entry, int64_t *width) {
  mha_tensor k, v;
  test_expect(mha_cache_view(r.cache, &k, &v, NULL), MHA_OK, NULL);
  const mha_tensor *t = values ? &v : &k;
  *per_entry = t->batch_stride;
  *width = t->row_stride;
  return (float *)(uintptr_t)t->data;
}

/* B17: rows behind the length hold anything. */
static void b17_unwritten_rows_change_no_bit(void **state) {
  const float fillings[] = {0.0F, 1e30F, NAN, INFINITY, -INFINITY};
  (void)state;
  for (int64_t n = 1; n <= 9; n += 4) {
    float *expected = NULL;
    for (size_t fill = 0; fill < COUNT(fillings); fill++) {
      test_plan plan = {.c = small_case(2)};
      const int64_t counts[] = {n, n / 2};
      plan.c.Lq = 400;
      plan.c.want = 0;
      open_run(&plan);
      for (int values = 0; values < 2; values++) {
        int64_t per_entry = 0, width = 0;
        float *numbers = cache_numbers(values, &per_entry, &width);
        for (int64_t at = 0; at < 2 * per_entry; at++)
          numbers[at] = fillings[fill];
      }
      free(advance_for_bits(261, NULL));
      float *output = advance_for_bits(n, counts);
      if (expected)
        test_same_bits("output", (test_shape){{1, 2, n, r.f.c.Eo}}, output, expected);
      else
        expected = output;
      if (output != expected)
        free(output);
      close_run();
    }
    free(expected);
  }
}

/* A row of n tokens' queries that see token j: those after it within the window. */
static void spoil_token(int64_t token, bool value, float number) {
  int64_t per_entry = 0, width = 0;
  float *numbers = cache_numbers(value, &per_entry, &width);
  const int64_t row = r.plan.window ? token % r.plan.capacity : token;
  numbers[row * width] = number; /* head 0, element 0, of entry 0 */
}

/* NaN and infinity in a key or value: queries that a window keeps from it keep every bit, those
 * that see it are no numbers (an infinite value may be NaN or inf), and other entries do not know.
 */
static void broken_tokens_reach_those_that_see_them(void **state) {
  const float bad[] = {NAN, INFINITY, -INFINITY};
  enum { WINDOW = 40, TOKENS = 300, TOKEN = 270 };
  (void)state;
  for (int ring = 0; ring < 2; ring++)
    for (int value = 0; value < 2; value++)
      for (size_t which = 0; which < COUNT(bad); which++)
        for (int64_t n = 1; n <= 12; n += 5) {
          float *outputs[2];
          for (int spoiled = 0; spoiled < 2; spoiled++) {
            test_plan plan = {.c = small_case(3)};
            plan.c.Lq = 400;
            plan.c.want = 0;
            plan.c.window = true;
            plan.c.left = WINDOW - 1;
            plan.c.right = -1;
            plan.c.absent = TEST_O;
            plan.c.Eo = 12;
            plan.window = ring ? WINDOW : 0;
            plan.capacity = ring ? 97 : 0;
            open_run(&plan);
            for (int64_t t = 0; t < TOKENS; t += 50)
              free(advance_for_bits(50, NULL));
            if (spoiled)
              spoil_token(TOKEN, value, bad[which]);
            for (int64_t t = TOKENS; t + n <= 340; t += n) {
              float *output = advance_for_bits(n, NULL);
              for (int64_t b = 0; b < 2; b++)
                memcpy(r.outputs + (b * 400 + t) * 12, output + b * n * 12,
                       (size_t)n * 12 * sizeof(float));
              free(output);
            }
            outputs[spoiled] = r.outputs;
            r.outputs = NULL;
            close_run();
          }
          for (int64_t b = 0; b < 2; b++)
            for (int64_t t = TOKENS; t < 340; t++)
              for (int64_t c = 0; c < 12; c++) {
                const int64_t at = (b * 400 + t) * 12 + c;
                /* key head 0 serves the first two of four heads; the output is their concat */
                const bool sees = b == 0 && t < TOKEN + WINDOW && c < 6;
                if (!sees)
                  assert_true(test_equal_bits(outputs[0][at], outputs[1][at]));
                else if (isnan(bad[which]) || (value && c % 3 == 0))
                  assert_true(isfinite(outputs[1][at]) == 0);
              }
          free(outputs[0]);
          free(outputs[1]);
        }
}

/* Prefill, decode and the bits of both, with one of several settings. */
typedef struct bits {
  float *prefill, *decode[6];
} bits;

static bits take_bits(const test_plan *plan, int64_t start, int64_t n) {
  bits b = {NULL, {NULL}};
  open_run(plan);
  for (int64_t left = start; left > 0; left -= at_most(left, largest_chunk())) {
    free(b.prefill);
    b.prefill = advance_for_bits(at_most(left, largest_chunk()), NULL);
  }
  for (size_t i = 0; i < COUNT(b.decode); i++)
    b.decode[i] = advance_for_bits(n, NULL);
  close_run();
  return b;
}

static void free_bits(bits *b) {
  free(b->prefill);
  for (size_t i = 0; i < COUNT(b->decode); i++)
    free(b->decode[i]);
}

static void same_decode(const bits *a, const bits *b, int64_t B, int64_t n, int64_t Eo) {
  for (size_t i = 0; i < COUNT(a->decode); i++)
    test_same_bits("decode", (test_shape){{1, B, n, Eo}}, a->decode[i], b->decode[i]);
}

/* Runs the plan with one thread and nothing asked for, then with others; `variant` counts on. */
static void try_threads(test_plan plan, int64_t start, int64_t n, int variant) {
  const int threads[] = {1, 2, 3, 8};
  plan.c.want = 0;
  plan.c.threads = 1;
  bits first = take_bits(&plan, start, n);
  for (int i = 0; i < 2; i++) { /* all four, over two calls of this function */
    plan.c.threads = threads[(2 * variant + i) % 4];
    plan.c.want = i ? TEST_WANT_ALL : TEST_WANT_AVERAGE;
    plan.c.stage = (mha_stage)((variant + i) % 4);
    bits b = take_bits(&plan, start, n);
    same_decode(&first, &b, plan.c.B, n, plan.c.Eo);
    free_bits(&b);
  }
  free_bits(&first);
}

static void threads_and_results_change_no_bit(void **state) {
  const int64_t start = test_small() ? 60 : 600;
  int variant = 0;
  (void)state;
  for (int ring = 0; ring < 2; ring++)
    for (int64_t n = 1; n <= 9; n += 4)
      for (int kind = (int)n / 4; kind < N_KINDS; kind += 4) {
        test_plan plan = {.c = small_case(4)};
        set_kind(&plan.c, kind);
        plan.c.Lq = start + 60;
        plan.c.H = 8;
        plan.c.d = 16;
        plan.c.rope = MHA_ROPE_HALVES;
        plan.c.has_mask = plan.c.has_bias = false; /* they grow with the square of the length */
        if (ring) {
          plan.c.window = true;
          plan.c.left = test_small() ? 28 : 280;
          plan.window = plan.c.left + 1;
          plan.capacity = plan.window + (test_small() ? 9 : 52);
        }
        try_threads(plan, start, n, variant++);
      }
}

static void backwards(void *user, int64_t n, mha_task *task, void *argument) {
  int64_t *calls = user;
  ++*calls;
  for (int64_t i = n - 1; i >= 0; i--)
    task(argument, i);
}

static void a_caller_s_loop_changes_no_bit(void **state) {
  (void)state;
  for (int64_t n = 1; n <= 9; n += 8) {
    bits both[2];
    int64_t calls = 0;
    for (int own = 0; own < 2; own++) {
      test_plan plan = {.c = small_case(5)};
      plan.c.Lq = 700;
      plan.c.H = 8;
      plan.c.d = 16;
      plan.c.threads = 3;
      plan.c.want = 0;
      open_run(&plan);
      if (own) {
        mha_context_destroy(r.context);
        r.f.options.parallel_for = backwards;
        r.f.options.parallel_user = &calls;
        test_expect(mha_context_create(&r.f.options, &r.context, NULL), MHA_OK, NULL);
      }
      both[own].prefill = advance_for_bits(600, NULL);
      for (size_t i = 0; i < COUNT(both[own].decode); i++)
        both[own].decode[i] = advance_for_bits(n, NULL);
      close_run();
    }
    assert_true(calls > 0 || test_blas_is_serial());
    same_decode(&both[0], &both[1], 2, n, 7);
    free_bits(&both[0]);
    free_bits(&both[1]);
  }
}

/* Attending again to the same tokens, nothing appended, gives the same bits. */
static void the_same_call_twice(void **state) {
  (void)state;
  for (int64_t n = 1; n <= 9; n += 4) {
    float *outputs[2];
    test_plan plan = {.c = small_case(6)};
    plan.c.Lq = 300;
    plan.c.want = 0;
    open_run(&plan);
    free(advance_for_bits(300, NULL));
    for (int round = 0; round < 2; round++) {
      step s = {.mode = MHA_CACHE_ATTEND, .queries = n};
      call_step(&s);
      judge_step(&s);
      outputs[round] = dense_output(&s);
      free_step(&s);
    }
    test_same_bits("output", (test_shape){{1, 2, n, 7}}, outputs[0], outputs[1]);
    free(outputs[0]);
    free(outputs[1]);
    close_run();
  }
}

/* ---- Going back, branching, starting anew ---------------------------------------------------- */

static void truncate_run(int64_t length) {
  for (int64_t b = 0; b < r.f.c.B; b++) {
    mha_error error;
    test_expect(mha_cache_truncate(r.cache, r.entries[b], length, &error), MHA_OK, &error);
    r.length[b] = length;
  }
}

/* Tokens that were taken back leave no trace: the bits of a run that never had them. */
static void truncation_then_regrowth(void **state) {
  (void)state;
  for (int ring = 0; ring < 2; ring++)
    for (int64_t guess = 1; guess <= 5; guess++) {
      float *outputs[2];
      for (int guessed = 0; guessed < 2; guessed++) {
        test_plan plan = {.c = small_case(8), .entries = 3};
        plan.c.Lq = 60;
        plan.c.rope = MHA_ROPE_HALVES;
        plan.c.want = 0;
        if (ring) {
          plan.c.window = true;
          plan.c.left = 6;
          plan.c.right = -1;
          plan.window = 7;
          plan.rollback = 5;
          plan.capacity = 17;
        }
        open_run(&plan);
        for (int t = 0; t < 40; t += 5)
          advance(5, NULL);
        for (int round = 0; guessed && round < 3; round++) {
          for (int64_t b = 0; b < 2; b++) /* other numbers than those that follow */
            for (int64_t i = 0; i < 10; i++)
              *test_at(&r.f.query, b, 40 + i, 0, 0) += 3.0F;
          test_problem_free(&r.p);
          test_problem(&r.f, &r.p);
          advance(guess, NULL);
          truncate_run(40);
          for (int64_t b = 0; b < 2; b++)
            for (int64_t i = 0; i < 10; i++)
              *test_at(&r.f.query, b, 40 + i, 0, 0) = 0.25F * (float)i;
          test_problem_free(&r.p);
          test_problem(&r.f, &r.p);
        }
        for (int64_t b = 0; b < 2; b++)
          for (int64_t i = 0; i < 10; i++)
            *test_at(&r.f.query, b, 40 + i, 0, 0) = 0.25F * (float)i;
        test_problem_free(&r.p);
        test_problem(&r.f, &r.p);
        for (int t = 0; t < 5; t++)
          advance(2, NULL);
        outputs[guessed] = r.outputs;
        r.outputs = NULL;
        close_run();
      }
      for (int64_t b = 0; b < 2; b++)
        test_same_bits("regrown", (test_shape){{1, 1, 10, 7}}, outputs[1] + (b * 60 + 40) * 7,
                       outputs[0] + (b * 60 + 40) * 7);
      free(outputs[0]);
      free(outputs[1]);
    }
}

/* Entry 1 becomes entry 0, then both go their own way: the bits of two separate runs. In the
 * fixture both entries have the same first tokens. */
static void a_copied_entry_diverges(void **state) {
  enum { SHARED = 25, MORE = 8 };
  (void)state;
  for (int ring = 0; ring < 2; ring++) {
    float *outputs[2];
    for (int copied = 0; copied < 2; copied++) {
      test_plan plan = {.c = small_case(10)};
      plan.c.Lq = SHARED + MORE;
      plan.c.want = 0;
      if (ring) {
        plan.c.window = true;
        plan.c.left = 9;
        plan.c.right = -1;
        plan.window = 10;
        plan.rollback = 2;
        plan.capacity = 13;
      }
      open_run(&plan);
      for (int64_t t = 0; t < SHARED; t++)
        memcpy(test_at(&r.f.query, 1, t, 0, 0), test_at(&r.f.query, 0, t, 0, 0),
               (size_t)r.f.c.Eq * sizeof(float));
      test_problem_free(&r.p);
      test_problem(&r.f, &r.p);
      for (int64_t t = 0; t < SHARED; t++) {
        const int64_t counts[] = {1, copied ? 0 : 1};
        advance(1, counts);
      }
      if (copied) {
        test_expect(mha_cache_copy_entry(r.cache, 0, 1, NULL), MHA_OK, NULL);
        r.length[1] = r.length[0];
        r.highest[1] = r.highest[0];
      }
      for (int64_t t = 0; t < MORE; t++)
        advance(1, NULL);
      outputs[copied] = r.outputs;
      r.outputs = NULL;
      close_run();
    }
    for (int64_t b = 0; b < 2; b++)
      test_same_bits("after the copy", (test_shape){{1, 1, MORE, 7}},
                     outputs[1] + (b * (SHARED + MORE) + SHARED) * 7,
                     outputs[0] + (b * (SHARED + MORE) + SHARED) * 7);
    free(outputs[0]);
    free(outputs[1]);
  }
}

static void a_reset_entry_is_a_new_one(void **state) {
  (void)state;
  for (int ring = 0; ring < 2; ring++) {
    test_plan plan = {.c = small_case(12)};
    plan.c.window = ring;
    plan.c.left = 3;
    plan.c.right = -1;
    plan.window = ring ? 4 : 0;
    plan.capacity = ring ? 6 : 0;
    open_run(&plan);
    generate(IN_CHUNKS);
    float *first = r.outputs;
    r.outputs = allocate((size_t)(2 * 21 * 7), sizeof *r.outputs);
    for (int64_t b = 0; b < 2; b++) {
      test_expect(mha_cache_reset(r.cache, r.entries[b], NULL), MHA_OK, NULL);
      r.length[b] = r.highest[b] = 0;
    }
    generate(ONE_BY_ONE);
    compare_with_whole();
    free(first);
    close_run();
  }
}

/* ---- Append only, attend only ---------------------------------------------------------------- */

/* One call appends, another attends to what was appended, from a second layer too. */
static void appending_and_attending_apart(void **state) {
  (void)state;
  for (int64_t n = 1; n <= 9; n++)
    for (int rope = 0; rope <= 2; rope++) {
      mha_weights *other = NULL;
      test_plan plan = {.c = small_case(13)};
      plan.c.Lq = 300;
      plan.c.rope = (mha_rope)rope;
      plan.c.norm = (mha_norm)rope;
      plan.c.positions_given = rope && n % 2;
      open_run(&plan);
      for (int round = 0; round < 3; round++) {
        step grow = {.mode = MHA_CACHE_APPEND, .queries = round ? n : 250, .keys = round ? n : 250};
        prepare_step(&grow);
        grow.args.output = NULL;
        grow.args.rules = NULL;
        grow.args.results = NULL;
        test_expect(mha_forward(r.context, r.weights, &grow.args, NULL), MHA_OK, NULL);
        commit_step(&grow);
        free_step(&grow);
        step look = {.mode = MHA_CACHE_ATTEND, .queries = n};
        prepare_step(&look);
        /* BOTTOM_RIGHT is off = length - n, which the rotary positions follow too */
        test_expect(mha_forward(r.context, r.weights, &look.args, NULL), MHA_OK, NULL);
        commit_step(&look);
        judge_step(&look);
        free_step(&look);
      }
      /* another layer's queries and output, over the same keys */
      test_expect(mha_weights_create(&r.f.config, &r.f.matrices, &other, NULL), MHA_OK, NULL);
      mha_weights_destroy(r.weights);
      for (int64_t at = 0; at < 10 * 16; at++)
        ((float *)(uintptr_t)r.f.wq.data)[at] *= -0.5F;
      test_expect(mha_weights_create(&r.f.config, &r.f.matrices, &r.weights, NULL), MHA_OK, NULL);
      test_problem_free(&r.p);
      test_problem(&r.f, &r.p);
      step look = {.mode = MHA_CACHE_ATTEND, .queries = n};
      call_step(&look);
      judge_step(&look);
      free_step(&look);
      mha_weights_destroy(other);
      close_run();
    }
}

/* Two batch entries look at one entry of the cache; new_lengths counts queries. */
static void attending_to_one_entry_twice(void **state) {
  const int64_t counts[] = {3, 1}, entries[] = {1, 1};
  (void)state;
  test_plan plan = {.c = small_case(14), .entries = 2};
  open_run(&plan);
  for (int64_t t = 0; t < 21; t++)
    memcpy(test_at(&r.f.query, 1, t, 0, 0), test_at(&r.f.query, 0, t, 0, 0),
           (size_t)r.f.c.Eq * sizeof(float));
  test_problem_free(&r.p);
  test_problem(&r.f, &r.p);
  advance(15, NULL);
  step s = {.mode = MHA_CACHE_ATTEND, .queries = 3, .counts = counts};
  prepare_step(&s);
  s.args.cache_entries = entries;
  test_expect(mha_forward(r.context, r.weights, &s.args, NULL), MHA_OK, NULL);
  judge_step(&s);
  free_step(&s);
  close_run();
}

/* Nobody has a token yet: every query sees nothing, so each output row is the output's bias. */
static void attending_to_nothing(void **state) {
  (void)state;
  for (int ring = 0; ring < 2; ring++)
    for (int64_t n = 0; n <= 21; n += 7) {
      test_plan plan = {.c = small_case(24), .window = ring ? 6 : 0};
      set_kind(&plan.c, ring ? 2 : 0);
      plan.c.Ek = plan.c.Ev = 5; /* attend only: no key is projected, whatever its width */
      plan.c.Lk = 21;
      plan.c.source = TEST_CROSS;
      plan.c.rope = MHA_ROPE_HALVES;
      open_run(&plan);
      mha_forward_args *a = &r.f.args;
      a->cache = r.cache;
      a->cache_mode = MHA_CACHE_ATTEND;
      a->key = a->value = NULL;
      a->key_length = 0;
      a->query_length = n;
      a->flags = n == 0 ? MHA_ALLOW_EMPTY : 0;
      test_poison_results(&r.f);
      test_expect(mha_forward(r.context, r.weights, a, NULL), MHA_OK, NULL);
      for (int64_t at = 0; at < 2 * 21 * 7; at++) {
        const float bias = r.f.wo.bias[at % 7];
        assert_true(at < 2 * n * 7 ? r.f.output.data[at] == bias
                                   : test_is_poison(r.f.output.data[at]));
      }
      for (int64_t at = 0; at < 2 * n * 4; at++)
        assert_true(r.f.lse[at] == -INFINITY);
      for (int64_t at = 0; at < r.f.weights_n; at++) /* Lk is 0: there are none */
        assert_true(test_is_poison(r.f.weights[at]));
      close_run();
    }
}

/* No entry, no row: nothing happens, in every mode, and pointers may be NULL. */
static void calls_without_rows(void **state) {
  (void)state;
  for (int mode = MHA_CACHE_APPEND_ATTEND; mode <= MHA_CACHE_ATTEND; mode++)
    for (int entries = 0; entries < 2; entries++) {
      mha_forward_args args;
      mha_error error;
      test_plan plan = {.c = small_case(25)};
      open_run(&plan);
      advance(4, NULL);
      MHA_INIT(&args);
      args.cache = r.cache;
      args.cache_mode = (int32_t)mode;
      args.batch = entries ? 2 : 0;
      args.query_length = entries ? 0 : 3;
      test_expect(mha_forward(r.context, r.weights, &args, &error), MHA_OK, &error);
      advance(4, NULL);
      close_run();
    }
}

typedef struct reader {
  pthread_t thread;
  const step *step;
  float *output;
  mha_status status;
} reader;

enum { READERS = 4, ROUNDS = 20 };

static void *attend_often(void *argument) {
  reader *me = argument;
  mha_context *context = NULL;
  mha_context_options options;
  mha_forward_args args = me->step->args;
  MHA_INIT(&options);
  options.n_threads = 1;
  args.results = NULL;
  args.output = me->output;
  me->status = mha_context_create(&options, &context, NULL);
  for (int round = 0; !me->status && round < ROUNDS; round++)
    me->status = mha_forward(context, r.weights, &args, NULL);
  mha_context_destroy(context);
  return NULL;
}

/* Any number of contexts read one cache at once, with the same bits. */
static void many_readers(void **state) {
  reader readers[READERS];
  test_plan plan = {.c = small_case(15)};
  (void)state;
  plan.c.Lq = 300;
  open_run(&plan);
  free(advance_for_bits(300, NULL));
  step s = {.mode = MHA_CACHE_ATTEND, .queries = 2};
  call_step(&s);
  judge_step(&s);
  for (int i = 0; i < READERS; i++) {
    readers[i].step = &s;
    readers[i].output = test_pool_floats(&s.pool, 2 * 2 * 7);
    assert_int_equal(pthread_create(&readers[i].thread, NULL, attend_often, &readers[i]), 0);
  }
  for (int i = 0; i < READERS; i++) {
    assert_int_equal(pthread_join(readers[i].thread, NULL), 0);
    test_expect(readers[i].status, MHA_OK, NULL);
    test_same_bits("reader", (test_shape){{1, 2, 2, 7}}, readers[i].output, s.y);
  }
  free_step(&s);
  close_run();
}

/* ---- What is refused ------------------------------------------------------------------------- */

/* All bytes of the cache that count, its lengths, and the step's results stay as they are. */
static void expect_refused(step *s, mha_status expected, const char *word) {
  const test_case *c = &r.f.c;
  float *twins[2];
  int64_t bytes[2];
  mha_error error;
  for (int values = 0; values < 2; values++) {
    int64_t per_entry = 0, width = 0;
    const float *numbers = cache_numbers(values, &per_entry, &width);
    bytes[values] = (r.plan.entries ? r.plan.entries : c->B) * per_entry * 4;
    twins[values] = allocate((size_t)bytes[values], 1);
    memcpy(twins[values], numbers, (size_t)bytes[values]);
  }
  for (int with_error = 0; with_error < 2; with_error++)
    test_expect(mha_forward(r.context, r.weights, &s->args, with_error ? &error : NULL), expected,
                with_error ? &error : NULL);
  if (!strstr(error.message, word) || !strstr(error.message, "; rule: "))
    test_failed("the message does not name %s: \"%s\"", word, error.message);
  for (int values = 0; values < 2; values++) {
    int64_t per_entry = 0, width = 0;
    assert_memory_equal(cache_numbers(values, &per_entry, &width), twins[values],
                        (size_t)bytes[values]);
    free(twins[values]);
  }
  for (int64_t b = 0; b < c->B; b++) {
    int64_t length = -1; /* nobody is left inside either */
    test_expect(mha_cache_truncate(r.cache, r.entries[b], r.length[b], NULL), MHA_OK, NULL);
    test_expect(mha_cache_length(r.cache, r.entries[b], &length, NULL), MHA_OK, NULL);
    assert_int_equal(length, r.length[b]);
  }
  for (int64_t at = 0; at < c->B * s->queries * c->Eo; at++)
    assert_true(test_equal_bits(s->y[at], s->y_before[at]));
  for (int64_t at = 0; at < c->B * s->queries * c->H; at++)
    assert_true(test_is_poison(s->lse[at]));
}

/* Each row spoils one thing of a call that brings two tokens to entries of three. */
typedef enum spoiled {
  TOO_MANY,
  BAD_ENTRY,
  NEGATIVE_ENTRY,
  ENTRY_TWICE,
  NEGATIVE_COUNT,
  LARGE_COUNT,
  QUERY_LENGTHS,
  KEY_LENGTHS,
  PACKED,
  PACKED_KEYS,
  KEY_POSITIONS,
  KEY_POSITION,
  POSITION_BELOW,
  POSITION_BEHIND,
  ATTEND_WITH_KEY_POSITIONS,
  ATTEND_WITH_KEY_POSITION,
  BAD_MODE,
  NO_CACHE_MODE,
  NO_CACHE_ENTRIES,
  NO_CACHE_COUNTS,
  NO_CACHE_EXPECTED,
  ATTEND_WITH_KEY,
  ATTEND_WITH_VALUE,
  ATTEND_WITH_LENGTH,
  VALUE_ALONE,
  MASK_COLUMNS,
  NO_OUTPUT,
  OUTPUT_IN_CACHE,
  INPUT_IN_CACHE,
  OUTPUT_OVER_COUNTS,
  OUTPUT_OVER_ENTRIES,
  OUTPUT_OVER_EXPECTED,
  UNEXPECTED_LENGTH,
  UNEXPECTED_LENGTH_ATTEND,
  TOO_MANY_ENTRIES,
  N_SPOILED
} spoiled;

typedef struct expected {
  mha_status status;
  const char *word;
} expected;

static int64_t spoiled_counts[MOST_ENTRIES], spoiled_entries[MOST_ENTRIES];
static const int64_t lengths_of_two[] = {2, 2, 2}, starts_of_two[] = {0, 1, 2};
static const int64_t zero_positions[16];
static const uint8_t all_ones[4096] = {1};

static expected spoil_entries(step *s, spoiled what) {
  s->args.cache_entries = spoiled_entries;
  spoiled_entries[0] = 0;
  spoiled_entries[1] = what == BAD_ENTRY ? 3 : what == NEGATIVE_ENTRY ? -1 : 0;
  return (expected){MHA_ERROR_LENGTH, "cache_entries"};
}

static expected spoil_counts(step *s, spoiled what) {
  s->args.new_lengths = spoiled_counts;
  spoiled_counts[0] = 1;
  spoiled_counts[1] = what == NEGATIVE_COUNT ? -1 : s->queries + 1;
  return (expected){MHA_ERROR_LENGTH, "new_lengths"};
}

static expected spoil_rules(step *s, spoiled what) {
  switch (what) {
  case QUERY_LENGTHS:
    s->rules.query_lengths = lengths_of_two;
    return (expected){MHA_ERROR_UNSUPPORTED, "query_lengths"};
  case KEY_LENGTHS:
    s->rules.key_lengths = lengths_of_two;
    return (expected){MHA_ERROR_UNSUPPORTED, "key_lengths"};
  case PACKED:
    s->rules.query_starts = starts_of_two;
    return (expected){MHA_ERROR_UNSUPPORTED, "query_starts"};
  case PACKED_KEYS:
    s->rules.key_starts = starts_of_two;
    return (expected){MHA_ERROR_UNSUPPORTED, "key_starts"};
  default:
    s->rules.attend = (mha_mask){all_ones, 1, 1, 1, s->columns - 1, 0, 0, 0, 0, 0};
    return (expected){MHA_ERROR_SIZE, "attend.columns"};
  }
}

static expected spoil_positions(step *s, spoiled what) {
  switch (what) {
  case ATTEND_WITH_KEY_POSITIONS:
  case ATTEND_WITH_KEY_POSITION:
    s->args.cache_mode = MHA_CACHE_ATTEND;
    s->args.key_positions = what == ATTEND_WITH_KEY_POSITIONS ? zero_positions : NULL;
    s->args.key_position = what == ATTEND_WITH_KEY_POSITION ? 1 : 0;
    return (expected){MHA_ERROR_VALUE,
                      what == ATTEND_WITH_KEY_POSITIONS ? "key_positions" : "key_position is"};
  case KEY_POSITIONS:
    s->args.key_positions = zero_positions;
    return (expected){MHA_ERROR_VALUE, "key_positions"};
  case KEY_POSITION:
    s->args.key_position = 1;
    return (expected){MHA_ERROR_VALUE, "key_position"};
  case POSITION_BELOW:
    s->args.query_position = -4; /* token 3 */
    return (expected){MHA_ERROR_LENGTH, "position"};
  default:
    s->args.query_position = r.f.rope_positions - 4; /* token 4 is one behind the last */
    return (expected){MHA_ERROR_LENGTH, "position"};
  }
}

static expected spoil_mode(step *s, spoiled what) {
  mha_forward_args *a = &s->args;
  if (what == BAD_MODE) {
    a->cache_mode = 3;
    return (expected){MHA_ERROR_VALUE, "cache_mode"};
  }
  if (what <= NO_CACHE_EXPECTED) {
    a->cache = NULL;
    a->cache_mode = what == NO_CACHE_MODE ? MHA_CACHE_APPEND : 0;
    a->cache_entries = what == NO_CACHE_ENTRIES ? zero_positions : NULL;
    a->new_lengths = what == NO_CACHE_COUNTS ? zero_positions : NULL;
    a->expected_lengths = what == NO_CACHE_EXPECTED ? zero_positions : NULL;
    return (expected){MHA_ERROR_NULL, "args.cache"};
  }
  a->cache_mode = what == VALUE_ALONE ? 0 : MHA_CACHE_ATTEND;
  a->key = what == ATTEND_WITH_KEY ? s->k : NULL;
  a->value = what == ATTEND_WITH_VALUE || what == VALUE_ALONE ? s->v : NULL;
  a->key_length = what == ATTEND_WITH_LENGTH ? 2 : 0;
  if (what == VALUE_ALONE)
    return (expected){MHA_ERROR_NULL, "key"};
  return (expected){MHA_ERROR_VALUE, what == ATTEND_WITH_KEY     ? "key"
                                     : what == ATTEND_WITH_VALUE ? "value"
                                                                 : "key_length"};
}

static expected spoil_arrays(step *s, spoiled what) {
  int64_t per_entry = 0, width = 0;
  mha_forward_args *a = &s->args;
  switch (what) {
  case NO_OUTPUT:
    a->output = NULL;
    return (expected){MHA_ERROR_NULL, "output"};
  case OUTPUT_IN_CACHE:
    a->output = cache_numbers(true, &per_entry, &width);
    return (expected){MHA_ERROR_OVERLAP, "cache"};
  case INPUT_IN_CACHE:
    a->query = cache_numbers(false, &per_entry, &width);
    return (expected){MHA_ERROR_OVERLAP, "cache"};
  case OUTPUT_OVER_COUNTS:
    a->new_lengths = test_pool_bytes(&s->pool, 2048);
    memset((void *)(uintptr_t)a->new_lengths, 0, 2048);
    a->output = (float *)(uintptr_t)a->new_lengths;
    return (expected){MHA_ERROR_OVERLAP, "new_lengths"};
  case OUTPUT_OVER_ENTRIES:
    a->cache_entries = spoiled_entries;
    spoiled_entries[0] = 1;
    spoiled_entries[1] = 0;
    a->output = (float *)(void *)spoiled_entries;
    return (expected){MHA_ERROR_OVERLAP, "cache_entries"};
  case OUTPUT_OVER_EXPECTED:
    a->expected_lengths = test_pool_bytes(&s->pool, 2048);
    memset((void *)(uintptr_t)a->expected_lengths, 0, 2048);
    spoiled_entries[0] = spoiled_entries[1] = 3;
    memcpy((void *)(uintptr_t)a->expected_lengths, spoiled_entries, 2 * sizeof *spoiled_entries);
    a->output = (float *)(uintptr_t)a->expected_lengths;
    return (expected){MHA_ERROR_OVERLAP, "expected_lengths"};
  case UNEXPECTED_LENGTH:
  case UNEXPECTED_LENGTH_ATTEND: /* entry 1 has three tokens */
    a->cache_mode = what == UNEXPECTED_LENGTH ? MHA_CACHE_APPEND_ATTEND : MHA_CACHE_ATTEND;
    a->expected_lengths = spoiled_entries;
    spoiled_entries[0] = 3;
    spoiled_entries[1] = 0;
    return (expected){MHA_ERROR_LENGTH, "expected_lengths[1] is 0, but entry 1"};
  default:
    a->batch = 4;
    return (expected){MHA_ERROR_LENGTH, "batch"};
  }
}

static expected spoil(step *s, spoiled what) {
  if (what == TOO_MANY)
    return (expected){MHA_ERROR_LENGTH, "capacity"};
  if (what <= ENTRY_TWICE)
    return spoil_entries(s, what);
  if (what <= LARGE_COUNT)
    return spoil_counts(s, what);
  if (what <= PACKED_KEYS || what == MASK_COLUMNS)
    return spoil_rules(s, what);
  if (what <= ATTEND_WITH_KEY_POSITION)
    return spoil_positions(s, what);
  return what <= VALUE_ALONE ? spoil_mode(s, what) : spoil_arrays(s, what);
}

/* B30 and its kin: found before anything is written. */
static void b30_calls_that_do_not_fit(void **state) {
  (void)state;
  for (int what = 0; what < N_SPOILED; what++) {
    test_plan plan = {.c = small_case(16), .capacity = 5};
    plan.c.Lq = 12;
    plan.c.rope = MHA_ROPE_HALVES;
    plan.c.rope_tables = true;
    plan.c.biases = 0;
    plan.c.Eo = 12;
    open_run(&plan);
    advance(3, NULL);
    const int64_t n = what == TOO_MANY ? 3 : 2;
    step s = {.queries = n, .keys = n};
    prepare_step(&s);
    test_note("spoiled %d", what);
    const expected e = spoil(&s, (spoiled)what);
    expect_refused(&s, e.status, e.word);
    free_step(&s);
    advance(2, NULL); /* and the cache goes on */
    close_run();
  }
}

static void caches_of_other_sizes(void **state) {
  (void)state;
  for (int which = 0; which < 3; which++) {
    test_plan plan = {.c = small_case(17)};
    open_run(&plan);
    mha_cache_options o = cache_options(&r.plan, &r.f.c, &r.f.allocator);
    o.n_kv_heads += which == 0;
    o.head_size += which == 1;
    o.value_head_size += which == 2;
    mha_cache_destroy(r.cache);
    test_expect(mha_cache_create(&o, &r.cache, NULL), MHA_OK, NULL);
    step s = {.queries = 2, .keys = 2};
    prepare_step(&s);
    expect_refused(&s, MHA_ERROR_SIZE, "cache");
    free_step(&s);
    close_run();
  }
}

/* A ring refuses chunks that would overwrite what their first query sees, and windows wider than
 * what it holds, also where the first queries of the call see nothing at all. */
/* Calls without the window of a ring, or with a wider one: from the first token on, though nothing
 * that they need is dropped yet. */
static void expect_windows_refused(int64_t widest, mha_cache_mode mode) {
  const int64_t keys = mode == MHA_CACHE_ATTEND ? 0 : 2;
  for (int64_t left = -1; left <= 12; left += left < 0 ? widest + 2 : 1) {
    step wide = {.mode = mode, .queries = 2, .keys = keys};
    prepare_step(&wide);
    wide.rules.window_left = left;
    test_note("window_left %" PRId64 ", %" PRId64 " tokens", left, r.length[0]);
    expect_refused(&wide, MHA_ERROR_VALUE, "window");
    free_step(&wide);
  }
  step none = {.mode = mode, .queries = 2, .keys = keys};
  prepare_step(&none);
  none.rules.flags &= ~MHA_WINDOW;
  expect_refused(&none, MHA_ERROR_VALUE, "window");
  free_step(&none);
}

static void what_a_ring_refuses(void **state) {
  (void)state;
  test_plan plan = {.c = small_case(18), .capacity = 9, .window = 4, .rollback = 2};
  plan.c.Lq = 60;
  plan.c.window = true;
  plan.c.left = 3;
  plan.c.right = -1;
  open_run(&plan);
  expect_windows_refused(3, MHA_CACHE_APPEND_ATTEND);
  for (int t = 0; t < 40; t += 4)
    advance(4, NULL); /* the largest: 9 - 4 - 2 + 1 */
  step s = {.queries = 5, .keys = 5};
  prepare_step(&s);
  expect_refused(&s, MHA_ERROR_LENGTH, "ring");
  free_step(&s);
  expect_windows_refused(3, MHA_CACHE_APPEND_ATTEND);
  advance(1, NULL);
  close_run();
}

static void what_a_ring_refuses_attend_only(void **state) {
  const int64_t offsets[] = {-1, -20, 0, 10, 31};
  (void)state;
  test_plan plan = {.c = small_case(18), .capacity = 9, .window = 4, .rollback = 2};
  plan.c.Lq = 60;
  plan.c.window = true;
  plan.c.left = 3;
  plan.c.right = -1;
  open_run(&plan);
  for (int t = 0; t < 40; t += 4)
    advance(4, NULL);
  for (size_t i = 0; i < COUNT(offsets); i++) {
    step s = {.mode = MHA_CACHE_ATTEND, .queries = 25};
    prepare_step(&s);
    s.rules.alignment = MHA_ALIGN_OFFSET;
    s.rules.offset = offsets[i];
    test_note("offset %" PRId64, offsets[i]);
    expect_refused(&s, MHA_ERROR_LENGTH, "the ring has dropped");
    free_step(&s);
  }
  expect_windows_refused(3, MHA_CACHE_ATTEND);
  close_run();
}

/* Behind a truncated length a ring's rows hold the tokens that were taken back, not the ones a
 * capacity before them: those are gone for good. */
static void open_truncated_ring(void) {
  test_plan plan = {.c = small_case(18), .capacity = 9, .window = 4, .rollback = 5};
  plan.c.Lq = 60;
  plan.c.B = 1;
  plan.c.window = true;
  plan.c.left = 3;
  plan.c.right = -1;
  plan.c.stage = MHA_STAGE_SCALED;
  open_run(&plan);
  for (int t = 0; t < 20; t++)
    advance(1, NULL);
  truncate_run(15); /* tokens 11 to 14 are there, and rows of 15 to 19 */
}

static void truncated_rings_show_no_stale_scores(void **state) {
  (void)state;
  open_truncated_ring();
  for (int t = 0; t < 4; t++) {
    step s = {.queries = 1, .keys = 1};
    call_step(&s);
    judge_step(&s);
    for (int64_t h = 0; h < r.f.c.H; h++)
      for (int64_t j = 0; j < s.columns; j++)
        assert_true((s.weights[h * s.columns + j] == -INFINITY) == (j < 11));
    free_step(&s);
  }
  close_run();
}

/* The window is that of the ring, and still the first of several queries sees what is gone. */
static void truncated_rings_refuse_stale_rows(void **state) {
  (void)state;
  for (int64_t n = 1; n <= 4; n++) {
    open_truncated_ring();
    step s = {.mode = MHA_CACHE_ATTEND, .queries = n}; /* the first sees from 15 - n - 3 on */
    if (n == 1) {
      call_step(&s);
      judge_step(&s);
    } else {
      prepare_step(&s);
      expect_refused(&s, MHA_ERROR_LENGTH, "the ring has dropped the keys below 11");
    }
    free_step(&s);
    close_run();
  }
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static void reserve(int64_t queries, int64_t capacity) {
  mha_shape shape;
  mha_error error;
  MHA_INIT(&shape);
  shape.cached = 1;
  shape.batch = r.f.c.B;
  shape.query_length = queries;
  shape.key_length = capacity;
  test_expect(mha_context_reserve(r.context, r.weights, &shape, &error), MHA_OK, &error);
}

/* After a reserve for the longest chunk and the capacity no call takes memory, whatever it brings
 * and whatever results it wants. */
/* Chunks of `most` tokens, then every smaller one, in a context that reserved for `most`. */
static void expect_no_memory(const test_plan *plan, int64_t most) {
  const int64_t tokens = plan->window ? 2 * plan->capacity : plan->capacity - most;
  open_run(plan);
  reserve(most, r.plan.capacity);
  const int64_t calls = r.f.allocator.calls;
  for (int64_t t = 0; t + most <= tokens; t += most) {
    free(advance_for_bits(most, NULL));
    if (r.f.allocator.calls != calls)
      test_failed("a call of %" PRId64 " tokens at %" PRId64 " took memory", most, t);
  }
  for (int64_t n = most; n > 0; n--) {
    const int64_t length = r.length[0];
    free(advance_for_bits(n, NULL));
    if (r.f.allocator.calls != calls)
      test_failed("reserved for %" PRId64 " tokens, a call of %" PRId64 " took memory", most, n);
    truncate_run(length);
  }
  close_run();
}

/* After a reserve for the longest chunk and the capacity no call takes memory: few queries, many,
 * and those between, of many heads, whose scores few queries hold all at once. */
static void no_step_takes_memory(void **state) {
  const int64_t capacities[] = {40, 95, 300};
  (void)state;
  for (int ring = 0; ring < 2; ring++)
    for (size_t at = 0; at < COUNT(capacities); at++)
      for (int64_t most = 1; most <= 18; most = most < 9 ? 2 * most + 1 : most + 3)
        for (int64_t B = 1; B <= 3; B += 2) {
          test_plan plan = {.c = small_case(19)}; /* 1, 3, 7, 15 and 18 tokens */
          plan.c.B = B;
          plan.c.Lq = 2 * capacities[at] + 20;
          plan.c.H = plan.c.G = 16;
          plan.c.want = 0;
          plan.capacity = capacities[at];
          if (ring) {
            plan.c.window = true;
            plan.c.left = 9;
            plan.c.right = -1;
            plan.window = 10;
            plan.rollback = most; /* each chunk is taken back */
            if (plan.capacity - plan.window - plan.rollback + 1 < most)
              continue;
          }
          expect_no_memory(&plan, most);
        }
}

/* Lengths at which the cut into parts changes. */
static void no_length_takes_memory(void **state) {
  const int64_t lengths[] = {15, 16, 255, 256, 257, 4096, 16383, 16384, 16385, 20000, 32768, 32769};
  (void)state;
  for (size_t i = 0; i < COUNT(lengths); i++) {
    test_plan plan = {.c = small_case(20), .capacity = 33000};
    plan.c.B = 1;
    plan.c.want = 0;
    open_run(&plan);
    reserve(2, r.plan.capacity);
    const int64_t calls = r.f.allocator.calls, n = lengths[i];
    float *zeros = allocate((size_t)n * 2 * 4, sizeof *zeros);
    const mha_tensor k = {zeros, 1, n, 2, 4, 0, 0, 0, 0, MHA_F32, 0},
                     v = {zeros, 1, n, 2, 3, 0, 0, 0, 0, MHA_F32, 0};
    test_expect(mha_cache_append(r.cache, &k, &v, NULL, NULL, NULL), MHA_OK, NULL);
    float x[20] = {0}, y[14];
    mha_forward_args args;
    MHA_INIT(&args);
    args.cache_mode = MHA_CACHE_ATTEND;
    args.batch = 1;
    args.query = x;
    args.output = y;
    args.cache = r.cache;
    for (args.query_length = 1; args.query_length <= 2; args.query_length++) {
      test_expect(mha_forward(r.context, r.weights, &args, NULL), MHA_OK, NULL);
      if (r.f.allocator.calls != calls)
        test_failed("%d queries over %d keys took memory", (int)args.query_length, (int)n);
    }
    free(zeros);
    close_run();
  }
}

/* ---- A very long sequence -------------------------------------------------------------------- */

enum { LONG_WINDOW = 1000, LONG_CAPACITY = 1024, LONG_WIDTH = 64 };

/* Token t of a sequence that is not kept: normal numbers from its own seed. */
static void make_token(int64_t t, float *x) {
  test_random random;
  test_random_seed(&random, (uint64_t)t);
  for (int c = 0; c < LONG_WIDTH; c++)
    x[c] = (float)test_random_uniform(&random, -1.7, 1.7);
}

/* The last LONG_WINDOW tokens up to t as a problem of their own. */
static void judge_token(int64_t t, const float *output) {
  const int64_t first = at_least(t - LONG_WINDOW + 1, 0), n = t - first + 1;
  oracle_problem p = r.p;
  oracle_result result;
  double *keys = allocate((size_t)(n * LONG_WIDTH), sizeof *keys);
  int64_t *positions = allocate((size_t)n, sizeof *positions);
  float x[LONG_WIDTH];
  for (int64_t j = 0; j < n; j++) {
    make_token(first + j, x);
    positions[j] = first + j;
    for (int c = 0; c < LONG_WIDTH; c++)
      keys[j * LONG_WIDTH + c] = (double)x[c];
  }
  p.Lq = 1;
  p.Lk = n;
  p.query = keys + (n - 1) * LONG_WIDTH;
  p.key = p.value = keys;
  p.query_positions = &t;
  p.key_positions = positions;
  p.alignment = ORACLE_BOTTOM_RIGHT;
  oracle_solve(&p, &result);
  test_note("token %" PRId64, t);
  test_compare("output", (test_shape){{1, 1, 1, LONG_WIDTH}}, output, result.output.value,
               result.output.bound);
  oracle_free(&result);
  free(keys);
  free(positions);
}

/* One token per call through a ring of 1024, with rotary positions: the memory stays the same, and
 * sampled tokens are right. MHA_TEST_LONG=1: a million tokens. */
static void a_very_long_sequence(void **state) {
  const char *wanted = getenv("MHA_TEST_LONG");
  const int64_t tokens = wanted && *wanted == '1' ? 1000000 : test_small() ? 3000 : 30000;
  float x[LONG_WIDTH], y[LONG_WIDTH];
  mha_forward_args args;
  mha_error error;
  (void)state;
  test_plan plan = {.c = {.seed = 23,
                          .Lq = 1,
                          .H = 4,
                          .d = LONG_WIDTH / 4,
                          .biases = TEST_ALL,
                          .source = TEST_SELF,
                          .causal = true,
                          .window = true,
                          .left = LONG_WINDOW - 1,
                          .right = -1,
                          .rope = MHA_ROPE_HALVES},
                    .capacity = LONG_CAPACITY,
                    .window = LONG_WINDOW};
  open_run(&plan);
  reserve(1, LONG_CAPACITY);
  const int64_t calls = r.f.allocator.calls;
  MHA_INIT(&args);
  args.batch = args.query_length = 1;
  args.query = x;
  args.output = y;
  args.rules = &r.f.rules;
  args.cache = r.cache;
  for (int64_t t = 0; t < tokens; t++) {
    make_token(t, x);
    test_expect(mha_forward(r.context, r.weights, &args, &error), MHA_OK, &error);
    if (t < 20 || (t > 990 && t < 1050 && t % 12 == 0) || t % (tokens / 10) == 0 || t == tokens - 1)
      judge_token(t, y);
  }
  assert_int_equal(r.f.allocator.calls, calls);
  close_run();
}

/* ---- Calls with a key of their own ----------------------------------------------------------- */

/* A layer without matrices: one head of 4, Q = query, K = key, V = value. */
typedef struct plain_layer {
  test_allocator allocator;
  mha_weights *weights;
  mha_context *context;
  mha_cache *cache;
  float query[2 * 20 * 4], key[2 * 20 * 4], output[2 * 20 * 4];
} plain_layer;

static plain_layer plain;

static void open_plain(void) {
  mha_config config;
  mha_matrices matrices;
  mha_context_options options;
  mha_cache_options o;
  memset(&plain, 0, sizeof plain);
  test_allocator_init(&plain.allocator);
  mha_config_init(&config, 4, 1);
  MHA_INIT(&matrices);
  MHA_INIT(&options);
  options.n_threads = 1;
  options.allocator = &plain.allocator.mha;
  MHA_INIT(&o);
  o.n_entries = 2;
  o.capacity = 64;
  o.n_kv_heads = 1;
  o.head_size = 4;
  test_expect(mha_weights_create(&config, &matrices, &plain.weights, NULL), MHA_OK, NULL);
  test_expect(mha_context_create(&options, &plain.context, NULL), MHA_OK, NULL);
  test_expect(mha_cache_create(&o, &plain.cache, NULL), MHA_OK, NULL);
  for (size_t i = 0; i < COUNT(plain.query); i++)
    plain.query[i] = plain.key[i] = 1.0F;
}

static void close_plain(void) {
  mha_cache_destroy(plain.cache);
  mha_context_destroy(plain.context);
  mha_weights_destroy(plain.weights);
  test_allocator_check(&plain.allocator);
}

static mha_forward_args plain_args(int64_t queries, int64_t keys) {
  mha_forward_args args;
  MHA_INIT(&args);
  args.batch = 2;
  args.query_length = queries;
  args.query = plain.query;
  args.key_length = keys;
  args.key = plain.key;
  args.output = plain.output;
  args.cache = plain.cache;
  return args;
}

/* Rows of queries behind new_lengths[b] see no key, also where no entry has padding among its keys.
 */
static void counts_hold_for_queries_too(void **state) {
  const int64_t counts[][2] = {{2, 2}, {2, 1}, {1, 2}};
  (void)state;
  for (size_t k = 0; k < COUNT(counts); k++) {
    open_plain();
    mha_forward_args args = plain_args(5, 2);
    args.new_lengths = counts[k];
    test_expect(mha_forward(plain.context, plain.weights, &args, NULL), MHA_OK, NULL);
    for (int64_t b = 0; b < 2; b++)
      for (int64_t i = 0; i < 5; i++)
        assert_true(plain.output[(b * 5 + i) * 4] == (i < counts[k][b] ? 1.0F : 0.0F));
    close_plain();
  }
}

/* What the cache knows itself, and results that nobody computes. */
static void what_append_only_refuses(void **state) {
  const int64_t lengths[3] = {0, 4, 10};
  float sink[200];
  (void)state;
  open_plain();
  for (int k = 0; k < 5; k++) {
    mha_rules rules;
    mha_results results;
    mha_error error;
    int64_t length = -1;
    mha_forward_args args = plain_args(0, 10);
    MHA_INIT(&rules);
    MHA_INIT(&results);
    args.cache_mode = MHA_CACHE_APPEND;
    args.rules = &rules;
    args.results = &results;
    if (k == 0)
      rules.query_starts = rules.key_starts = lengths;
    if (k == 1)
      rules.key_lengths = lengths + 1;
    if (k == 2)
      results.weights = sink;
    if (k == 3)
      results.log_sum_exp = sink;
    if (k == 4)
      rules.struct_size = 3;
    test_expect(mha_forward(plain.context, plain.weights, &args, &error),
                k < 2   ? MHA_ERROR_UNSUPPORTED
                : k < 4 ? MHA_ERROR_VALUE
                        : MHA_ERROR_STRUCT_SIZE,
                &error);
    test_expect(mha_cache_length(plain.cache, 0, &length, NULL), MHA_OK, NULL);
    assert_int_equal(length, 0);
  }
  close_plain();
}

/* More rows of key than queries. */
static void new_keys_take_no_memory(void **state) {
  (void)state;
  for (int64_t keys = 1; keys <= 20; keys++)
    for (int mode = 0; mode < 2; mode++) {
      mha_shape shape;
      open_plain();
      MHA_INIT(&shape);
      shape.batch = 2;
      shape.query_length = 1;
      shape.key_length = 64;
      shape.cached = 1;
      test_expect(mha_context_reserve(plain.context, plain.weights, &shape, NULL), MHA_OK, NULL);
      const int64_t calls = plain.allocator.calls;
      mha_forward_args args = plain_args(1, keys);
      args.cache_mode = mode ? MHA_CACHE_APPEND : MHA_CACHE_APPEND_ATTEND;
      test_expect(mha_forward(plain.context, plain.weights, &args, NULL), MHA_OK, NULL);
      assert_int_equal(plain.allocator.calls, calls);
      close_plain();
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_mask_in_every_schedule),
      cmocka_unit_test(b37_cached_keys_and_positions),
      cmocka_unit_test(a_sample_of_full_caches),
      cmocka_unit_test(a_sample_of_rings),
      cmocka_unit_test(across_the_borders_of_parts),
      cmocka_unit_test(queries_and_keys_of_different_counts),
      cmocka_unit_test(b16_the_newest_key_is_masked_too),
      cmocka_unit_test(b17_unwritten_rows_change_no_bit),
      cmocka_unit_test(broken_tokens_reach_those_that_see_them),
      cmocka_unit_test(threads_and_results_change_no_bit),
      cmocka_unit_test(a_caller_s_loop_changes_no_bit),
      cmocka_unit_test(the_same_call_twice),
      cmocka_unit_test(truncation_then_regrowth),
      cmocka_unit_test(a_copied_entry_diverges),
      cmocka_unit_test(a_reset_entry_is_a_new_one),
      cmocka_unit_test(appending_and_attending_apart),
      cmocka_unit_test(attending_to_one_entry_twice),
      cmocka_unit_test(attending_to_nothing),
      cmocka_unit_test(calls_without_rows),
      cmocka_unit_test(many_readers),
      cmocka_unit_test(b30_calls_that_do_not_fit),
      cmocka_unit_test(caches_of_other_sizes),
      cmocka_unit_test(what_a_ring_refuses),
      cmocka_unit_test(what_a_ring_refuses_attend_only),
      cmocka_unit_test(truncated_rings_show_no_stale_scores),
      cmocka_unit_test(truncated_rings_refuse_stale_rows),
      cmocka_unit_test(no_step_takes_memory),
      cmocka_unit_test(no_length_takes_memory),
      cmocka_unit_test(a_very_long_sequence),
      cmocka_unit_test(counts_hold_for_queries_too),
      cmocka_unit_test(what_append_only_refuses),
      cmocka_unit_test(new_keys_take_no_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
