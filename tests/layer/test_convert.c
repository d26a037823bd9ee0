/* A layer's numbers as it uses them, and mha_weights_convert: the same layer with matrices of
 * another type, number by number as mha_element_convert has it, and independent of the first. */
#include "fixture.h"

#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { N_TYPES = MHA_Q4_0 + 1 };

static test_fixture f; /* one at a time; too large for a stack */

/* All that a layer can have, in any type; `variant` chooses how it is given. */
static test_case case_of(int32_t type, int variant) {
  return (test_case){.seed = (uint64_t)variant,
                     .B = 2,
                     .Lq = 11,
                     .H = 4,
                     .G = 2,
                     .d = 16,
                     .dv = 32,
                     .Eq = 96,
                     .Eo = 64,
                     .out_in = variant & 1,
                     .borrow = variant & 2,
                     .odd_addresses = variant & 4,
                     .weight_layout = (test_weight_layout)(variant % 3),
                     .source = TEST_SELF,
                     .biases = variant & 4 ? TEST_ALL : 5,
                     .sinks = true,
                     .scale_given = variant & 1,
                     .scale = 0.3F,
                     .softcap = variant & 2 ? 3.0F : 0.0F,
                     .norm = (mha_norm)(variant % 3),
                     .rope = (mha_rope)((variant + 1) % 3),
                     .rope_tables = variant & 4,
                     .query_type = type,
                     .key_type = type,
                     .value_type = type,
                     .output_type = type};
}

/* The layer has the sinks. */
static void build(int32_t type, int variant) {
  const test_case c = case_of(type, variant);
  test_build(&f, &c);
  f.matrices.sinks = f.sinks;
  f.rules.sinks = NULL;
}

static mha_weights *create(void) {
  mha_weights *weights = NULL;
  mha_error error;
  test_expect(mha_weights_create(&f.config, &f.matrices, &weights, &error), MHA_OK, &error);
  return weights;
}

static mha_matrices matrices_of(const mha_weights *weights) {
  mha_matrices m;
  mha_error error;
  MHA_INIT(&m);
  test_expect(mha_weights_matrices(weights, &m, &error), MHA_OK, &error);
  return m;
}

/* One of the four as a layer shows it. */
typedef struct shown {
  const void *data;
  int32_t element;
  int64_t ld;
  const float *bias;
} shown;

static shown show(const mha_matrices *m, int which) {
  const shown all[] = {{m->query, m->query_element, m->query_ld, m->query_bias},
                       {m->key, m->key_element, m->key_ld, m->key_bias},
                       {m->value, m->value_element, m->value_ld, m->value_bias},
                       {m->output, m->output_element, m->output_ld, m->output_bias}};
  return all[which];
}

static const test_matrix *matrix(int which) {
  const test_matrix *all[] = {&f.wq, &f.wk, &f.wv, &f.wo};
  return all[which];
}

static int64_t rows_of(const test_matrix *m) {
  return f.c.out_in ? m->out : m->in;
}

static int64_t columns_of(const test_matrix *m) {
  return f.c.out_in ? m->in : m->out;
}

static void same_floats(const float *got, const float *expected, int64_t n) {
  assert_int_equal(got == NULL, expected == NULL);
  if (expected)
    assert_memory_equal(got, expected, (size_t)n * sizeof *got);
}

static void same_vectors(const mha_matrices *m) {
  const int64_t heads = f.c.norm == MHA_NORM_FULL ? f.c.H : 1;
  const int64_t key_heads = f.c.norm == MHA_NORM_FULL ? f.c.G : 1;
  same_floats(m->query_norm, f.query_norm, heads * f.c.d);
  same_floats(m->key_norm, f.key_norm, key_heads * f.c.d);
  same_floats(m->sinks, f.sinks, f.c.H);
  assert_int_equal(m->orientation, f.matrices.orientation);
  assert_int_equal(m->ownership, MHA_BORROW);
  assert_null((void *)(uintptr_t)m->release);
  assert_null(m->release_user);
}

