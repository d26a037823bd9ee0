/* A cache in pages as an object: random operations beside a plain model that knows every token and
 * who shares which page; common prefixes; more room; what is refused. */
#include "cache_model.h"
#include "folder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- Random operations ----------------------------------------------------------------------- */

/* A million altogether, or as many as there is time for. */
static int64_t operations(int64_t many) {
  return getenv("MHA_TEST_MILLION") ? many : many / (test_small() ? 50 : 10);
}

/* Some entries, each once, and how many tokens each gets. */
static int64_t draw_call(test_random *random, const cache_model *m, int64_t *entries,
                         int64_t *counts) {
  const int64_t first = test_random_range(random, 0, MODEL_ENTRIES - 1);
  const int64_t step = 2 * test_random_range(random, 0, 3) + 1; /* odd: each once */
  const int64_t n = test_random_range(random, 1, 3);
  const int64_t most = model_largest_chunk(m) < 24 ? model_largest_chunk(m) : 24;
  for (int64_t b = 0; b < n; b++) {
    entries[b] = (first + b * step) % MODEL_ENTRIES;
    counts[b] = test_random_range(random, 0, most);
  }
  return n;
}

static void try_append(test_random *random, cache_model *m) {
  int64_t entries[3], counts[3];
  const int64_t n = draw_call(random, m, entries, counts);
  model_append(m, n, entries, counts);
}

static void try_truncate(test_random *random, cache_model *m) {
  const int64_t e = test_random_range(random, 0, MODEL_ENTRIES - 1);
  const int64_t lowest = model_lowest_length(m, e);
  if (lowest <= m->length[e])
    model_truncate(m, e, test_random_range(random, lowest, m->length[e]));
}

/* An entry of one cache goes through a file to one of another, or of the same. */
static void try_file(test_random *random, const cache_model *from, cache_model *to) {
  const int64_t e = test_random_range(random, 0, MODEL_ENTRIES - 1);
  const int64_t f = test_random_range(random, 0, MODEL_ENTRIES - 1);
  mha_error error;
  test_expect(mha_cache_save(from->cache, e, "entry", &error), MHA_OK, &error);
  model_load(to, f, from, e, "entry");
}

static void try_operation(test_random *random, cache_model *m, cache_model *other) {
  const int64_t kind = test_random_range(random, 0, 999);
  const int64_t a = test_random_range(random, 0, MODEL_ENTRIES - 1);
  const int64_t b = test_random_range(random, 0, MODEL_ENTRIES - 1);
  if (kind < 550)
    try_append(random, m);
  else if (kind < 720)
    model_share(m, a, b);
  else if (kind < 900)
    try_truncate(random, m);
  else if (kind < 990)
    model_reset(m, a);
  else if (kind < 995)
    try_file(random, m, m);
  else
    try_file(random, kind < 998 ? m : other, kind < 998 ? other : m);
}

typedef struct trial {
  model_plan one, other;
  int64_t operations;
} trial;

static void random_operations(void **state) {
  static const trial trials[] = {
      {{.T = 16, .n_pages = 40}, {.T = 64, .n_pages = 9}, 700000},
      {{.T = 16, .n_pages = 23, .capacity = 150}, {.capacity = 190}, 150000},
      {{.T = 16, .n_pages = 20, .capacity = 90, .window = 40, .rollback = 10},
       {.capacity = 61, .window = 33, .rollback = 8},
       100000},
      {{.T = 32, .n_pages = 6, .capacity = 75, .window = 75}, {.T = 16, .n_pages = 50}, 25000},
      {{.T = 16, .n_pages = 16, .type = MHA_F16}, {.T = 32, .n_pages = 20, .type = MHA_F16}, 10000},
      {{.T = 16, .n_pages = 16, .capacity = 90, .window = 40, .rollback = 10, .type = MHA_BF16},
       {.T = 32, .n_pages = 20, .type = MHA_BF16},
       5000},
      {{.T = 16, .n_pages = 12, .type = MHA_Q8_0}, {.capacity = 100, .type = MHA_Q8_0}, 10000},
  };
  (void)state;
  for (size_t k = 0; k < COUNT(trials); k++) {
    cache_model one, other;
    test_random random;
    test_random_seed(&random, 100 + k);
    model_open(&one, &trials[k].one);
    model_open(&other, &trials[k].other);
    for (int64_t i = 0; i < operations(trials[k].operations); i++) {
      test_note("trial %zu, operation %lld", k, (long long)i);
      const bool first = test_random_range(&random, 0, 9) > 0;
      try_operation(&random, first ? &one : &other, first ? &other : &one);
      if (i % 64 == 0) {
        model_check(&one);
        model_check(&other);
      }
    }
    if (one.n_refused == 0)
      test_failed("the pool never ran out in trial %zu", k);
    model_close(&one);
    model_close(&other);
  }
  assert_int_equal(test_remove_files("."), 0);
}

