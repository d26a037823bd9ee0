/* One packed call over a cache, in pages or not, beside a call for each sequence over a cache
 * without pages that holds the same numbers: long and short sequences, that share beginnings, come
 * and go, while every row that no token has is NaN. */
#include "fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { ENTRIES = 5, TAIL = 2, MOST = 400, RING_MOST = 70 }; /* tokens of a sequence in a call */

/* ---- What is tried --------------------------------------------------------------------------- */

/* A layer, its two caches and the rules of every call. */
typedef struct serving {
  test_fixture f; /* the layer */
  test_random random;
  mha_weights *weights;
  mha_context *contexts[3]; /* of 1, 2 and 3 threads */
  mha_cache *cache, *plain;
  mha_rules rules;
  mha_cache_options options;
  bool hides; /* tokens that no query of a call sees are NaN during it; nothing is shared then */
} serving;

static serving s;

static test_case draw_layer(uint64_t seed) {
  static const int64_t groups[][2] = {{4, 4}, {4, 2}, {8, 1}, {1, 1}};
  test_random_seed(&s.random, seed);
  const int64_t *group = groups[test_random_range(&s.random, 0, COUNT(groups) - 1)];
  test_case c = {.seed = seed,
                 .B = 1,
                 .Lq = 1,
                 .H = group[0],
                 .G = group[1],
                 .d = s.options.type == MHA_Q8_0 ? 32 : 2 * test_random_range(&s.random, 1, 20),
                 .Eq = 12,
                 .Eo = 9,
                 .source = (test_source)test_random_range(&s.random, TEST_CROSS, TEST_SELF),
                 .biases = TEST_ALL,
                 .alibi = test_random_range(&s.random, 0, 3) == 0,
                 .sinks = test_random_range(&s.random, 0, 3) == 0,
                 .softcap = test_random_range(&s.random, 0, 3) == 0 ? 1.5F : 0.0F,
                 .norm = (mha_norm)test_random_range(&s.random, 0, 2),
                 .rope = (mha_rope)test_random_range(&s.random, 0, 2)};
  c.dv = s.options.type == MHA_Q8_0 ? 32 * test_random_range(&s.random, 1, 2)
                                    : test_random_range(&s.random, 1, 40);
  return c;
}

static void draw_rules(void) {
  s.rules = s.f.rules;
  s.rules.causal = test_random_range(&s.random, 0, 2) > 0;
  if (s.options.window > 0 || test_random_range(&s.random, 0, 2) == 0) {
    s.rules.flags |= MHA_WINDOW;
    s.rules.window_left =
        s.options.window > 0 ? s.options.window - 1 : test_random_range(&s.random, 0, 100);
    s.rules.window_right = test_random_range(&s.random, -1, 3);
  }
}

static void draw_cache(int64_t page_tokens, bool ring) {
  mha_cache_options *o = &s.options;
  o->n_entries = ENTRIES;
  o->capacity = 2600;
  if (ring) {
    o->window = test_random_range(&s.random, 1, 90);
    o->rollback = RING_MOST; /* a call may be taken back */
    o->capacity = o->window + 2 * RING_MOST - 1 + test_random_range(&s.random, 0, 40);
  }
  o->weights = s.weights;
  test_expect(mha_cache_create(o, &s.plain, NULL), MHA_OK, NULL);
  o->page_tokens = page_tokens;
  if (page_tokens > 0)
    o->n_pages = 2 * ENTRIES * (o->capacity / page_tokens + 2);
  test_expect(mha_cache_create(o, &s.cache, NULL), MHA_OK, NULL);
}

static void begin(uint64_t seed, int32_t type, int64_t page_tokens, bool ring) {
  memset(&s, 0, sizeof s);
  MHA_INIT(&s.options);
  s.options.type = type;
  const test_case c = draw_layer(seed);
  test_build(&s.f, &c);
  test_expect(mha_weights_create(&s.f.config, &s.f.matrices, &s.weights, NULL), MHA_OK, NULL);
  for (int k = 0; k < 3; k++) {
    s.f.options.n_threads = k + 1;
    test_expect(mha_context_create(&s.f.options, &s.contexts[k], NULL), MHA_OK, NULL);
  }
  draw_cache(page_tokens, ring);
  draw_rules();
  s.hides = test_random_range(&s.random, 0, 1);
}

