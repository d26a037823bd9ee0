/* The key/value cache as an object: its memory, its lengths, ready rows, and what is refused. */
#include "fixture.h"
#include "folder.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_allocator allocator;

/* ---- A cache with a plain list of tokens beside it ------------------------------------------- */

enum { N = 3, G = 2, D = 3, DV = 2, LONGEST = 400 };

/* Token numbers of each entry; everything that was ever said and still counts. */
typedef struct model {
  mha_cache *cache;
  int64_t capacity, window, rollback;
  int64_t length[N], highest[N];
  int64_t tokens[N][LONGEST];
  int64_t next; /* number of the next token */
} model;

static mha_cache_options options_of(int64_t capacity, int64_t window, int64_t rollback) {
  mha_cache_options o;
  MHA_INIT(&o);
  o.n_entries = N;
  o.capacity = capacity;
  o.n_kv_heads = G;
  o.head_size = D;
  o.value_head_size = DV;
  o.window = window;
  o.rollback = rollback;
  o.allocator = &allocator.mha;
  return o;
}

static void open_model(model *m, int64_t capacity, int64_t window, int64_t rollback) {
  const mha_cache_options o = options_of(capacity, window, rollback);
  mha_error error;
  memset(m, 0, sizeof *m);
  m->capacity = capacity;
  m->window = window;
  m->rollback = rollback;
  m->next = 1;
  test_allocator_init(&allocator);
  test_expect(mha_cache_create(&o, &m->cache, &error), MHA_OK, &error);
}

static void close_model(model *m) {
  mha_cache_destroy(m->cache);
  test_allocator_check(&allocator);
}

static float key_number(int64_t token, int64_t c) {
  return (float)(token * 16 + c);
}

static float value_number(int64_t token, int64_t c) {
  return -(float)(token * 16 + c);
}

/* Every token that must still be there lies where the header says; rows that no token ever reached
 * are as the allocator gave them. */
static void check_model(const model *m) {
  mha_tensor k, v;
  mha_error error;
  test_expect(mha_cache_view(m->cache, &k, &v, &error), MHA_OK, &error);
  for (int64_t e = 0; e < N; e++) {
    int64_t length = -1;
    const int64_t first =
        m->window && m->highest[e] > m->capacity ? m->highest[e] - m->capacity : 0;
    test_expect(mha_cache_length(m->cache, e, &length, &error), MHA_OK, &error);
    assert_int_equal(length, m->length[e]);
    for (int64_t t = first; t < m->length[e]; t++) {
      const int64_t row = m->window ? t % m->capacity : t;
      const float *keys = (const float *)k.data + e * k.batch_stride + row * k.row_stride;
      const float *values = (const float *)v.data + e * v.batch_stride + row * v.row_stride;
      for (int64_t c = 0; c < G * D; c++)
        assert_true(keys[c] == key_number(m->tokens[e][t], c));
      for (int64_t c = 0; c < G * DV; c++)
        assert_true(values[c] == value_number(m->tokens[e][t], c));
    }
  }
}

/* ---- Ready rows in many layouts -------------------------------------------------------------- */

/* Numbers of B entries of n tokens from `first` on, numbered in memory order of [b][i]. */
static mha_tensor make_rows(test_pool *pool, int64_t B, int64_t n, int64_t size, int layout,
                            int64_t first, const int64_t *counts,
                            float (*number)(int64_t token, int64_t c)) {
  mha_tensor t = {NULL, B, n, G, size, n * G * size, G * size, size, 1, MHA_F32, 0};
  int64_t floats = B * n * G * size;
  if (layout == 1) { /* gaps everywhere */
    t.head_stride = size + 1;
    t.row_stride = G * t.head_stride + 3;
    t.batch_stride = n * t.row_stride + 5;
    floats = B * t.batch_stride;
  } else if (layout == 2) { /* [B][heads][n][size] */
    t.row_stride = size;
    t.head_stride = n * size;
  } else if (layout == 3) { /* [n][B][heads][size] */
    t.batch_stride = G * size;
    t.row_stride = B * t.batch_stride;
  }
  float *data = test_pool_floats(pool, floats);
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < (counts ? counts[b] : n); i++)
      for (int64_t c = 0; c < G * size; c++)
        data[b * t.batch_stride + i * t.row_stride + c / size * t.head_stride + c % size] =
            number(first + b * n + i, c);
  t.data = data;
  if (layout == 0)
    t.batch_stride = t.row_stride = t.head_stride = t.size_stride = 0;
  return t;
}

