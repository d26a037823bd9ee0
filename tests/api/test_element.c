/* The element types from outside: their names and sizes, and mha_element_convert between any two of
 * them. What the numbers become is held against the formats' definitions in test_numbers. */
#include "support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { N_TYPES = MHA_Q4_0 + 1, MOST = 1056 };

static const int32_t no_types[] = {-1, N_TYPES, 255, INT32_MIN, INT32_MAX};

static bool has_blocks(int32_t element) {
  return element == MHA_Q8_0 || element == MHA_Q4_0;
}

/* ---- Facts ----------------------------------------------------------------------------------- */

static void names(void **state) {
  const char *const known[N_TYPES] = {"F32", "F16", "BF16", "Q8_0", "Q4_0"};
  (void)state;
  for (int32_t element = 0; element < N_TYPES; element++)
    assert_string_equal(mha_element_name(element), known[element]);
  for (size_t k = 0; k < COUNT(no_types); k++)
    assert_string_equal(mha_element_name(no_types[k]), "unknown type");
}

static void bytes(void **state) {
  (void)state;
  for (int64_t n = 1; n <= 100; n++) {
    assert_int_equal(mha_element_bytes(MHA_F32, n), 4 * n);
    assert_int_equal(mha_element_bytes(MHA_F16, n), 2 * n);
    assert_int_equal(mha_element_bytes(MHA_BF16, n), 2 * n);
    assert_int_equal(mha_element_bytes(MHA_Q8_0, n), n % 32 ? 0 : n / 32 * 34);
    assert_int_equal(mha_element_bytes(MHA_Q4_0, n), n % 32 ? 0 : n / 32 * 18);
  }
  assert_true(mha_element_bytes(MHA_F16, INT64_C(1) << 40) == (size_t)1 << 41);
}

static void bytes_of_what_there_is_not(void **state) {
  const int64_t none[] = {0, -1, -32, -64, INT64_MIN, INT64_MIN + 32};
  const int64_t whole = INT64_MAX / 32 * 32;
  (void)state;
  for (int32_t element = 0; element < N_TYPES; element++)
    for (size_t k = 0; k < COUNT(none); k++)
      assert_int_equal(mha_element_bytes(element, none[k]), 0);
  for (size_t k = 0; k < COUNT(no_types); k++)
    assert_int_equal(mha_element_bytes(no_types[k], 32), 0);
  for (int32_t element = 0; element < MHA_Q4_0; element++)
    assert_int_equal(mha_element_bytes(element, whole), 0);
  assert_true(mha_element_bytes(MHA_Q4_0, whole) == (size_t)(whole / 32) * 18);
  assert_int_equal(mha_element_bytes(MHA_F32, INT64_MAX / 4 + 1), 0);
  assert_int_equal(mha_element_bytes(MHA_F16, INT64_MAX / 2 + 1), 0);
}

/* ---- Arguments that are wrong ---------------------------------------------------------------- */

/* A call that is right but for what a row spoils. */
typedef struct call {
  int32_t from, to;
  int64_t n;
  bool no_source, no_target;
  mha_status status;
  const char *word;
} call;

static void expect_refused(const call *c, const void *source, void *target, size_t target_bytes) {
  mha_error error;
  unsigned char *before = test_allocate(target_bytes, 1);
  memcpy(before, target, target_bytes);
  memset(&error, 0xab, sizeof error);
  test_note("from %d to %d, n %lld", (int)c->from, (int)c->to, (long long)c->n);
  test_expect(mha_element_convert(c->from, c->no_source ? NULL : source, c->to,
                                  c->no_target ? NULL : target, c->n, &error),
              c->status, &error);
  assert_non_null(memchr(error.message, 0, sizeof error.message));
  if (!strstr(error.message, c->word) || !strstr(error.message, "; rule: "))
    test_failed("the message names no %s or no rule: \"%s\"", c->word, error.message);
  test_expect(mha_element_convert(c->from, c->no_source ? NULL : source, c->to,
                                  c->no_target ? NULL : target, c->n, NULL),
              c->status, NULL);
  assert_memory_equal(target, before, target_bytes);
  free(before);
}