/* What a layer shows is what it was given, in the type `element` (−1 = as given). */
static void expect_numbers(const mha_weights *weights, int32_t element) {
  const mha_matrices m = matrices_of(weights);
  same_vectors(&m);
  for (int which = 0; which < 4; which++) {
    const test_matrix *given = matrix(which);
    const shown s = show(&m, which);
    const int32_t type = element < 0 ? (int32_t)given->type : element;
    same_floats(s.bias, given->bias, given->out);
    assert_int_equal(s.element, type);
    const size_t bytes = mha_element_bytes(type, columns_of(given));
    unsigned char *expected = test_allocate(bytes, 1);
    for (int64_t r = 0; r < rows_of(given); r++) {
      const void *row =
          given->stored ? (const void *)test_stored_at(given->stored, given->type, r * given->ld)
                        : given->data + r * given->ld;
      test_expect(
          mha_element_convert((int32_t)given->type, row, type, expected, columns_of(given), NULL),
          MHA_OK, NULL);
      assert_memory_equal(
          test_stored_at((unsigned char *)(uintptr_t)s.data, (int32_t)type, r * s.ld), expected,
          bytes);
    }
    free(expected);
  }
}

/* ---- What a layer shows ---------------------------------------------------------------------- */

static void copied_numbers_are_dense(void **state) {
  (void)state;
  for (int32_t type = 0; type < N_TYPES; type++)
    for (int variant = 0; variant < 8; variant++) {
      if (variant & 2)
        continue;
      build((int32_t)type, variant);
      mha_weights *weights = create();
      const mha_matrices m = matrices_of(weights);
      expect_numbers(weights, -1);
      for (int which = 0; which < 4; which++)
        assert_int_equal(show(&m, which).ld, columns_of(matrix(which)));
      mha_weights_destroy(weights);
      test_allocator_check(&f.allocator);
      test_release(&f);
    }
}

static void borrowed_numbers_are_the_callers(void **state) {
  (void)state;
  for (int32_t type = 0; type < N_TYPES; type++)
    for (int variant = 2; variant < 8; variant += variant == 3 ? 3 : 1) {
      build((int32_t)type, variant);
      mha_weights *weights = create();
      const mha_matrices m = matrices_of(weights);
      expect_numbers(weights, -1);
      for (int which = 0; which < 4; which++) {
        const shown given = show(&f.matrices, which), s = show(&m, which);
        assert_ptr_equal(s.data, given.data);
        assert_ptr_equal(s.bias, given.bias);
        assert_int_equal(s.ld, matrix(which)->ld);
      }
      assert_ptr_equal(m.sinks, f.sinks);
      mha_weights_destroy(weights);
      test_release(&f);
    }
}

/* A layer that lacks some matrices; the others have a type each. */
static void build_without(unsigned absent, unsigned biases, const int32_t types[4]) {
  test_build(&f, &(test_case){.seed = absent,
                              .Lq = 3,
                              .H = 2,
                              .d = 16,
                              .source = TEST_SELF,
                              .absent = absent,
                              .biases = biases,
                              .query_type = types[0],
                              .key_type = types[1],
                              .value_type = types[2],
                              .output_type = types[3]});
}

/* An absent matrix is shown as one. What is shown makes the same layer again. */
static void absent_matrices(void **state) {
  (void)state;
  for (unsigned absent = 0; absent <= TEST_ALL; absent++) {
    mha_weights *again = NULL;
    mha_error error;
    build_without(absent, 6, (const int32_t[]){MHA_F32, MHA_Q8_0, MHA_F32, MHA_BF16});
    mha_weights *weights = create();
    mha_matrices m = matrices_of(weights);
    for (int which = 0; which < 4; which++)
      if (absent >> which & 1) {
        assert_null(show(&m, which).data);
        assert_int_equal(show(&m, which).ld, 0);
      }
    test_expect(mha_weights_create(&f.config, &m, &again, &error), MHA_OK, &error);
    mha_matrices same = matrices_of(again);
    for (int which = 0; which < 4; which++)
      assert_ptr_equal(show(&same, which).data, show(&m, which).data);
    mha_weights_destroy(again);
    mha_weights_destroy(weights);
    test_release(&f);
  }
}