static mha_status append(model *m, int64_t B, int64_t n, int layout, const int64_t *entries,
                         const int64_t *counts, mha_error *error) {
  test_pool pool = {0};
  const mha_tensor k = make_rows(&pool, B, n, D, layout, m->next, counts, key_number);
  const mha_tensor v = make_rows(&pool, B, n, DV, layout, m->next, counts, value_number);
  const mha_status status = mha_cache_append(m->cache, &k, &v, entries, counts, error);
  for (int64_t b = 0; !status && b < B; b++) {
    const int64_t e = entries ? entries[b] : b;
    for (int64_t i = 0; i < (counts ? counts[b] : n); i++)
      m->tokens[e][m->length[e]++] = m->next + b * n + i;
    if (m->length[e] > m->highest[e])
      m->highest[e] = m->length[e];
  }
  m->next += B * n;
  test_pool_free(&pool);
  return status;
}

/* Whether the contract lets `n` tokens into entry e. */
static bool has_room(const model *m, int64_t e, int64_t n) {
  if (m->window)
    return n <= m->capacity - m->window - m->rollback + 1;
  return m->length[e] + n <= m->capacity;
}

static void try_append(model *m, test_random *random) {
  const int64_t orders[][3] = {{0, 1, 2}, {2, 0, 1}, {1, 2, 0}, {2, 1, 0}};
  const int64_t B = test_random_range(random, 1, N), n = test_random_range(random, 0, 6);
  const int64_t *order = orders[test_random_range(random, 0, 3)];
  int64_t counts[N];
  bool fits = true;
  const bool all = test_random_range(random, 0, 1);
  for (int64_t b = 0; b < B; b++) {
    counts[b] = all ? n : test_random_range(random, 0, n);
    fits = fits && has_room(m, order[b], counts[b]) && m->length[order[b]] + n < LONGEST;
    if (m->length[order[b]] + n >= LONGEST)
      return;
  }
  mha_error error;
  const mha_status status =
      append(m, B, n, (int)test_random_range(random, 0, 3), order, all ? NULL : counts, &error);
  test_expect(status, fits ? MHA_OK : MHA_ERROR_LENGTH, &error);
}

static void try_truncate(model *m, test_random *random) {
  const int64_t e = test_random_range(random, 0, N - 1);
  const int64_t length = m->length[e] - test_random_range(random, -1, 4);
  const int64_t lowest = m->window ? m->highest[e] - m->rollback : 0;
  const bool legal = length >= 0 && length <= m->length[e] && length >= lowest;
  mha_error error;
  test_expect(mha_cache_truncate(m->cache, e, length, &error), legal ? MHA_OK : MHA_ERROR_LENGTH,
              &error);
  if (legal)
    m->length[e] = length;
}

static void try_copy(model *m, test_random *random) {
  const int64_t from = test_random_range(random, 0, N - 1),
                to = test_random_range(random, 0, N - 1);
  mha_error error;
  test_expect(mha_cache_copy_entry(m->cache, from, to, &error), MHA_OK, &error);
  m->length[to] = m->length[from];
  m->highest[to] = m->highest[from];
  memmove(m->tokens[to], m->tokens[from], sizeof m->tokens[to]);
}

/* A random history of every operation, in full caches and rings of odd sizes. */
static void a_random_history(void **state) {
  const int64_t sizes[][3] = {{1, 0, 0},  {7, 0, 0},  {64, 0, 0}, {1, 1, 0},  {5, 3, 0}, {7, 3, 2},
                              {13, 4, 4}, {17, 8, 3}, {9, 9, 0},  {10, 5, 5}, {33, 1, 0}};
  static model m;
  (void)state;
  for (size_t which = 0; which < COUNT(sizes); which++) {
    test_random random;
    test_random_seed(&random, which);
    open_model(&m, sizes[which][0], sizes[which][1], sizes[which][2]);
    for (int step = 0; step < (test_small() ? 100 : 1000); step++) {
      const int64_t what = test_random_range(&random, 0, 19);
      test_note("capacity %" PRId64 " window %" PRId64 " rollback %" PRId64 " step %d", m.capacity,
                m.window, m.rollback, step);
      if (what < 13)
        try_append(&m, &random);
      else if (what < 17)
        try_truncate(&m, &random);
      else if (what < 19)
        try_copy(&m, &random);
      else {
        const int64_t e = test_random_range(&random, 0, N - 1);
        test_expect(mha_cache_reset(m.cache, e, NULL), MHA_OK, NULL);
        m.length[e] = m.highest[e] = 0;
      }
      check_model(&m);
    }
    close_model(&m);
  }
  test_note("%s", "");
}