static void wrong_arguments(void **state) {
  const call calls[] = {
      {-1, MHA_F32, 32, false, false, MHA_ERROR_VALUE, "from"},
      {N_TYPES, MHA_F32, 32, false, false, MHA_ERROR_VALUE, "from"},
      {INT32_MIN, MHA_F32, 0, false, false, MHA_ERROR_VALUE, "from"},
      {MHA_F32, -1, 32, false, false, MHA_ERROR_VALUE, "to"},
      {MHA_F32, N_TYPES, 0, false, false, MHA_ERROR_VALUE, "to"},
      {MHA_F32, INT32_MAX, 32, false, false, MHA_ERROR_VALUE, "to"},
      {MHA_F32, MHA_F16, -1, false, false, MHA_ERROR_SIZE, "n"},
      {MHA_F32, MHA_Q8_0, -32, false, false, MHA_ERROR_SIZE, "n"},
      {MHA_F32, MHA_F16, INT64_MIN, false, false, MHA_ERROR_SIZE, "n"},
      {MHA_Q8_0, MHA_F32, 31, false, false, MHA_ERROR_SIZE, "n"},
      {MHA_Q4_0, MHA_Q4_0, 33, false, false, MHA_ERROR_SIZE, "n"},
      {MHA_F16, MHA_Q8_0, 16, false, false, MHA_ERROR_SIZE, "n"},
      {MHA_F32, MHA_Q4_0, 1, false, false, MHA_ERROR_SIZE, "n"},
      {MHA_F16, MHA_F32, 1, true, false, MHA_ERROR_NULL, "source"},
      {MHA_F32, MHA_F32, 1, true, true, MHA_ERROR_NULL, "source"},
      {MHA_F32, MHA_Q8_0, 32, false, true, MHA_ERROR_NULL, "target"},
      {MHA_F32, MHA_F16, INT64_MAX / 4 + 1, false, false, MHA_ERROR_OVERFLOW, "n"},
      {MHA_F16, MHA_F32, INT64_MAX, false, false, MHA_ERROR_OVERFLOW, "n"},
      {MHA_Q4_0, MHA_Q8_0, INT64_MAX / 32 * 32, false, false, MHA_ERROR_OVERFLOW, "n"},
  };
  test_pool pool = {0};
  float *source = test_pool_floats(&pool, 32);
  float *target = test_pool_floats(&pool, 32);
  (void)state;
  for (size_t k = 0; k < COUNT(calls); k++)
    expect_refused(&calls[k], source, target, 32 * sizeof *target);
  test_pool_free(&pool);
}

/* Numbers of source and target, `target` bytes behind the begin of the source. */
static mha_status convert_within(unsigned char *block, int32_t from, int32_t to, int64_t n,
                                 int64_t source, int64_t target) {
  mha_error error;
  return mha_element_convert(from, block + source, to, block + target, n, &error);
}

static void source_and_target_overlap(void **state) {
  test_pool pool = {0};
  unsigned char *block = test_pool_bytes(&pool, 1024);
  unsigned char before[1024];
  (void)state;
  memset(block, 0, 1024);
  memcpy(before, block, sizeof before);
  for (int32_t from = 0; from < N_TYPES; from++)
    for (int32_t to = 0; to < N_TYPES; to++) {
      const int64_t source_bytes = (int64_t)mha_element_bytes(from, 64);
      const int64_t target_bytes = (int64_t)mha_element_bytes(to, 64);
      test_note("from %d to %d", (int)from, (int)to);
      for (int64_t shift = 4 - target_bytes / 4 * 4; shift < source_bytes; shift += 4)
        assert_int_equal(convert_within(block, from, to, 64, 512, 512 + shift), MHA_ERROR_OVERLAP);
      assert_memory_equal(block, before, sizeof before);
      /* side by side they do not */
      assert_int_equal(convert_within(block, from, to, 64, 512, 512 + (source_bytes + 3) / 4 * 4),
                       MHA_OK);
      assert_int_equal(convert_within(block, from, to, 64, 512, 512 - (target_bytes + 3) / 4 * 4),
                       MHA_OK);
      memset(block, 0, 1024);
    }
  test_pool_free(&pool);
}

/* No number: pointers are not looked at, whatever the types. */
static void nothing_to_convert(void **state) {
  int32_t untouched = 42;
  (void)state;
  for (int32_t from = 0; from < N_TYPES; from++)
    for (int32_t to = 0; to < N_TYPES; to++) {
      mha_error error;
      memset(&error, 0xab, sizeof error);
      test_expect(mha_element_convert(from, NULL, to, NULL, 0, &error), MHA_OK, &error);
      assert_string_equal(error.message, "");
      test_expect(mha_element_convert(from, &untouched, to, &untouched, 0, NULL), MHA_OK, NULL);
    }
  assert_int_equal(untouched, 42);
}

/* ---- From any type to any other -------------------------------------------------------------- */

/* n random numbers as they are stored, at a pool's end. */
static void *random_numbers(test_pool *pool, test_random *random, int32_t element, int64_t n) {
  float *floats = test_pool_floats(pool, n);
  test_fill_normal(random, floats, n, 3.0);
  void *stored = test_pool_bytes(pool, mha_element_bytes(element, n));
  test_expect(mha_element_convert(MHA_F32, floats, element, stored, n, NULL), MHA_OK, NULL);
  return stored;
}