/* ---- Common prefixes ------------------------------------------------------------------------- */

static int64_t free_pages(const mha_cache *cache) {
  int64_t n_free = -1;
  mha_error error;
  test_expect(mha_cache_page_count(cache, 0, NULL, NULL, NULL, &n_free, &error), MHA_OK, &error);
  return n_free;
}

static void append_ones(mha_cache *cache, int64_t entry, int64_t n) {
  const mha_cache_options o = model_options(&(model_plan){.T = 16, .n_pages = 1});
  const int64_t width = o.head_size;
  float *rows = test_allocate((size_t)(n * width), sizeof *rows);
  const mha_tensor t = {rows, 1, n, o.n_kv_heads, width, 0, 0, 0, 0, MHA_F32, 0};
  mha_error error;
  test_expect(mha_cache_append(cache, &t, &t, &entry, NULL, &error), MHA_OK, &error);
  free(rows);
}

/* 256 sequences that begin with the same 1,000 tokens. */
static void a_common_prefix_is_kept_once(void **state) {
  enum { SEQUENCES = 256, PREFIX = 1000 };
  static const int64_t sizes[] = {16, 64};
  (void)state;
  for (size_t k = 0; k < COUNT(sizes); k++) {
    const int64_t T = sizes[k];
    const int64_t prefix = (PREFIX + T - 1) / T;
    mha_cache_options o = model_options(&(model_plan){.T = T, .n_pages = prefix + SEQUENCES});
    mha_cache *cache = NULL;
    mha_error error;
    o.allocator = NULL;
    o.n_entries = SEQUENCES;
    test_expect(mha_cache_create(&o, &cache, &error), MHA_OK, &error);
    append_ones(cache, 0, PREFIX);
    assert_int_equal(free_pages(cache), SEQUENCES);
    for (int64_t e = 1; e < SEQUENCES; e++)
      test_expect(mha_cache_copy_entry(cache, 0, e, &error), MHA_OK, &error);
    assert_int_equal(free_pages(cache), SEQUENCES);
    int64_t one[SEQUENCES];
    int64_t wanted = 0;
    for (int e = 0; e < SEQUENCES; e++)
      one[e] = 1;
    /* each would get a copy of the last page, which is partly filled */
    test_expect(mha_cache_page_count(cache, SEQUENCES, NULL, one, &wanted, NULL, &error), MHA_OK,
                &error);
    assert_int_equal(wanted, SEQUENCES);
    for (int64_t e = 1; e < SEQUENCES; e++)
      append_ones(cache, e, 1);
    assert_int_equal(free_pages(cache), 1);
    append_ones(cache, 0, 1); /* nobody else has its last page by now */
    assert_int_equal(free_pages(cache), 1);
    for (int64_t e = 0; e < SEQUENCES; e++)
      test_expect(mha_cache_reset(cache, e, &error), MHA_OK, &error);
    assert_int_equal(free_pages(cache), o.n_pages);
    mha_cache_destroy(cache);
  }
}