/* B17: rows that were not written keep what the allocator gave, copies of entries included. */
static void unwritten_rows_stay_unwritten(void **state) {
  const int64_t entries[] = {2, 0}, counts[] = {3, 1};
  static model m;
  mha_tensor k, v;
  (void)state;
  open_model(&m, 8, 0, 0);
  test_expect(append(&m, 2, 4, 1, entries, counts, NULL), MHA_OK, NULL);
  test_expect(mha_cache_copy_entry(m.cache, 2, 1, NULL), MHA_OK, NULL);
  test_expect(mha_cache_view(m.cache, &k, &v, NULL), MHA_OK, NULL);
  const int64_t lengths[N] = {1, 3, 3};
  for (int64_t e = 0; e < N; e++)
    for (int64_t at = lengths[e] * G * D; at < 8 * G * D; at++)
      assert_true(test_is_poison(((const float *)k.data)[e * 8 * G * D + at]));
  for (int64_t e = 0; e < N; e++)
    for (int64_t at = lengths[e] * G * DV; at < 8 * G * DV; at++)
      assert_true(test_is_poison(((const float *)v.data)[e * 8 * G * DV + at]));
  close_model(&m);
}

/* Rows behind new_lengths need not be readable. */
static void padding_rows_are_not_read(void **state) {
  static model m;
  test_pool pool = {0};
  (void)state;
  for (int64_t n = 0; n <= 4; n++) {
    float *keys = test_pool_cut(&pool, 4 * G * D, n * G * D);
    float *values = test_pool_cut(&pool, 4 * G * DV, n * G * DV);
    const mha_tensor k = {keys, 1, 4, G, D, 0, 0, 0, 0, MHA_F32, 0},
                     v = {values, 1, 4, G, DV, 0, 0, 0, 0, MHA_F32, 0};
    memset(keys, 0, (size_t)(n * G * D) * sizeof *keys);
    memset(values, 0, (size_t)(n * G * DV) * sizeof *values);
    open_model(&m, 8, 0, 0);
    test_expect(mha_cache_append(m.cache, &k, &v, NULL, &n, NULL), MHA_OK, NULL);
    close_model(&m);
  }
  test_pool_free(&pool);
}

