/* Ready rows of a cache of any type: mha_cache_append stores them as mha_element_convert rounds
 * them, from wherever they lie, and touches no other row; what it does not take. */
#include "fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { N = 3, G = 2, MOST_ROWS = 5, N_TYPES = MHA_Q8_0 + 1 };

static test_fixture f; /* one at a time; too large for a stack */

/* A cache, and its numbers as they should be. */
typedef struct twin {
  mha_cache *cache;
  int32_t type;
  int64_t capacity, window, d, dv;
  int64_t length[N];
  unsigned char *keys, *values;
  size_t key_row, value_row; /* bytes */
} twin;

static mha_cache_options options_of(const twin *t) {
  mha_cache_options o;
  MHA_INIT(&o);
  o.n_entries = N;
  o.capacity = t->capacity;
  o.n_kv_heads = G;
  o.head_size = t->d;
  o.value_head_size = t->dv;
  o.window = t->window;
  o.type = (int32_t)t->type;
  return o;
}

static twin open_twin(int32_t type, int64_t window) {
  twin t = {.type = type, .capacity = 17, .window = window, .d = 32, .dv = 64};
  if (type != MHA_Q8_0) {
    t.d = 5;
    t.dv = 3;
  }
  mha_error error;
  const mha_cache_options o = options_of(&t);
  test_expect(mha_cache_create(&o, &t.cache, &error), MHA_OK, &error);
  t.key_row = G * mha_element_bytes((int32_t)type, t.d);
  t.value_row = G * mha_element_bytes((int32_t)type, t.dv);
  t.keys = test_allocate(N * 17 * t.key_row, 1);
  t.values = test_allocate(N * 17 * t.value_row, 1);
  return t;
}

static void view(const twin *t, unsigned char *numbers[2]) {
  mha_tensor k, v;
  test_expect(mha_cache_view(t->cache, &k, &v, NULL), MHA_OK, NULL);
  assert_int_equal(k.element, t->type);
  assert_int_equal(v.element, t->type);
  numbers[0] = (unsigned char *)(uintptr_t)k.data;
  numbers[1] = (unsigned char *)(uintptr_t)v.data;
}

/* Rows that were never written are not compared: they are made equal here. */
static void adopt(const twin *t) {
  unsigned char *numbers[2];
  view(t, numbers);
  memset(numbers[0], 0x5a, N * 17 * t->key_row);
  memset(numbers[1], 0x5a, N * 17 * t->value_row);
  memset(t->keys, 0x5a, N * 17 * t->key_row);
  memset(t->values, 0x5a, N * 17 * t->value_row);
}

static void expect_twins(const twin *t) {
  unsigned char *numbers[2];
  view(t, numbers);
  assert_memory_equal(numbers[0], t->keys, N * 17 * t->key_row);
  assert_memory_equal(numbers[1], t->values, N * 17 * t->value_row);
  for (int64_t e = 0; e < N; e++) {
    int64_t length = -1;
    test_expect(mha_cache_length(t->cache, e, &length, NULL), MHA_OK, NULL);
    assert_int_equal(length, t->length[e]);
  }
}

static void close_twin(twin *t) {
  expect_twins(t);
  mha_cache_destroy(t->cache);
  free(t->keys);
  free(t->values);
}

/* The fixture's keys and values, of their types and layout, are the rows. */
static void build_rows(const twin *t, int32_t k_type, int32_t v_type, int64_t batch, int64_t rows,
                       uint64_t seed) {
  test_build(&f, &(test_case){.seed = seed,
                              .core = true,
                              .B = batch,
                              .Lq = 1,
                              .Lk = rows,
                              .H = G,
                              .d = t->d,
                              .dv = t->dv,
                              .layout = (test_layout)(seed % 4),
                              .odd_addresses = seed % 3 == 0,
                              .k_type = k_type,
                              .v_type = v_type});
}

/* Head by head into the twin's row of a token. */
static void keep_row(const twin *t, const test_view *v, unsigned char *numbers, int64_t b,
                     int64_t i, int64_t row) {
  for (int64_t h = 0; h < G; h++) {
    const float *floats = test_at(v, b, i, h, 0);
    unsigned char *to = test_stored_at(numbers, t->type, (row * G + h) * v->size);
    if (v->type == t->type)
      memcpy(to,
             v->stored ? (const void *)test_stored_at(v->stored, v->type, floats - v->data)
                       : floats,
             mha_element_bytes((int32_t)t->type, v->size));
    else
      test_expect(mha_element_convert(MHA_F32, floats, (int32_t)t->type, to, v->size, NULL), MHA_OK,
                  NULL);
  }
}