/* ---- More room ------------------------------------------------------------------------------- */

static void grown_caches_keep_everything(void **state) {
  static const model_plan plans[] = {{.capacity = 20},
                                     {.capacity = 20, .type = MHA_F16},
                                     {.capacity = 20, .type = MHA_BF16},
                                     {.capacity = 20, .type = MHA_Q8_0},
                                     {.capacity = 20, .window = 8, .rollback = 3, .type = MHA_F16},
                                     {.capacity = 20, .window = 9, .rollback = 2, .type = MHA_Q8_0},
                                     {.capacity = 20, .window = 8, .rollback = 3},
                                     {.capacity = 31, .window = 31}};
  (void)state;
  for (size_t k = 0; k < COUNT(plans); k++)
    for (int64_t tokens = 0; tokens < 60; tokens += 7) {
      cache_model m;
      test_note("plan %zu, %lld tokens", k, (long long)tokens);
      model_open(&m, &plans[k]);
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t e = 0; e < 2; e++)
          if (m.window > 0 || m.length[e] < m.capacity)
            model_append(&m, 1, &e, &(int64_t){1});
      const int64_t back = model_lowest_length(&m, 0);
      model_truncate(&m, 0, back > m.length[0] - 2 ? back : m.length[0] - 2);
      model_grow(&m, m.capacity);
      model_grow(&m, m.capacity + 1);
      model_check(&m);
      model_grow(&m, 2 * m.capacity + 5);
      model_check(&m);
      /* what was dropped before stays dropped, and so a ring goes back as far as it could */
      const int64_t lowest = model_lowest_length(&m, 1);
      mha_error error;
      if (lowest > 0)
        test_expect(mha_cache_truncate(m.cache, 1, lowest - 1, &error), MHA_ERROR_LENGTH, &error);
      if (lowest <= m.length[1])
        model_truncate(&m, 1, lowest);
      for (int64_t t = 0; t < 30; t++)
        model_append(&m, 1, &(int64_t){1}, &(int64_t){1});
      model_check(&m);
      model_close(&m);
    }
}

/* An error that holds anything: what it says is written anew by every call. */
static mha_error *garbage(mha_error *error) {
  memset(error, 0xA5, sizeof *error);
  return error;
}

static void what_grow_refuses(void **state) {
  cache_model m, pages;
  mha_error error;
  (void)state;
  model_open(&m, &(model_plan){.capacity = 20});
  model_append(&m, 1, &(int64_t){3}, &(int64_t){15});
  test_expect(mha_cache_grow(NULL, 40, garbage(&error)), MHA_ERROR_NULL, &error);
  test_expect(mha_cache_grow(m.cache, 19, garbage(&error)), MHA_ERROR_SIZE, &error);
  assert_non_null(strstr(error.message, "capacity is 19; rule: at least the cache's, 20"));
  test_expect(mha_cache_grow(m.cache, -1, garbage(&error)), MHA_ERROR_SIZE, &error);
  test_expect(mha_cache_grow(m.cache, INT64_MAX, garbage(&error)), MHA_ERROR_OVERFLOW, &error);
  m.allocator.fail_at = m.allocator.calls + 1;
  test_expect(mha_cache_grow(m.cache, 40, garbage(&error)), MHA_ERROR_MEMORY, &error);
  m.allocator.fail_at = 0;
  model_check(&m);
  model_append(&m, 1, &(int64_t){3}, &(int64_t){5});
  model_append(&m, 1, &(int64_t){3}, &(int64_t){1}); /* there is still no room */
  model_close(&m);
  model_open(&pages, &(model_plan){.T = 16, .n_pages = 3});
  test_expect(mha_cache_grow(pages.cache, 1000, garbage(&error)), MHA_ERROR_UNSUPPORTED, &error);
  assert_non_null(strstr(error.message, "cache has 3 pages of 16 tokens; rule: only a cache "
                                        "without pages grows"));
  model_close(&pages);
}

/* ---- Bad input ------------------------------------------------------------------------------- */