/* By way of float32, which is exact on the way there. */
static void every_pair_of_types(void **state) {
  const int64_t counts[] = {32, 64, 480, 512, 544, 1024, MOST};
  test_random random;
  (void)state;
  test_random_seed(&random, 5);
  for (int32_t from = 0; from < N_TYPES; from++)
    for (int32_t to = 0; to < N_TYPES; to++)
      for (size_t k = 0; k < COUNT(counts); k++)
        for (int64_t odd = 0; odd < (has_blocks(from) || has_blocks(to) ? 1 : 32); odd += 10) {
          const int64_t n = counts[k] - odd;
          const size_t to_bytes = mha_element_bytes(to, n);
          test_pool pool = {.at_front = k % 2};
          const void *source = random_numbers(&pool, &random, from, n);
          float *floats = test_pool_floats(&pool, n);
          void *direct = test_pool_bytes(&pool, to_bytes);
          void *around = test_pool_bytes(&pool, to_bytes);
          test_note("from %d to %d, n %lld", (int)from, (int)to, (long long)n);
          test_expect(mha_element_convert(from, source, to, direct, n, NULL), MHA_OK, NULL);
          test_expect(mha_element_convert(from, source, MHA_F32, floats, n, NULL), MHA_OK, NULL);
          test_expect(mha_element_convert(MHA_F32, floats, to, around, n, NULL), MHA_OK, NULL);
          if (from == to)
            assert_memory_equal(direct, source, to_bytes);
          else
            assert_memory_equal(direct, around, to_bytes);
          test_pool_free(&pool);
        }
}

/* Numbers of the same type are copied as they are, whatever they mean. */
static void any_bytes_are_copied(void **state) {
  (void)state;
  for (int32_t element = 0; element < N_TYPES; element++) {
    const size_t n_bytes = mha_element_bytes(element, MOST);
    unsigned char *source = test_allocate(n_bytes, 1);
    unsigned char *target = test_allocate(n_bytes, 1);
    for (size_t at = 0; at < n_bytes; at++)
      source[at] = (unsigned char)(at * 7 + 0x7f);
    test_expect(mha_element_convert(element, source, element, target, MOST, NULL), MHA_OK, NULL);
    assert_memory_equal(source, target, n_bytes);
    free(source);
    free(target);
  }
}

/* What can be read exactly comes back as it was. */
static void there_and_back(void **state) {
  (void)state;
  for (int32_t element = MHA_F16; element <= MHA_BF16; element++) {
    enum { ALL = 65536 };
    uint16_t *all = test_allocate(ALL, sizeof *all);
    uint16_t *back = test_allocate(ALL, sizeof *back);
    float *floats = test_allocate(ALL, sizeof *floats);
    for (int32_t k = 0; k < ALL; k++)
      all[k] = (uint16_t)k;
    test_expect(mha_element_convert(element, all, MHA_F32, floats, ALL, NULL), MHA_OK, NULL);
    test_expect(mha_element_convert(MHA_F32, floats, element, back, ALL, NULL), MHA_OK, NULL);
    for (int32_t k = 0; k < ALL; k++)
      if (!isnan(floats[k]) && all[k] != back[k])
        test_failed("%s %04x came back as %04x", mha_element_name(element), (unsigned)all[k],
                    (unsigned)back[k]);
    free(all);
    free(back);
    free(floats);
  }
}

/* Pointers of the types other than float32 need no alignment. */
static void odd_addresses(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 6);
  for (int32_t element = MHA_F16; element < N_TYPES; element++)
    for (int shift = 0; shift < 4; shift++) {
      test_pool pool = {0};
      const size_t n_bytes = mha_element_bytes(element, 96);
      const void *source = random_numbers(&pool, &random, element, 96);
      unsigned char *moved = test_pool_bytes(&pool, n_bytes + 4);
      unsigned char *again = test_pool_bytes(&pool, n_bytes + 4);
      float *expected = test_pool_floats(&pool, 96);
      float *got = test_pool_floats(&pool, 96);
      memcpy(moved + shift, source, n_bytes);
      test_expect(mha_element_convert(element, source, MHA_F32, expected, 96, NULL), MHA_OK, NULL);
      test_expect(mha_element_convert(element, moved + shift, MHA_F32, got, 96, NULL), MHA_OK,
                  NULL);
      assert_memory_equal(got, expected, 96 * sizeof *got);
      test_expect(mha_element_convert(MHA_F32, got, element, again + shift, 96, NULL), MHA_OK,
                  NULL);
      if (!has_blocks(element)) /* a block's scale is chosen anew */
        assert_memory_equal(again + shift, source, n_bytes);
      test_pool_free(&pool);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(names),
      cmocka_unit_test(bytes),
      cmocka_unit_test(bytes_of_what_there_is_not),
      cmocka_unit_test(wrong_arguments),
      cmocka_unit_test(source_and_target_overlap),
      cmocka_unit_test(nothing_to_convert),
      cmocka_unit_test(every_pair_of_types),
      cmocka_unit_test(any_bytes_are_copied),
      cmocka_unit_test(there_and_back),
      cmocka_unit_test(odd_addresses),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