static void append(twin *t, const int64_t *entries, const int64_t *counts) {
  mha_error error;
  test_expect(mha_cache_append(t->cache, &f.k, &f.v, entries, counts, &error), MHA_OK, &error);
  for (int64_t b = 0; b < f.c.B; b++) {
    const int64_t entry = entries ? entries[b] : b;
    for (int64_t i = 0; i < (counts ? counts[b] : f.c.Lk); i++) {
      const int64_t row = entry * t->capacity + t->length[entry]++ % t->capacity;
      keep_row(t, &f.key, t->keys, b, i, row);
      keep_row(t, &f.value, t->values, b, i, row);
    }
  }
}

/* ---- What is stored -------------------------------------------------------------------------- */

/* Of float32 or of the cache's own type, each of the two for itself; as a ring the cache goes round
 * more than once. */
static void rows_are_rounded_once(void **state) {
  (void)state;
  for (int32_t type = 0; type < N_TYPES; type++)
    for (int64_t window = 0; window <= 9; window += 9)
      for (int given = 0; given < 4; given++) {
        twin t = open_twin((int32_t)type, window);
        adopt(&t);
        for (uint64_t call = 0; call < (window ? 12 : 3); call++) {
          int64_t entries[] = {(int64_t)call % N, (int64_t)(call + 1) % N};
          int64_t counts[] = {(int64_t)call % (MOST_ROWS + 1), MOST_ROWS};
          build_rows(&t, given & 1 ? (int32_t)type : MHA_F32, given & 2 ? (int32_t)type : MHA_F32,
                     2, MOST_ROWS, call + 4 * (uint64_t)given);
          append(&t, entries, call % 2 ? counts : NULL);
          expect_twins(&t);
          test_release(&f);
        }
        close_twin(&t);
      }
}

/* Numbers that are not finite, and too large for F16, are stored as they are rounded. */
static void rows_of_anything(void **state) {
  const float bad[] = {NAN, INFINITY, -INFINITY, 1e6F, 3e38F, 1e-40F, -0.0F};
  (void)state;
  for (int32_t type = 0; type < N_TYPES; type++)
    for (size_t which = 0; which < COUNT(bad); which++) {
      twin t = open_twin((int32_t)type, 0);
      adopt(&t);
      build_rows(&t, MHA_F32, MHA_F32, N, MOST_ROWS, which);
      *test_at(&f.key, 1, 2, 1, 4) = bad[which];
      *test_at(&f.value, 2, 0, 0, 1) = bad[which];
      append(&t, NULL, NULL);
      test_release(&f);
      close_twin(&t);
    }
}

/* Padding rows need not be readable. */
static void padding_is_not_read(void **state) {
  const int64_t counts[] = {MOST_ROWS, 2};
  (void)state;
  for (int32_t type = 0; type < N_TYPES; type++)
    for (int own = 0; own < 2; own++) {
      twin t = open_twin((int32_t)type, 0);
      const int32_t given = own ? (int32_t)type : MHA_F32;
      adopt(&t);
      build_rows(&t, given, given, 2, MOST_ROWS, 4);
      test_view *views[] = {&f.key, &f.value};
      mha_tensor *tensors[] = {&f.k, &f.v};
      for (int k = 0; k < 2; k++) { /* the last rows end before a guard page */
        const size_t bytes =
            (MOST_ROWS + 2) * mha_element_bytes((int32_t)given, G * views[k]->size);
        void *edge = test_pool_bytes(&f.pool, bytes);
        if (given == MHA_F32) /* aligned as a float is */
          assert_int_equal(bytes % sizeof(float), 0);
        memcpy(edge, views[k]->stored ? (const void *)views[k]->stored : views[k]->data, bytes);
        tensors[k]->data = edge;
      }
      append(&t, NULL, counts);
      test_release(&f);
      close_twin(&t);
    }
}

/* ---- What is not taken ----------------------------------------------------------------------- */