static void what_cannot_be_shown(void **state) {
  mha_matrices m, before;
  mha_error error;
  (void)state;
  build(MHA_F16, 0);
  mha_weights *weights = create();
  memset(&m, 0x5a, sizeof m);
  before = m;
  test_expect(mha_weights_matrices(weights, &m, &error), MHA_ERROR_STRUCT_SIZE, &error);
  assert_memory_equal(&m, &before, sizeof m);
  m.struct_size = sizeof m.struct_size;
  test_expect(mha_weights_matrices(weights, &m, &error), MHA_ERROR_STRUCT_SIZE, &error);
  test_expect(mha_weights_matrices(weights, NULL, &error), MHA_ERROR_NULL, &error);
  MHA_INIT(&m);
  before = m;
  test_expect(mha_weights_matrices(NULL, &m, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_weights_matrices(NULL, &m, NULL), MHA_ERROR_NULL, NULL);
  assert_memory_equal(&m, &before, sizeof m);
  mha_weights_destroy(weights);
  test_release(&f);
}

/* ---- Conversion ------------------------------------------------------------------------------ */

static void same_config(const mha_weights *a, const mha_weights *b) {
  mha_config first, second;
  MHA_INIT(&first);
  MHA_INIT(&second);
  test_expect(mha_weights_config(a, &first, NULL), MHA_OK, NULL);
  test_expect(mha_weights_config(b, &second, NULL), MHA_OK, NULL);
  assert_memory_equal(&first, &second, sizeof first);
}

/* The fixture's matrices become what they are in a type, so that the judge knows of it. */
static void round_fixture(int32_t type) {
  for (int which = 0; which < 4; which++) {
    const test_matrix *m = matrix(which);
    unsigned char *row = test_allocate(mha_element_bytes(type, columns_of(m)), 1);
    for (int64_t r = 0; r < rows_of(m); r++) {
      float *at = m->data + r * m->ld;
      test_expect(mha_element_convert(MHA_F32, at, type, row, columns_of(m), NULL), MHA_OK, NULL);
      test_expect(mha_element_convert(type, row, MHA_F32, at, columns_of(m), NULL), MHA_OK, NULL);
    }
    free(row);
  }
}

/* What was given is no more. */
static void spoil_arrays(void) {
  for (int which = 0; which < 4; which++) {
    const test_matrix *m = matrix(which);
    const int64_t n = (rows_of(m) - 1) * m->ld + columns_of(m);
    if (m->stored)
      memset(m->stored, 0xff, mha_element_bytes((int32_t)m->type, n));
    else
      test_fill_poison(m->data, n);
    if (m->bias)
      test_fill_poison(m->bias, m->out);
  }
}

static void judge(const mha_weights *weights) {
  mha_context *context = NULL;
  mha_error error;
  test_expect(mha_context_create(&f.options, &context, &error), MHA_OK, &error);
  test_poison_results(&f);
  test_expect(mha_forward(context, weights, &f.args, &error), MHA_OK, &error);
  mha_context_destroy(context);
}

/* From any type to any other, of arrays that are copied or borrowed; the first layer is gone when
 * the second is used. */
static void every_pair_of_types(void **state) {
  (void)state;
  for (int32_t from = 0; from < N_TYPES; from++)
    for (int32_t to = 0; to < N_TYPES; to++)
      for (int variant = 0; variant < 8; variant++) {
        mha_weights *converted = NULL;
        mha_error error;
        oracle_result result;
        build((int32_t)from, variant);
        mha_weights *weights = create();
        test_expect(mha_weights_convert(weights, to, &f.allocator.mha, &converted, &error), MHA_OK,
                    &error);
        expect_numbers(weights, -1);
        expect_numbers(converted, to);
        same_config(weights, converted);
        mha_weights_destroy(weights);
        round_fixture(to);
        f.rules.sinks = f.sinks; /* to the judge they are the same */
        test_ask_oracle(&f, &result);
        f.rules.sinks = NULL;
        spoil_arrays();
        judge(converted);
        test_judge(&f, &result);
        oracle_free(&result);
        mha_weights_destroy(converted);
        test_allocator_check(&f.allocator);
        test_release(&f);
      }
}

/* Each matrix of another type; an absent one stays absent. */
static void layers_of_several_types(void **state) {
  (void)state;
  for (unsigned absent = 0; absent <= TEST_ALL; absent++)
    for (int32_t to = 0; to < N_TYPES; to++) {
      mha_weights *converted = NULL;
      mha_error error;
      build_without(absent, 9, (const int32_t[]){MHA_F16, MHA_Q8_0, MHA_F32, MHA_Q4_0});
      mha_weights *weights = create();
      test_expect(mha_weights_convert(weights, to, NULL, &converted, &error), MHA_OK, &error);
      const mha_matrices m = matrices_of(converted);
      for (int which = 0; which < 4; which++)
        if (absent >> which & 1)
          assert_null(show(&m, which).data);
        else
          assert_int_equal(show(&m, which).element, to);
      mha_weights_destroy(weights);
      mha_weights_destroy(converted);
      test_release(&f);
    }
}

static int n_released;

static void count_release(void *user) {
  assert_ptr_equal(user, &n_released);
  n_released++;
}

/* A borrowed layer is given back when it ends, once; its copy gives nothing back. */
static void only_the_first_gives_back(void **state) {
  mha_weights *converted = NULL;
  (void)state;
  n_released = 0;
  build(MHA_Q8_0, 2);
  f.matrices.release = count_release;
  f.matrices.release_user = &n_released;
  mha_weights *weights = create();
  test_expect(mha_weights_convert(weights, MHA_F32, NULL, &converted, NULL), MHA_OK, NULL);
  assert_int_equal(n_released, 0);
  mha_weights_destroy(weights);
  assert_int_equal(n_released, 1);
  mha_weights_destroy(converted);
  assert_int_equal(n_released, 1);
  test_release(&f);
}

static void no_memory(void **state) {
  (void)state;
  for (int32_t to = 0; to < N_TYPES; to++) {
    mha_status status = MHA_ERROR_MEMORY;
    int64_t n = 0;
    build(MHA_F16, 6);
    f.config.allocator = NULL;
    mha_weights *weights = create();
    while (status != MHA_OK && n < 50) {
      int anything = 0;
      mha_weights *converted = (mha_weights *)(void *)&anything;
      mha_error error;
      f.allocator.fail_at = f.allocator.calls + ++n;
      status = mha_weights_convert(weights, to, &f.allocator.mha, &converted, &error);
      if (status) {
        test_expect(status, MHA_ERROR_MEMORY, &error);
        assert_null(converted);
      }
      mha_weights_destroy(converted);
      test_allocator_check(&f.allocator);
    }
    assert_true(n > 1 && n < 50);
    expect_numbers(weights, -1);
    mha_weights_destroy(weights);
    test_release(&f);
  }
}

static void expect_refused(const mha_weights *weights, int32_t to, mha_status expected,
                           const char *word) {
  int anything = 0;
  mha_weights *converted = (mha_weights *)(void *)&anything;
  mha_error error;
  memset(&error, 0xab, sizeof error);
  test_expect(mha_weights_convert(weights, to, &f.allocator.mha, &converted, &error), expected,
              &error);
  assert_null(converted);
  if (!strstr(error.message, word) || !strstr(error.message, "; rule: "))
    test_failed("the message does not name %s: \"%s\"", word, error.message);
  test_expect(mha_weights_convert(weights, to, NULL, &converted, NULL), expected, NULL);
}

/* Rows that no block fits, by orientation; no type at all; no layer, no place. */
static void what_cannot_be_converted(void **state) {
  const int32_t none[] = {-1, N_TYPES, INT32_MIN, INT32_MAX};
  (void)state;
  for (int out_in = 0; out_in < 2; out_in++) {
    /* IN_OUT: rows of H·d 64, G·d 64, G·dv 40, Eo 32; OUT_IN: of Eq 32, 32, 32, H·dv 40 */
    test_build(&f, &(test_case){.seed = 1,
                                .Lq = 1,
                                .H = 2,
                                .d = 32,
                                .dv = 20,
                                .Eq = 32,
                                .source = TEST_SELF,
                                .out_in = out_in});
    mha_weights *weights = create();
    mha_error error;
    const int64_t calls = f.allocator.calls;
    expect_refused(weights, MHA_Q8_0, MHA_ERROR_SIZE, out_in ? "output" : "value");
    expect_refused(weights, MHA_Q4_0, MHA_ERROR_SIZE, "40");
    for (size_t k = 0; k < COUNT(none); k++)
      expect_refused(weights, none[k], MHA_ERROR_VALUE, "element");
    expect_refused(NULL, MHA_F16, MHA_ERROR_NULL, "weights");
    test_expect(mha_weights_convert(weights, MHA_F16, NULL, NULL, &error), MHA_ERROR_NULL, &error);
    assert_int_equal(f.allocator.calls, calls);
    mha_weights_destroy(weights);
    test_release(&f);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(copied_numbers_are_dense),
      cmocka_unit_test(borrowed_numbers_are_the_callers),
      cmocka_unit_test(absent_matrices),
      cmocka_unit_test(what_cannot_be_shown),
      cmocka_unit_test(every_pair_of_types),
      cmocka_unit_test(layers_of_several_types),
      cmocka_unit_test(only_the_first_gives_back),
      cmocka_unit_test(no_memory),
      cmocka_unit_test(what_cannot_be_converted),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