typedef struct bad_options {
  int64_t capacity, page_tokens, n_pages;
  mha_status status;
  const char *name;
} bad_options;

static void options_that_are_wrong(void **state) {
  static const bad_options rows[] = {
      {0, 8, 4, MHA_ERROR_VALUE, "options.page_tokens is 8; rule: 0 or a power of two"},
      {0, 24, 4, MHA_ERROR_VALUE, "options.page_tokens is 24"},
      {0, -16, 4, MHA_ERROR_VALUE, "options.page_tokens is -16"},
      {0, INT64_MIN, 4, MHA_ERROR_VALUE, "options.page_tokens"},
      {0, 1, 4, MHA_ERROR_VALUE, "options.page_tokens is 1"},
      {64, 16, 0, MHA_ERROR_SIZE, "options.n_pages is 0 with page_tokens 16; rule: 1 to"},
      {64, 16, -1, MHA_ERROR_SIZE, "options.n_pages is -1"},
      {64, 16, INT64_C(1) << 40, MHA_ERROR_SIZE, "options.n_pages is 1099511627776"},
      {64, 0, 3, MHA_ERROR_VALUE, "options.n_pages is 3 without page_tokens; rule: 0 then"},
      {0, 0, 0, MHA_ERROR_SIZE, "options.capacity is 0"},
      {-1, 16, 4, MHA_ERROR_SIZE, "options.capacity is -1"},
      {0, INT64_C(1) << 62, 4, MHA_ERROR_OVERFLOW, "options has 4 pages"},
      {5, INT64_C(1) << 62, 4, MHA_ERROR_OVERFLOW, "options asks for 4 pages"},
      {INT64_MAX, 16, 4, MHA_ERROR_OVERFLOW, "options has 8 entries"},
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    mha_cache *cache = (mha_cache *)(uintptr_t)1;
    mha_error error;
    test_note("row %zu", i);
    memset(&error, 0xA5, sizeof error);
    mha_cache_options o = model_options(&(model_plan){.T = 16, .n_pages = 3});
    o.allocator = NULL;
    o.capacity = rows[i].capacity;
    o.page_tokens = rows[i].page_tokens;
    o.n_pages = rows[i].n_pages;
    test_expect(mha_cache_create(&o, &cache, &error), rows[i].status, &error);
    assert_null(cache);
    if (!strstr(error.message, rows[i].name))
      test_failed("\"%s\" lacks \"%s\"", error.message, rows[i].name);
  }
}

/* A ring in pages obeys the rules of a ring. */
static void rings_that_are_wrong(void **state) {
  mha_cache *cache = NULL;
  mha_error error;
  (void)state;
  mha_cache_options o = model_options(&(model_plan){.T = 16, .n_pages = 3, .window = 49});
  o.allocator = NULL;
  test_expect(mha_cache_create(&o, &cache, &error), MHA_ERROR_LENGTH, &error);
  o.window = 48;
  test_expect(mha_cache_create(&o, &cache, &error), MHA_OK, &error);
  mha_cache_destroy(cache);
}