static void expect_refused(const twin *t, mha_status expected, const char *word) {
  mha_error error;
  memset(&error, 0xab, sizeof error);
  test_expect(mha_cache_append(t->cache, &f.k, &f.v, NULL, NULL, &error), expected, &error);
  if (!strstr(error.message, word) || !strstr(error.message, "; rule: "))
    test_failed("the message does not name %s: \"%s\"", word, error.message);
  test_expect(mha_cache_append(t->cache, &f.k, &f.v, NULL, NULL, NULL), expected, NULL);
  expect_twins(t);
}

static void other_types_are_refused(void **state) {
  const int32_t none[] = {MHA_Q4_0, -1, 5, INT32_MAX};
  (void)state;
  for (int32_t type = 0; type < N_TYPES; type++)
    for (int values = 0; values < 2; values++) {
      twin t = open_twin((int32_t)type, 0);
      adopt(&t);
      build_rows(&t, MHA_F32, MHA_F32, N, 2, 0);
      int32_t *element = values ? &f.v.element : &f.k.element;
      const char *word = values ? "v.element" : "k.element";
      for (int32_t other = MHA_F16; other < N_TYPES; other++) {
        *element = other;
        if (other != type && (other != MHA_Q8_0 || t.d % 32 == 0))
          expect_refused(&t, MHA_ERROR_UNSUPPORTED, word);
      }
      for (size_t k = 0; k < COUNT(none); k++) {
        *element = none[k];
        expect_refused(&t, MHA_ERROR_UNSUPPORTED, word);
      }
      test_release(&f);
      close_twin(&t);
    }
}

/* Strides that would cut a block, sizes that are none, the reserved member. */
static void blocks_are_not_cut(void **state) {
  (void)state;
  for (int values = 0; values < 2; values++) {
    twin t = open_twin(MHA_Q8_0, 0);
    adopt(&t);
    build_rows(&t, MHA_Q8_0, MHA_Q8_0, N, 2, 1); /* padded: strides are given */
    mha_tensor *tensor = values ? &f.v : &f.k;
    const mha_tensor right = *tensor;
    int64_t *strides[] = {&tensor->batch_stride, &tensor->row_stride, &tensor->head_stride};
    for (size_t k = 0; k < COUNT(strides); k++)
      for (int64_t by = 1; by < 32; by += 15) {
        *strides[k] += by;
        expect_refused(&t, MHA_ERROR_STRIDE, values ? "v" : "k");
        *tensor = right;
      }
    tensor->size = 48;
    expect_refused(&t, MHA_ERROR_SIZE, values ? "v.size" : "k.size");
    *tensor = right;
    tensor->reserved = 1;
    expect_refused(&t, MHA_ERROR_VALUE, values ? "v.reserved" : "k.reserved");
    *tensor = right;
    tensor->data = NULL;
    expect_refused(&t, MHA_ERROR_NULL, values ? "v.data" : "k.data");
    test_release(&f);
    close_twin(&t);
  }
}

/* What the cache's rows themselves are part of. */
static void rows_of_the_cache_itself(void **state) {
  (void)state;
  for (int32_t type = 0; type < N_TYPES; type++)
    for (int values = 0; values < 2; values++) {
      twin t = open_twin((int32_t)type, 0);
      unsigned char *numbers[2];
      adopt(&t);
      view(&t, numbers);
      build_rows(&t, (int32_t)type, (int32_t)type, N, 2, 0);
      const size_t last = (N * 17 - 1) * (values ? t.value_row : t.key_row);
      if (values)
        f.v.data = numbers[1] + last;
      else
        f.k.data = numbers[0] + last;
      expect_refused(&t, MHA_ERROR_OVERLAP, values ? "v" : "k");
      test_release(&f);
      close_twin(&t);
    }
}

/* Too many rows for one entry: the others' are not stored either. */
static void no_room(void **state) {
  (void)state;
  for (int32_t type = 0; type < N_TYPES; type++) {
    twin t = open_twin((int32_t)type, 0);
    adopt(&t);
    build_rows(&t, MHA_F32, (int32_t)type, N, 16, 0);
    const int64_t counts[] = {1, 2, 0};
    append(&t, NULL, counts);
    expect_refused(&t, MHA_ERROR_LENGTH, "entry");
    test_release(&f);
    close_twin(&t);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rows_are_rounded_once),
      cmocka_unit_test(rows_of_anything),
      cmocka_unit_test(padding_is_not_read),
      cmocka_unit_test(other_types_are_refused),
      cmocka_unit_test(blocks_are_not_cut),
      cmocka_unit_test(rows_of_the_cache_itself),
      cmocka_unit_test(no_room),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
