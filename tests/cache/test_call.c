/* A call that ends halfway, with its rows stored already: the cache is as it was, also for entries
 * that share pages and are both in the call. */
#include "support.h"

#include "cache/cache.h"

#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { T = 16, PAGES = 12, ENTRIES = 3, MOST = 60, WIDTH = 32 };

typedef struct state {
  int64_t n_free, lengths[ENTRIES], rows[ENTRIES][MOST];
  unsigned char numbers[ENTRIES][MOST][2][WIDTH * sizeof(float)];
} state;

static void read_state(const mha_cache *cache, state *s) {
  mha_tensor shown[2];
  memset(s, 0, sizeof *s);
  test_expect(mha_cache_page_count(cache, 0, NULL, NULL, NULL, &s->n_free, NULL), MHA_OK, NULL);
  test_expect(mha_cache_view(cache, &shown[0], &shown[1], NULL), MHA_OK, NULL);
  for (int64_t e = 0; e < ENTRIES; e++) {
    test_expect(mha_cache_length(cache, e, &s->lengths[e], NULL), MHA_OK, NULL);
    assert_in_range(s->lengths[e], 0, MOST);
    for (int64_t t = 0; t < s->lengths[e]; t++) {
      const size_t bytes = mha_element_bytes(shown[0].element, WIDTH);
      test_expect(mha_cache_row(cache, e, t, &s->rows[e][t], NULL), MHA_OK, NULL);
      for (int value = 0; value < 2; value++)
        memcpy(s->numbers[e][t][value],
               (const char *)shown[value].data + (size_t)s->rows[e][t] * bytes, bytes);
    }
  }
}

static void append(mha_cache *cache, int64_t entry, int64_t n) {
  float rows[MOST * WIDTH];
  for (int64_t i = 0; i < n * WIDTH; i++)
    rows[i] = (float)(i % 97 - 48);
  const mha_tensor k = {rows, 1, n, 1, WIDTH, 0, 0, 0, 0, MHA_F32, 0};
  test_expect(mha_cache_append(cache, &k, &k, &entry, NULL, NULL), MHA_OK, NULL);
}

/* Does all of a call to both entries but for its success. */
static void end_halfway(mha_cache *cache, const int64_t *entries, int64_t n) {
  const mha_threads alone = {.n = 1};
  const mha_cache_call call = {
      .prefix = "", .batch = "batch", .B = 2, .rows = n, .append = true, .entries = entries};
  float *rows = test_allocate((size_t)(2 * n * WIDTH), sizeof *rows);
  mha_cache_rows cached;
  for (int64_t i = 0; i < 2 * n * WIDTH; i++)
    rows[i] = 1000;
  assert_int_equal(mha_cache_enter(cache, true, NULL), MHA_OK);
  assert_int_equal(mha_cache_describe(cache, &call, &cached, NULL), MHA_OK);
  assert_int_equal(mha_cache_store(cache, &cached, 2, rows, rows, &alone), MHA_OK);
  mha_cache_cancel(cache);
  mha_cache_leave(cache, true);
  free(rows);
}

/* Entry 1 shares the pages of entry 0 and went back; either may be named first. */
static void a_call_that_ends_halfway_leaves_all_as_it_was(void **unused) {
  static const int32_t types[] = {MHA_F32, MHA_F16, MHA_BF16, MHA_Q8_0};
  static state before, after;
  (void)unused;
  for (size_t k = 0; k < COUNT(types); k++)
    for (int64_t length = 30; length >= 17; length--)
      for (int order = 0; order < 2; order++)
        for (int64_t n = 1; n <= 20; n += 19) {
          const int64_t entries[] = {order, !order};
          mha_cache *cache = NULL;
          mha_cache_options o;
          MHA_INIT(&o);
          o.n_entries = ENTRIES;
          o.n_kv_heads = 1;
          o.head_size = WIDTH;
          o.type = types[k];
          o.page_tokens = T;
          o.n_pages = PAGES;
          test_note("type %d, length %lld, entry %lld first, %lld rows", types[k],
                    (long long)length, (long long)entries[0], (long long)n);
          test_expect(mha_cache_create(&o, &cache, NULL), MHA_OK, NULL);
          append(cache, 0, 30);
          append(cache, 2, 5);
          test_expect(mha_cache_copy_entry(cache, 0, 1, NULL), MHA_OK, NULL);
          test_expect(mha_cache_truncate(cache, 1, length, NULL), MHA_OK, NULL);
          read_state(cache, &before);
          end_halfway(cache, entries, n);
          read_state(cache, &after);
          assert_memory_equal(&before, &after, sizeof before);
          mha_cache_destroy(cache);
        }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_call_that_ends_halfway_leaves_all_as_it_was),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