static void end(void) {
  mha_cache_destroy(s.cache);
  mha_cache_destroy(s.plain);
  for (int k = 0; k < 3; k++)
    mha_context_destroy(s.contexts[k]);
  mha_weights_destroy(s.weights);
  test_allocator_check(&s.f.allocator);
  test_release(&s.f);
}

/* ---- Rows of the two caches ------------------------------------------------------------------ */

static size_t row_bytes(bool value) {
  return mha_element_bytes(s.options.type, s.f.c.G * (value ? s.f.c.dv : s.f.c.d));
}

static int64_t length_of(int64_t entry) {
  int64_t length = -1;
  test_expect(mha_cache_length(s.cache, entry, &length, NULL), MHA_OK, NULL);
  return length;
}

static unsigned char *memory_of(mha_cache *cache, bool value, int64_t *rows) {
  mha_tensor k, v;
  test_expect(mha_cache_view(cache, &k, &v, NULL), MHA_OK, NULL);
  *rows = k.batch * k.length;
  return (unsigned char *)(uintptr_t)(value ? v.data : k.data);
}

/* A token's row, or NULL where a ring has dropped it. */
static unsigned char *row_of(mha_cache *cache, bool value, int64_t entry, int64_t token) {
  int64_t row = -1, rows = 0;
  if (mha_cache_row(cache, entry, token, &row, NULL))
    return NULL;
  unsigned char *memory = memory_of(cache, value, &rows);
  assert_true(row >= 0 && row < rows);
  return memory + (size_t)row * row_bytes(value);
}

/* Bits that are a NaN in every type: scales of blocks too. */
static void make_nan(unsigned char *row, bool value) {
  memset(row, 0xFF, row_bytes(value));
}

/* Every row that no token of the cache has becomes NaN. */
static void spoil_free_rows(void) {
  int64_t rows = 0;
  (void)memory_of(s.cache, false, &rows);
  bool *used = test_allocate((size_t)rows, sizeof *used);
  for (int64_t entry = 0; entry < ENTRIES; entry++)
    for (int64_t t = length_of(entry) - 1, row = 0;
         t >= 0 && mha_cache_row(s.cache, entry, t, &row, NULL) == MHA_OK; t--)
      used[row] = true;
  for (int value = 0; value < 2; value++) {
    unsigned char *memory = memory_of(s.cache, value, &rows);
    for (int64_t row = 0; row < rows; row++)
      if (!used[row])
        make_nan(memory + (size_t)row * row_bytes(value), value);
  }
  free(used);
}

/* Tokens [first, first + n) of the cache become those of the plain one, by their bits. */
static void mirror(int64_t entry, int64_t first, int64_t n) {
  const test_case *c = &s.f.c;
  unsigned char *rows[2];
  for (int value = 0; value < 2; value++) {
    rows[value] = test_allocate((size_t)n + 1, row_bytes(value));
    for (int64_t t = 0; t < n; t++)
      memcpy(rows[value] + (size_t)t * row_bytes(value), row_of(s.cache, value, entry, first + t),
             row_bytes(value));
  }
  const mha_tensor k = {rows[0], 1, n, c->G, c->d, 0, 0, 0, 0, s.options.type, 0};
  const mha_tensor v = {rows[1], 1, n, c->G, c->dv, 0, 0, 0, 0, s.options.type, 0};
  mha_error error;
  if (n > 0)
    test_expect(mha_cache_append(s.plain, &k, &v, &entry, NULL, &error), MHA_OK, &error);
  free(rows[0]);
  free(rows[1]);
}

/* ---- A packed call --------------------------------------------------------------------------- */

typedef struct call {
  int64_t B, entries[ENTRIES], before[ENTRIES];
  int64_t starts[ENTRIES + 1], key_starts[ENTRIES + 1];
  int64_t rows, key_rows;
  int64_t offsets[ENTRIES];
  test_pool pool;
  float *x, *key, *value, *y, *lse;
  mha_rules rules;
  mha_results results;
  mha_forward_args args;
} call;

static int64_t draw_count(void) {
  static const int64_t most[] = {0, 1, 1, 1, 2, 8, 8, RING_MOST, MOST};
  const int64_t last = COUNT(most) - (s.options.window > 0 ? 2 : 1);
  const int64_t n = most[test_random_range(&s.random, 0, last)];
  return n > 2 ? test_random_range(&s.random, 2, n) : n;
}