static void questions_that_are_wrong(void **state) {
  const int64_t few[2] = {1, 1};
  const int64_t negative[2] = {1, -1};
  const int64_t many[2] = {1, 1000};
  const int64_t outside[2] = {0, MODEL_ENTRIES};
  cache_model m;
  mha_error error;
  int64_t wanted = -7, n_free = -7, row = -7;
  (void)state;
  model_open(&m, &(model_plan){.T = 16, .n_pages = 40, .capacity = 100});
  model_append(&m, 1, &(int64_t){2}, &(int64_t){20});
  test_expect(mha_cache_page_count(NULL, 0, NULL, NULL, &wanted, &n_free, garbage(&error)),
              MHA_ERROR_NULL, &error);
  test_expect(mha_cache_page_count(m.cache, 2, NULL, NULL, &wanted, &n_free, garbage(&error)),
              MHA_ERROR_NULL, &error);
  test_expect(mha_cache_page_count(m.cache, -1, NULL, few, &wanted, &n_free, garbage(&error)),
              MHA_ERROR_SIZE, &error);
  test_expect(mha_cache_page_count(m.cache, 2, NULL, negative, &wanted, &n_free, garbage(&error)),
              MHA_ERROR_LENGTH, &error);
  assert_non_null(strstr(error.message, "new_lengths[1] is -1"));
  test_expect(mha_cache_page_count(m.cache, 2, NULL, many, &wanted, &n_free, garbage(&error)),
              MHA_ERROR_LENGTH, &error);
  test_expect(mha_cache_page_count(m.cache, 2, outside, few, &wanted, &n_free, garbage(&error)),
              MHA_ERROR_LENGTH, &error);
  assert_int_equal(wanted, -7);
  assert_int_equal(n_free, -7);
  test_expect(mha_cache_page_count(m.cache, 2, NULL, few, NULL, NULL, &error), MHA_OK, &error);
  test_expect(mha_cache_row(NULL, 0, 0, &row, garbage(&error)), MHA_ERROR_NULL, &error);
  test_expect(mha_cache_row(m.cache, 2, 0, NULL, garbage(&error)), MHA_ERROR_NULL, &error);
  test_expect(mha_cache_row(m.cache, MODEL_ENTRIES, 0, &row, garbage(&error)), MHA_ERROR_LENGTH,
              &error);
  test_expect(mha_cache_row(m.cache, -1, 0, &row, garbage(&error)), MHA_ERROR_LENGTH, &error);
  test_expect(mha_cache_row(m.cache, 2, 20, &row, garbage(&error)), MHA_ERROR_LENGTH, &error);
  assert_non_null(strstr(error.message, "token is 20; rule: one that the entry holds"));
  test_expect(mha_cache_row(m.cache, 2, -1, &row, garbage(&error)), MHA_ERROR_LENGTH, &error);
  test_expect(mha_cache_row(m.cache, 1, 0, &row, garbage(&error)), MHA_ERROR_LENGTH, &error);
  assert_int_equal(row, -7);
  model_check(&m);
  model_close(&m);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Creating takes two blocks, and nothing else takes any. */
static void allocations_that_fail(void **state) {
  const mha_cache_options proto = model_options(&(model_plan){.T = 16, .n_pages = 6});
  (void)state;
  for (int64_t n = 1; n <= 3; n++) {
    test_allocator allocator;
    mha_cache *cache = NULL;
    mha_error error;
    mha_cache_options o = proto;
    test_allocator_init(&allocator);
    allocator.fail_at = n;
    o.allocator = &allocator.mha;
    const mha_status status = mha_cache_create(&o, &cache, &error);
    test_expect(status, n < 3 ? MHA_ERROR_MEMORY : MHA_OK, &error);
    if (!status) {
      append_ones(cache, 0, 50);
      test_expect(mha_cache_copy_entry(cache, 0, 1, &error), MHA_OK, &error);
      append_ones(cache, 1, 1);
      assert_int_equal(allocator.calls, 2);
    }
    mha_cache_destroy(cache);
    test_allocator_check(&allocator);
  }
}

/* ---- A folder to work in --------------------------------------------------------------------- */

static int enter_folder(void **state) {
  (void)state;
  return test_folder_enter("test_pages");
}

static int leave_folder(void **state) {
  (void)state;
  return test_folder_leave();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(random_operations),
      cmocka_unit_test(a_common_prefix_is_kept_once),
      cmocka_unit_test(grown_caches_keep_everything),
      cmocka_unit_test(what_grow_refuses),
      cmocka_unit_test(options_that_are_wrong),
      cmocka_unit_test(rings_that_are_wrong),
      cmocka_unit_test(questions_that_are_wrong),
      cmocka_unit_test(allocations_that_fail),
  };
  return cmocka_run_group_tests(tests, enter_folder, leave_folder);
}