static void the_view(void **state) {
  static model m;
  mha_tensor k, v;
  mha_error error;
  (void)state;
  open_model(&m, 5, 0, 0);
  test_expect(mha_cache_view(m.cache, &k, &v, &error), MHA_OK, &error);
  const int64_t expected[2][8] = {{N, 5, G, D, 5 * G * D, G * D, D, 1},
                                  {N, 5, G, DV, 5 * G * DV, G * DV, DV, 1}};
  const mha_tensor shown[2] = {k, v};
  for (int i = 0; i < 2; i++) {
    const mha_tensor *t = &shown[i];
    const int64_t got[8] = {t->batch,        t->length,     t->heads,       t->size,
                            t->batch_stride, t->row_stride, t->head_stride, t->size_stride};
    assert_memory_equal(got, expected[i], sizeof got);
    assert_int_equal((uintptr_t)t->data % 64, 0);
  }
  test_expect(mha_cache_view(NULL, &k, &v, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_cache_view(m.cache, NULL, &v, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_cache_view(m.cache, &k, NULL, &error), MHA_ERROR_NULL, &error);
  close_model(&m);
}

/* ---- What is refused ------------------------------------------------------------------------- */

static void expect_message(mha_status got, mha_status expected, const mha_error *error,
                           const char *word) {
  test_expect(got, expected, error);
  if (!strstr(error->message, word) || !strstr(error->message, "; rule: "))
    test_failed("the message does not name %s: \"%s\"", word, error->message);
}

static void sizes_that_are_wrong(void **state) {
  const struct {
    size_t member;
    int64_t number;
    mha_status status;
    const char *word;
  } rows[] = {
#define ROW(member, number, status) {offsetof(mha_cache_options, member), number, status, #member}
      ROW(n_entries, 0, MHA_ERROR_SIZE),
      ROW(n_entries, -1, MHA_ERROR_SIZE),
      ROW(n_entries, INT64_MAX, MHA_ERROR_OVERFLOW),
      ROW(n_entries, INT64_MAX / 64, MHA_ERROR_OVERFLOW),
      ROW(capacity, 0, MHA_ERROR_SIZE),
      ROW(capacity, INT64_MIN, MHA_ERROR_SIZE),
      ROW(n_kv_heads, 0, MHA_ERROR_SIZE),
      ROW(n_kv_heads, INT64_MAX, MHA_ERROR_OVERFLOW),
      ROW(head_size, 0, MHA_ERROR_SIZE),
      ROW(head_size, -4, MHA_ERROR_SIZE),
      ROW(head_size, INT64_C(1) << 31, MHA_ERROR_OVERFLOW),
      ROW(value_head_size, -1, MHA_ERROR_SIZE),
      ROW(value_head_size, INT64_MAX, MHA_ERROR_OVERFLOW),
      ROW(window, -1, MHA_ERROR_SIZE),
      ROW(window, 9, MHA_ERROR_LENGTH),
      ROW(window, INT64_MAX, MHA_ERROR_LENGTH),
      ROW(rollback, -1, MHA_ERROR_SIZE),
      ROW(rollback, 1, MHA_ERROR_VALUE), /* without a window */
#undef ROW
  };
  (void)state;
  test_allocator_init(&allocator);
  for (size_t i = 0; i < COUNT(rows); i++) {
    mha_cache_options o = options_of(8, 0, 0);
    int anything = 0;
    mha_cache *cache = (mha_cache *)(void *)&anything;
    mha_error error;
    const char *word = rows[i].status == MHA_ERROR_OVERFLOW ? "options" : rows[i].word;
    memcpy((char *)&o + rows[i].member, &rows[i].number, sizeof rows[i].number);
    test_note("%s %" PRId64, rows[i].word, rows[i].number);
    expect_message(mha_cache_create(&o, &cache, &error), rows[i].status, &error, word);
    assert_null(cache);
  }
  mha_cache_options big = options_of(INT64_MAX, 0, 0);
  mha_cache *cache = NULL;
  mha_error error;
  expect_message(mha_cache_create(&big, &cache, &error), MHA_ERROR_OVERFLOW, &error, "options");
  big = options_of(8, 5, 4); /* 5 + 4 + 1 - 1 = 9 */
  expect_message(mha_cache_create(&big, &cache, &error), MHA_ERROR_LENGTH, &error, "rollback");
  expect_message(mha_cache_create(NULL, &cache, &error), MHA_ERROR_NULL, &error, "options");
  expect_message(mha_cache_create(&big, NULL, &error), MHA_ERROR_NULL, &error, "cache");
  big.struct_size = 3;
  expect_message(mha_cache_create(&big, &cache, &error), MHA_ERROR_STRUCT_SIZE, &error, "options");
  assert_int_equal(allocator.calls, 0);
  mha_cache_destroy(NULL);
}

static void the_value_size_follows(void **state) {
  mha_cache_options o = options_of(8, 0, 0);
  mha_cache *cache = NULL;
  mha_tensor k, v;
  (void)state;
  test_allocator_init(&allocator);
  o.value_head_size = 0;
  test_expect(mha_cache_create(&o, &cache, NULL), MHA_OK, NULL);
  test_expect(mha_cache_view(cache, &k, &v, NULL), MHA_OK, NULL);
  assert_int_equal(v.size, D);
  mha_cache_destroy(cache);
  test_allocator_check(&allocator);
}

/* A layer gives the sizes that are left 0, and must agree with the others. */
static void sizes_of_a_layer(void **state) {
  mha_config config;
  mha_matrices matrices;
  mha_weights *weights = NULL;
  mha_cache *cache = NULL;
  mha_error error;
  mha_tensor k, v;
  (void)state;
  mha_config_init(&config, 12, 4);
  config.n_kv_heads = G;
  config.value_head_size = 2;
  config.key_width = G * 3;
  config.value_width = G * 2;
  config.output_width = 4 * 2;
  MHA_INIT(&matrices); /* no matrix: G = 2, d = 3, dv = 2 */
  test_expect(mha_weights_create(&config, &matrices, &weights, &error), MHA_OK, &error);
  for (int given = 0; given < 16; given++) {
    mha_cache_options o;
    MHA_INIT(&o);
    o.n_entries = 2;
    o.capacity = 5;
    o.weights = weights;
    o.n_kv_heads = given & 1 ? G : 0;
    o.head_size = given & 2 ? 3 : 0;
    o.value_head_size = given & 4 ? 2 : 0;
    o.window = given & 8 ? 3 : 0;
    test_note("given %d", given);
    test_expect(mha_cache_create(&o, &cache, &error), MHA_OK, &error);
    test_expect(mha_cache_view(cache, &k, &v, &error), MHA_OK, &error);
    assert_int_equal(k.heads, G);
    assert_int_equal(k.size, 3);
    assert_int_equal(v.heads, G);
    assert_int_equal(v.size, 2);
    assert_int_equal(k.batch, 2);
    assert_int_equal(k.length, 5);
    mha_cache_destroy(cache);
    const int64_t wrong = given & 1 ? -1 : 4;
    o.n_kv_heads = given & 2 ? wrong : o.n_kv_heads;
    o.head_size = given & 2 ? o.head_size : wrong;
    expect_message(mha_cache_create(&o, &cache, &error), MHA_ERROR_SIZE, &error,
                   given & 2 ? "options.n_kv_heads" : "options.head_size");
    assert_null(cache);
    o.n_kv_heads = o.head_size = 0;
    o.value_head_size = 3;
    expect_message(mha_cache_create(&o, &cache, &error), MHA_ERROR_SIZE, &error,
                   "options.value_head_size");
  }
  mha_weights_destroy(weights);
}

/* Two entries of three tokens, and all that must not change. */
typedef struct still {
  model m;
  float *keys, *values;
} still;

static still s;

static float *copy_of(const mha_tensor *t) {
  const size_t bytes = (size_t)(t->batch * t->batch_stride) * sizeof(float);
  float *twin = malloc(bytes);
  assert_non_null(twin);
  memcpy(twin, t->data, bytes);
  return twin;
}

static void open_still(int64_t capacity, int64_t window, int64_t rollback) {
  mha_tensor k, v;
  open_model(&s.m, capacity, window, rollback);
  test_expect(append(&s.m, 2, 3, 0, NULL, NULL, NULL), MHA_OK, NULL);
  test_expect(mha_cache_view(s.m.cache, &k, &v, NULL), MHA_OK, NULL);
  s.keys = copy_of(&k);
  s.values = copy_of(&v);
}

static void expect_still(void) {
  mha_tensor k, v;
  check_model(&s.m);
  test_expect(mha_cache_view(s.m.cache, &k, &v, NULL), MHA_OK, NULL);
  assert_memory_equal(k.data, s.keys, (size_t)(k.batch * k.batch_stride) * sizeof(float));
  assert_memory_equal(v.data, s.values, (size_t)(v.batch * v.batch_stride) * sizeof(float));
}

static void close_still(void) {
  expect_still();
  free(s.keys);
  free(s.values);
  close_model(&s.m);
}

static void entries_that_are_not_there(void **state) {
  const int64_t bad[] = {-1, N, INT64_MIN, INT64_MAX};
  int64_t length = 77;
  mha_error error;
  (void)state;
  open_still(8, 0, 0);
  for (size_t i = 0; i < COUNT(bad); i++) {
    const int64_t e = bad[i], entries[] = {1, e};
    mha_cache *c = s.m.cache;
    expect_message(mha_cache_length(c, e, &length, &error), MHA_ERROR_LENGTH, &error, "entry");
    expect_message(mha_cache_truncate(c, e, 0, &error), MHA_ERROR_LENGTH, &error, "entry");
    expect_message(mha_cache_reset(c, e, &error), MHA_ERROR_LENGTH, &error, "entry");
    expect_message(mha_cache_copy_entry(c, e, 0, &error), MHA_ERROR_LENGTH, &error, "from");
    expect_message(mha_cache_copy_entry(c, 0, e, &error), MHA_ERROR_LENGTH, &error, "to");
    expect_message(append(&s.m, 2, 1, 0, entries, NULL, &error), MHA_ERROR_LENGTH, &error,
                   "cache_entries");
    expect_still(); /* nobody is left inside */
  }
  assert_int_equal(length, 77);
  expect_message(mha_cache_length(NULL, 0, &length, &error), MHA_ERROR_NULL, &error, "cache");
  expect_message(mha_cache_length(s.m.cache, 0, NULL, &error), MHA_ERROR_NULL, &error, "length");
  expect_message(mha_cache_truncate(NULL, 0, 0, &error), MHA_ERROR_NULL, &error, "cache");
  expect_message(mha_cache_reset(NULL, 0, &error), MHA_ERROR_NULL, &error, "cache");
  expect_message(mha_cache_copy_entry(NULL, 0, 1, &error), MHA_ERROR_NULL, &error, "cache");
  close_still();
}

/* B30: counts that would become sizes of a product or a copy. */
static void b30_appends_that_do_not_fit(void **state) {
  const int64_t twice[] = {1, 1}, swapped[] = {1, 0};
  const int64_t negative[] = {0, -1}, many[] = {1, 3}, least[] = {INT64_MIN, 0};
  const struct {
    int64_t B, n;
    const int64_t *entries, *counts;
    const char *word;
  } rows[] = {
      {2, 2, twice, NULL, "cache_entries"},
      {2, 2, twice, (const int64_t[]){0, 0}, "cache_entries"},
      {2, 2, NULL, negative, "new_lengths"},
      {2, 2, NULL, many, "new_lengths"},
      {2, 2, swapped, least, "new_lengths"},
      {1, 6, NULL, NULL, "capacity"}, /* 3 + 6 > 8 */
      {2, 6, swapped, (const int64_t[]){5, 6}, "capacity"},
      {4, 1, NULL, NULL, "batch"},
  };
  mha_error error;
  (void)state;
  open_still(8, 0, 0);
  for (size_t i = 0; i < COUNT(rows); i++) {
    test_pool pool = {0};
    const mha_tensor k = make_rows(&pool, rows[i].B, rows[i].n, D, 0, 900, NULL, key_number);
    const mha_tensor v = make_rows(&pool, rows[i].B, rows[i].n, DV, 0, 900, NULL, value_number);
    test_note("row %zu", i);
    expect_message(mha_cache_append(s.m.cache, &k, &v, rows[i].entries, rows[i].counts, &error),
                   MHA_ERROR_LENGTH, &error, rows[i].word);
    test_expect(mha_cache_append(s.m.cache, &k, &v, rows[i].entries, rows[i].counts, NULL),
                MHA_ERROR_LENGTH, NULL);
    expect_still();
    test_pool_free(&pool);
  }
  close_still();
}

/* capacity - window - rollback + 1 tokens at once, and no more. */
static void chunks_of_a_ring(void **state) {
  (void)state;
  for (int64_t window = 1; window <= 5; window++)
    for (int64_t rollback = 0; rollback <= 3; rollback++) {
      mha_error error;
      const int64_t largest = 11 - window - rollback + 1;
      open_still(11, window, rollback);
      expect_message(append(&s.m, 1, largest + 1, 0, NULL, NULL, &error), MHA_ERROR_LENGTH, &error,
                     "ring");
      expect_still();
      for (int round = 0; round < 5; round++) {
        test_expect(append(&s.m, 1, largest, 0, NULL, NULL, &error), MHA_OK, &error);
        check_model(&s.m);
      }
      free(s.keys);
      free(s.values);
      close_model(&s.m);
    }
}

static void rows_that_do_not_fit(void **state) {
  const struct {
    int tensor;
    size_t member;
    int64_t number;
    mha_status status;
  } rows[] = {
#define ROW(tensor, member, number, status) {tensor, offsetof(mha_tensor, member), number, status}
      ROW(0, heads, 1, MHA_ERROR_SIZE),          ROW(0, size, D - 1, MHA_ERROR_SIZE),
      ROW(1, heads, 3, MHA_ERROR_SIZE),          ROW(1, size, D, MHA_ERROR_SIZE),
      ROW(0, batch, 2, MHA_ERROR_SIZE),          ROW(1, length, 1, MHA_ERROR_SIZE),
      ROW(0, batch, -1, MHA_ERROR_SIZE),         ROW(1, length, -1, MHA_ERROR_SIZE),
      ROW(0, size_stride, 2, MHA_ERROR_STRIDE),  ROW(1, row_stride, 1, MHA_ERROR_STRIDE),
      ROW(0, head_stride, -1, MHA_ERROR_STRIDE),
#undef ROW
  };
  mha_error error;
  test_pool pool = {0};
  (void)state;
  open_still(8, 0, 0);
  for (size_t i = 0; i < COUNT(rows); i++) {
    mha_tensor both[2] = {make_rows(&pool, 1, 2, D, 1, 900, NULL, key_number),
                          make_rows(&pool, 1, 2, DV, 1, 900, NULL, value_number)};
    memcpy((char *)&both[rows[i].tensor] + rows[i].member, &rows[i].number, sizeof(int64_t));
    test_note("row %zu", i);
    expect_message(mha_cache_append(s.m.cache, &both[0], &both[1], NULL, NULL, &error),
                   rows[i].status, &error, rows[i].tensor ? "v" : "k");
    expect_still();
  }
  const mha_tensor k = make_rows(&pool, 1, 2, D, 0, 900, NULL, key_number);
  const mha_tensor v = make_rows(&pool, 1, 2, DV, 0, 900, NULL, value_number);
  mha_tensor none = k;
  none.data = NULL;
  expect_message(mha_cache_append(NULL, &k, &v, NULL, NULL, &error), MHA_ERROR_NULL, &error,
                 "cache");
  expect_message(mha_cache_append(s.m.cache, NULL, &v, NULL, NULL, &error), MHA_ERROR_NULL, &error,
                 "k");
  expect_message(mha_cache_append(s.m.cache, &k, NULL, NULL, NULL, &error), MHA_ERROR_NULL, &error,
                 "v");
  expect_message(mha_cache_append(s.m.cache, &none, &v, NULL, NULL, &error), MHA_ERROR_NULL, &error,
                 "k");
  test_pool_free(&pool);
  close_still();
}

/* Rows of the cache itself: one would be read while it is written. */
static void rows_of_the_cache_itself(void **state) {
  mha_tensor k, v;
  mha_error error;
  (void)state;
  open_still(8, 0, 0);
  test_expect(mha_cache_view(s.m.cache, &k, &v, NULL), MHA_OK, NULL);
  k.batch = v.batch = 1;
  k.length = v.length = 2;
  expect_message(mha_cache_append(s.m.cache, &k, &v, NULL, NULL, &error), MHA_ERROR_OVERLAP, &error,
                 "cache");
  expect_still();
  test_pool pool = {0};
  const mha_tensor other = make_rows(&pool, 1, 2, D, 0, 900, NULL, key_number);
  expect_message(mha_cache_append(s.m.cache, &other, &v, NULL, NULL, &error), MHA_ERROR_OVERLAP,
                 &error, "cache");
  test_pool_free(&pool);
  close_still();
}

static void truncations_that_are_too_deep(void **state) {
  mha_error error;
  (void)state;
  open_still(8, 0, 0); /* entry 0 has 3 tokens, entry 2 none */
  expect_message(mha_cache_truncate(s.m.cache, 0, 4, &error), MHA_ERROR_LENGTH, &error, "length");
  expect_message(mha_cache_truncate(s.m.cache, 0, -1, &error), MHA_ERROR_LENGTH, &error, "length");
  expect_message(mha_cache_truncate(s.m.cache, 2, 1, &error), MHA_ERROR_LENGTH, &error, "length");
  expect_message(mha_cache_truncate(s.m.cache, 0, INT64_MAX, &error), MHA_ERROR_LENGTH, &error,
                 "length");
  test_expect(mha_cache_truncate(s.m.cache, 0, 3, &error), MHA_OK, &error);
  close_still();
  open_still(8, 3, 2);
  expect_message(mha_cache_truncate(s.m.cache, 0, 0, &error), MHA_ERROR_LENGTH, &error, "rollback");
  test_expect(mha_cache_truncate(s.m.cache, 0, 2, &error), MHA_OK, &error);
  test_expect(mha_cache_truncate(s.m.cache, 0, 1, &error), MHA_OK, &error);
  /* counted from the longest length, not from the one at hand */
  expect_message(mha_cache_truncate(s.m.cache, 0, 0, &error), MHA_ERROR_LENGTH, &error, "rollback");
  s.m.length[0] = 1;
  close_still();
  open_still(8, 3, 2);
  test_expect(mha_cache_reset(s.m.cache, 0, &error), MHA_OK, &error);
  test_expect(mha_cache_truncate(s.m.cache, 0, 0, &error), MHA_OK, &error);
  s.m.length[0] = s.m.highest[0] = 0;
  close_still();
}

/* ---- One caller that changes it, or any number of readers ------------------------------------ */

typedef struct inside {
  mha_cache *cache;
  mha_context *context;
  mha_weights *weights;
  bool changing;
  int steps;
} inside;

/* Everything that a trace callback may try on the cache of the call that it comes from. */
static void try_everything(void *user, const mha_trace_step *step) {
  inside *at = user;
  const mha_status change = MHA_ERROR_BUSY, read = at->changing ? MHA_ERROR_BUSY : MHA_OK;
  float numbers[G * D] = {0};
  const mha_tensor k = {numbers, 1, 1, G, D, 0, 0, 0, 0, MHA_F32, 0},
                   v = {numbers, 1, 1, G, DV, 0, 0, 0, 0, MHA_F32, 0};
  mha_tensor shown;
  int64_t length = 0;
  mha_error error;
  (void)step;
  at->steps++;
  test_expect(mha_cache_length(at->cache, 0, &length, &error), read, &error);
  test_expect(mha_cache_row(at->cache, 0, 0, &length, &error), read, &error);
  test_expect(mha_cache_page_count(at->cache, 0, NULL, NULL, NULL, NULL, &error), read, &error);
  test_expect(mha_cache_grow(at->cache, 9, &error), change, &error);
  test_expect(mha_cache_save(at->cache, 1, "saved", &error), read, &error);
  test_expect(mha_cache_load("entry", at->cache, 1, &error), change, &error);
  test_expect(mha_cache_truncate(at->cache, 0, 0, &error), change, &error);
  test_expect(mha_cache_reset(at->cache, 0, &error), change, &error);
  test_expect(mha_cache_copy_entry(at->cache, 0, 1, &error), change, &error);
  test_expect(mha_cache_append(at->cache, &k, &v, NULL, NULL, &error), change, &error);
  test_expect(mha_cache_view(at->cache, &shown, &shown, &error), MHA_OK, &error);
  mha_forward_args args; /* a second context on the same cache */
  float x[G * D] = {0}, y[G * D] = {0};
  MHA_INIT(&args);
  args.batch = args.query_length = args.key_length = 1;
  args.query = args.key = args.value = x;
  args.output = y;
  args.cache = at->cache;
  test_expect(mha_forward(at->context, at->weights, &args, &error), change, &error);
  args.cache_mode = MHA_CACHE_ATTEND;
  args.key = args.value = NULL;
  args.key_length = 0;
  test_expect(mha_forward(at->context, at->weights, &args, &error), read, &error);
}

static void a_callback_finds_it_busy(void **state) {
  mha_config config;
  mha_matrices matrices;
  const mha_cache_options o = options_of(8, 0, 0);
  mha_context *context = NULL;
  mha_forward_args args;
  mha_error error;
  inside at = {NULL, NULL, NULL, true, 0};
  float x[2 * G * D] = {1, 2, 3}, y[2 * G * D];
  int64_t length = 0;
  (void)state;
  test_allocator_init(&allocator);
  mha_config_init(&config, G * D, G);
  config.value_head_size = DV;
  config.value_width = G * DV;
  config.output_width = G * DV;
  MHA_INIT(&matrices);
  test_expect(mha_weights_create(&config, &matrices, &at.weights, &error), MHA_OK, &error);
  test_expect(mha_cache_create(&o, &at.cache, &error), MHA_OK, &error);
  assert_int_equal(test_folder_enter("test_cache"), 0);
  test_expect(mha_cache_save(at.cache, 1, "entry", &error), MHA_OK, &error);
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  test_expect(mha_context_create(NULL, &at.context, &error), MHA_OK, &error);
  test_expect(mha_context_trace(context, try_everything, &at, &error), MHA_OK, &error);
  MHA_INIT(&args);
  args.batch = 1;
  args.query_length = args.key_length = 2;
  args.query = args.key = args.value = x;
  args.output = y;
  args.cache = at.cache;
  for (int round = 0; round < 2; round++) {
    at.changing = round == 0;
    test_expect(mha_forward(context, at.weights, &args, &error), MHA_OK, &error);
    assert_int_equal(test_files_in("."), round == 0 ? 1 : 2);
    assert_true(at.steps >= 4);
    test_expect(mha_cache_length(at.cache, 0, &length, &error), MHA_OK, &error);
    assert_int_equal(length, 2);
    at.steps = 0;
    args.cache_mode = MHA_CACHE_ATTEND;
    args.key = args.value = NULL;
    args.key_length = 0;
  }
  assert_int_equal(test_remove_files("."), 0);
  assert_int_equal(test_folder_leave(), 0);
  mha_context_destroy(at.context);
  mha_context_destroy(context);
  mha_cache_destroy(at.cache);
  mha_weights_destroy(at.weights);
  test_allocator_check(&allocator);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_random_history),
      cmocka_unit_test(unwritten_rows_stay_unwritten),
      cmocka_unit_test(padding_rows_are_not_read),
      cmocka_unit_test(the_view),
      cmocka_unit_test(sizes_that_are_wrong),
      cmocka_unit_test(the_value_size_follows),
      cmocka_unit_test(sizes_of_a_layer),
      cmocka_unit_test(entries_that_are_not_there),
      cmocka_unit_test(b30_appends_that_do_not_fit),
      cmocka_unit_test(chunks_of_a_ring),
      cmocka_unit_test(rows_that_do_not_fit),
      cmocka_unit_test(rows_of_the_cache_itself),
      cmocka_unit_test(truncations_that_are_too_deep),
      cmocka_unit_test(a_callback_finds_it_busy),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