static float *draw_rows(call *a, int64_t n, int64_t width) {
  float *rows = test_pool_floats(&a->pool, (n + TAIL) * width); /* the tail stays poison */
  test_fill_normal(&s.random, rows, n * width, 1.0);
  return rows;
}

/* Which entries, and how many rows each brings. */
static void draw_sequences(call *a, bool new_keys) {
  bool taken[ENTRIES] = {false};
  a->B = test_random_range(&s.random, 1, ENTRIES);
  for (int64_t b = 0; b < a->B; b++) {
    do
      a->entries[b] = test_random_range(&s.random, 0, ENTRIES - 1);
    while (taken[a->entries[b]]);
    taken[a->entries[b]] = true;
    a->before[b] = length_of(a->entries[b]);
    int64_t n = draw_count(), keys = new_keys ? draw_count() : n;
    if (a->before[b] + (n > keys ? n : keys) > 2600 && s.options.window == 0)
      n = keys = 0;
    a->starts[b + 1] = a->starts[b] + n;
    a->key_starts[b + 1] = a->key_starts[b] + keys;
  }
}

static void prepare(call *a, mha_cache_mode mode) {
  const test_case *c = &s.f.c;
  const bool self = c->source == TEST_SELF || mode == MHA_CACHE_ATTEND;
  memset(a, 0, sizeof *a);
  draw_sequences(a, !self);
  a->rows = a->starts[a->B] + TAIL;
  a->key_rows = a->key_starts[a->B] + TAIL;
  a->x = draw_rows(a, a->starts[a->B], c->Eq);
  a->key = self ? NULL : draw_rows(a, a->key_starts[a->B], c->Ek);
  a->value = c->source == TEST_CROSS && !self ? draw_rows(a, a->key_starts[a->B], c->Ev) : NULL;
  a->rules = s.rules;
  a->rules.query_starts = a->starts;
  a->rules.key_starts = a->key ? a->key_starts : NULL;
  MHA_INIT(&a->results);
  MHA_INIT(&a->args);
  a->args.flags = MHA_ALLOW_EMPTY;
  a->args.cache_mode = (int32_t)mode;
  a->args.batch = a->B;
  a->args.query_length = a->rows;
  a->args.key_length = a->key ? a->key_rows : 0;
  a->args.query = a->x;
  a->args.key = a->key;
  a->args.value = a->value;
  a->args.rules = &a->rules;
  a->args.cache = s.cache;
  a->args.cache_entries = a->entries;
  a->args.expected_lengths = a->before;
}

/* With new arrays for what it writes. */
static void run_packed(call *a, int threads, bool lse) {
  mha_error error;
  a->y = test_pool_floats(&a->pool, a->rows * s.f.c.Eo);
  a->lse = test_pool_floats(&a->pool, a->rows * s.f.c.H);
  a->args.output = a->y;
  a->results.log_sum_exp = lse ? a->lse : NULL;
  a->args.results = lse ? &a->results : NULL;
  test_expect(mha_forward(s.contexts[threads - 1], s.weights, &a->args, &error), MHA_OK, &error);
}

/* ---- Beside one call for each sequence ------------------------------------------------------- */

static void near(const char *what, int64_t b, int64_t at, float got, float expected) {
  const float bound = 2e-4F * (1.0F + fabsf(expected));
  if (got == expected || fabsf(got - expected) <= bound)
    return;
  test_failed("%s of sequence %lld, number %lld: %g instead of %g", what, (long long)b,
              (long long)at, (double)got, (double)expected);
}

static void compare_alone(const call *a, int64_t b) {
  const test_case *c = &s.f.c;
  const int64_t first = a->starts[b], n = a->starts[b + 1] - first;
  test_pool pool = {0};
  mha_rules rules = a->rules;
  mha_results results;
  mha_forward_args args;
  mha_error error;
  rules.query_starts = rules.key_starts = NULL;
  rules.offsets = NULL;
  if (a->args.cache_mode != MHA_CACHE_ATTEND) { /* the plain cache has these tokens already */
    rules.alignment = MHA_ALIGN_OFFSET;
    rules.offset = a->before[b];
  } else if (a->rules.offsets) {
    rules.offset = a->offsets[b];
  }
  MHA_INIT(&results);
  MHA_INIT(&args);
  args.flags = MHA_ALLOW_EMPTY;
  args.cache_mode = MHA_CACHE_ATTEND;
  args.batch = 1;
  args.query_length = n;
  args.query = a->x + first * c->Eq;
  args.output = test_pool_floats(&pool, n * c->Eo);
  results.log_sum_exp = test_pool_floats(&pool, n * c->H);
  args.rules = &rules;
  args.results = &results;
  args.cache = s.plain;
  args.cache_entries = a->entries + b;
  test_expect(mha_forward(s.contexts[0], s.weights, &args, &error), MHA_OK, &error);
  for (int64_t at = 0; at < n * c->Eo; at++)
    near("output", b, at, a->y[first * c->Eo + at], args.output[at]);
  for (int64_t h = 0; h < c->H; h++)
    for (int64_t i = 0; i < n; i++)
      near("log-sum-exp", b, h * n + i, a->lse[h * a->rows + first + i],
           results.log_sum_exp[h * n + i]);
  test_pool_free(&pool);
}

static void compare(const call *a) {
  const test_case *c = &s.f.c;
  for (int64_t b = 0; b < a->B; b++)
    compare_alone(a, b);
  for (int64_t r = a->starts[a->B]; r < a->rows; r++) {
    for (int64_t e = 0; e < c->Eo; e++)
      assert_true(a->y[r * c->Eo + e] == s.f.wo.bias[e]);
    for (int64_t h = 0; h < c->H; h++)
      assert_true(a->lse[h * a->rows + r] == -INFINITY);
  }
}

/* What this call gives with other threads, or without log-sum-exp, has the same bits; the tokens
 * that it brought are taken back in between. */
static void repeat(call *a) {
  const float *y = a->y, *lse = a->lse;
  const test_shape shape = {{1, 1, a->rows, s.f.c.Eo}};
  for (int threads = 2; threads <= 3; threads++) {
    for (int64_t b = 0; b < a->B; b++)
      test_expect(mha_cache_truncate(s.cache, a->entries[b], a->before[b], NULL), MHA_OK, NULL);
    if (s.options.window == 0) /* a ring keeps what it may be taken back to */
      spoil_free_rows();
    run_packed(a, threads, threads == 3);
    test_same_bits("output", shape, a->y, y);
    if (threads == 3)
      test_same_bits("log_sum_exp", (test_shape){{1, 1, s.f.c.H, a->rows}}, a->lse, lse);
  }
}

/* Tokens that no query of sequence b sees, in the cache, become NaN; or what they were. */
static void hide(const call *a, int64_t b, bool back) {
  if (!s.hides || !(s.rules.flags & MHA_WINDOW) || a->args.cache_mode == MHA_CACHE_ATTEND)
    return;
  for (int64_t t = a->before[b] - s.rules.window_left - 1; t >= 0; t--)
    for (int value = 0; value < 2; value++) {
      unsigned char *row = row_of(s.cache, value, a->entries[b], t);
      if (!row)
        return;
      if (back)
        memcpy(row, row_of(s.plain, value, a->entries[b], t), row_bytes(value));
      else
        make_nan(row, value);
    }
}

/* Appends and attends, in one call or in two. */
static void try_append(bool apart) {
  call a;
  prepare(&a, apart ? MHA_CACHE_APPEND : MHA_CACHE_APPEND_ATTEND);
  if (s.options.window == 0)
    spoil_free_rows();
  for (int64_t b = 0; b < a.B; b++)
    hide(&a, b, false);
  if (apart) {
    if (a.key && test_random_range(&s.random, 0, 1))
      a.rules.query_starts = NULL;
    run_packed(&a, 1, false);
    for (int64_t at = 0; at < a.rows * s.f.c.Eo; at++)
      assert_true(test_is_poison(a.y[at])); /* nothing but the cache is written */
  } else {
    run_packed(&a, 1, true);
    repeat(&a);
  }
  for (int64_t b = 0; b < a.B; b++) {
    const int64_t n = a.key_starts[b + 1] - a.key_starts[b];
    assert_int_equal(length_of(a.entries[b]), a.before[b] + n);
    hide(&a, b, true);
    mirror(a.entries[b], a.before[b], n);
  }
  if (!apart)
    compare(&a);
  test_pool_free(&a.pool);
}

static void try_attend(void) {
  call a;
  prepare(&a, MHA_CACHE_ATTEND);
  a.rules.alignment = (int32_t)test_random_range(&s.random, 0, 2);
  if (a.rules.alignment == MHA_ALIGN_OFFSET || s.options.window > 0) {
    a.rules.alignment = MHA_ALIGN_OFFSET;
    a.rules.offsets = a.offsets;
    for (int64_t b = 0; b < a.B; b++) {
      const int64_t n = a.starts[b + 1] - a.starts[b];
      a.offsets[b] = s.options.window > 0 || test_random_range(&s.random, 0, 1)
                         ? a.before[b]
                         : test_random_range(&s.random, 0, a.before[b] + n);
    }
  }
  if (s.options.window == 0)
    spoil_free_rows();
  mha_error error;
  a.y = test_pool_floats(&a.pool, a.rows * s.f.c.Eo);
  a.lse = test_pool_floats(&a.pool, a.rows * s.f.c.H);
  a.args.output = a.y;
  a.results.log_sum_exp = a.lse;
  a.args.results = &a.results;
  /* more queries than keys at the bottom right have positions below 0, which is refused */
  const mha_status status = mha_forward(s.contexts[0], s.weights, &a.args, &error);
  bool below = false;
  for (int64_t b = 0; b < a.B; b++)
    below = below || (a.rules.alignment == MHA_ALIGN_BOTTOM_RIGHT &&
                      a.before[b] < a.starts[b + 1] - a.starts[b]);
  if (below && s.f.c.rope != MHA_ROPE_NONE) {
    test_expect(status, MHA_ERROR_LENGTH, &error);
  } else {
    test_expect(status, MHA_OK, &error);
    compare(&a);
    repeat(&a);
  }
  test_pool_free(&a.pool);
}

/* ---- Sequences come and go ------------------------------------------------------------------- */

static void in_both(mha_status a, mha_status b) {
  assert_int_equal(a, b);
}

static void change_entries(void) {
  const int64_t entry = test_random_range(&s.random, 0, ENTRIES - 1);
  const int64_t to = test_random_range(&s.random, 0, ENTRIES - 1);
  const int64_t length = test_random_range(&s.random, 0, length_of(entry));
  switch (test_random_range(&s.random, 0, 3)) {
  case 0:
    in_both(mha_cache_reset(s.cache, entry, NULL), mha_cache_reset(s.plain, entry, NULL));
    break;
  case 1:
    in_both(mha_cache_truncate(s.cache, entry, length, NULL),
            mha_cache_truncate(s.plain, entry, length, NULL));
    break;
  default:
    if (!s.hides)
      in_both(mha_cache_copy_entry(s.cache, entry, to, NULL),
              mha_cache_copy_entry(s.plain, entry, to, NULL));
  }
}

static void serve(uint64_t seed, int32_t type, int64_t page_tokens, bool ring) {
  test_note("seed %llu, type %d, pages of %lld, ring %d", (unsigned long long)seed, (int)type,
            (long long)page_tokens, (int)ring);
  begin(seed, type, page_tokens, ring);
  spoil_free_rows();
  for (int step = 0; step < (ring ? 50 : 14); step++) { /* a ring is to be full */
    const int64_t what = test_random_range(&s.random, 0, 7);
    if (what < 4)
      try_append(false);
    else if (what == 4)
      try_append(true);
    else if (what == 5)
      try_attend();
    else
      change_entries();
  }
  end();
}

static void a_packed_call_is_one_for_each_sequence(void **state) {
  static const int32_t types[] = {MHA_F32, MHA_F16, MHA_BF16, MHA_Q8_0};
  static const int64_t pages[] = {0, 16, 32, 64, 256, 512, 1024};
  (void)state;
  test_keep_memory();
  const char *first = getenv("MHA_TEST_SEED");
  const uint64_t begin_at = first ? strtoull(first, NULL, 10) : 1;
  const uint64_t n = test_small() ? 20 : 160;
  for (uint64_t seed = begin_at; seed < begin_at + n; seed++)
    serve(seed, types[seed % COUNT(types)], pages[seed % COUNT(pages)], seed % 3 == 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_packed_call_is_one_for_each_sequence),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
