/* mha_weights: derived sizes, copies and loans, references, folders of .npy files. */
#include "fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static test_fixture fixture; /* one at a time; too large for a stack */

/* The seven sizes: G, d, dv, Eq, Ek, Ev, Eo. */
static void expect_config(const mha_config *config, const mha_matrices *matrices,
                          const int64_t sizes[7]) {
  mha_weights *weights = NULL;
  mha_config got;
  mha_error error;
  test_expect(mha_weights_create(config, matrices, &weights, &error), MHA_OK, &error);
  MHA_INIT(&got);
  test_expect(mha_weights_config(weights, &got, &error), MHA_OK, &error);
  assert_int_equal(got.struct_size, sizeof got);
  assert_int_equal(got.n_heads, config->n_heads);
  assert_int_equal(got.n_kv_heads, sizes[0]);
  assert_int_equal(got.head_size, sizes[1]);
  assert_int_equal(got.value_head_size, sizes[2]);
  assert_int_equal(got.query_width, sizes[3]);
  assert_int_equal(got.key_width, sizes[4]);
  assert_int_equal(got.value_width, sizes[5]);
  assert_int_equal(got.output_width, sizes[6]);
  assert_null(got.allocator);
  mha_weights_destroy(weights);
}

static void sizes_left_zero_are_derived(void **state) {
  static const float numbers[4096];
  mha_config config;
  mha_matrices m;
  (void)state;
  MHA_INIT(&m);
  m.orientation = MHA_IN_OUT;
  m.query = m.key = m.value = m.output = numbers;
  mha_config_init(&config, 12, 4);
  expect_config(&config, &m, (int64_t[]){4, 3, 3, 12, 12, 12, 12});
  config.n_kv_heads = 2;
  expect_config(&config, &m, (int64_t[]){2, 3, 3, 12, 12, 12, 12});
  config.head_size = 5;
  expect_config(&config, &m, (int64_t[]){2, 5, 5, 12, 12, 12, 12});
  config.value_head_size = 7;
  expect_config(&config, &m, (int64_t[]){2, 5, 7, 12, 12, 12, 12});
  config.key_width = 6;
  config.value_width = 8;
  config.output_width = 10;
  expect_config(&config, &m, (int64_t[]){2, 5, 7, 12, 6, 8, 10});
}

/* The identity has equal widths on both sides: Ek = G·d, Ev = G·dv, Eo = H·dv. */
static void absent_matrices_force_sizes(void **state) {
  static const float numbers[4096];
  mha_config config;
  mha_matrices m;
  (void)state;
  MHA_INIT(&m);
  mha_config_init(&config, 12, 4);
  config.n_kv_heads = 2;
  config.value_head_size = 5;
  expect_config(&config, &m, (int64_t[]){2, 3, 5, 12, 6, 10, 20});
  m.orientation = MHA_OUT_IN;
  m.key = numbers;
  expect_config(&config, &m, (int64_t[]){2, 3, 5, 12, 12, 10, 20});
  m.key = NULL;
  m.output = numbers;
  expect_config(&config, &m, (int64_t[]){2, 3, 5, 12, 6, 10, 12});
}

static void sizes_that_cannot_be_derived(void **state) {
  static const float numbers[4096];
  mha_config config;
  mha_matrices m;
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  MHA_INIT(&m);
  m.orientation = MHA_IN_OUT;
  m.query = m.key = m.value = m.output = numbers;
  mha_config_init(&config, 10, 4); /* a remainder */
  test_expect(mha_weights_create(&config, &m, &weights, &error), MHA_ERROR_HEADS, &error);
  mha_config_init(&config, 0, 4); /* no width, no head size */
  test_expect(mha_weights_create(&config, &m, &weights, &error), MHA_ERROR_SIZE, &error);
  mha_config_init(&config, 12, 0);
  test_expect(mha_weights_create(&config, &m, &weights, &error), MHA_ERROR_SIZE, &error);
  mha_config_init(&config, 12, 4); /* the identity between different widths */
  config.key_width = 9;
  m.key = NULL;
  test_expect(mha_weights_create(&config, &m, &weights, &error), MHA_ERROR_WEIGHTS, &error);
  assert_non_null(strstr(error.message, "key"));
  assert_null(weights);
}

/* score settings come back as given */
static void the_config_keeps_its_score_rule(void **state) {
  mha_config config, got;
  mha_matrices m;
  mha_weights *weights = NULL;
  (void)state;
  MHA_INIT(&m);
  MHA_INIT(&got);
  mha_config_init(&config, 4, 2);
  config.flags = MHA_SCALE;
  config.scale = -0.25F;
  config.softcap = 30.0F;
  test_expect(mha_weights_create(&config, &m, &weights, NULL), MHA_OK, NULL);
  test_expect(mha_weights_config(weights, &got, NULL), MHA_OK, NULL);
  assert_int_equal(got.flags, MHA_SCALE);
  test_near("scale", (double)got.scale, -0.25, 0.0);
  test_near("softcap", (double)got.softcap, 30.0, 0.0);
  mha_weights_destroy(weights);
}

static test_case small_layer(bool borrow) {
  return (test_case){.seed = 9,
                     .B = 2,
                     .Lq = 5,
                     .H = 4,
                     .G = 2,
                     .d = 3,
                     .source = TEST_SELF,
                     .biases = TEST_ALL,
                     .borrow = borrow,
                     .weight_layout = TEST_GAPS};
}

static void spoil(test_matrix *m) {
  test_fill_poison(m->data, m->ld * 2);
  test_fill_poison(m->bias, m->out);
}

/* A copy does not see what becomes of the caller's numbers, and the gaps are not part of it. */
static void copied_numbers_are_the_layers(void **state) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  const test_case c = small_layer(false);
  oracle_result result;
  (void)state;
  test_build(&fixture, &c);
  test_ask_oracle(&fixture, &result);
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  spoil(&fixture.wq);
  spoil(&fixture.wk);
  spoil(&fixture.wv);
  spoil(&fixture.wo);
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
  test_judge(&fixture, &result);
  oracle_free(&result);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_allocator_check(&fixture.allocator);
  test_release(&fixture);
}

/* A loan costs no memory for numbers. The same layer, copied, takes that of its numbers. */
static void borrowed_numbers_stay_the_callers(void **state) {
  size_t bytes[2];
  (void)state;
  for (int borrow = 0; borrow < 2; borrow++) {
    mha_weights *weights = NULL;
    const test_case c = {.seed = 9, .Lq = 1, .H = 4, .d = 64, .borrow = borrow};
    test_build(&fixture, &c);
    test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK,
                NULL);
    bytes[borrow] = fixture.allocator.live_bytes;
    mha_weights_destroy(weights);
    test_allocator_check(&fixture.allocator);
    test_release(&fixture);
  }
  assert_true(bytes[0] >= 4 * 256 * 256 * sizeof(float));
  assert_true(bytes[1] < 4096);
}

/* The change of a borrowed number between calls shows: nothing was rewritten or cached. */
static void borrowed_numbers_are_used_as_they_lie(void **state) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  const test_case c = small_layer(true);
  (void)state;
  test_build(&fixture, &c);
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK, NULL);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  fixture.wv.data[0] += 1.0F;
  fixture.wo.bias[0] += 1.0F;
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
  test_judge_now(&fixture);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* Every number that a layer borrows. */
static int list_borrowed(float *numbers[16], int64_t counts[16]) {
  const test_fixture *f = &fixture;
  const test_matrix *all[] = {&f->wq, &f->wk, &f->wv, &f->wo};
  int n = 0;
  for (int k = 0; k < 4; k++) {
    numbers[n] = all[k]->data;
    counts[n++] = all[k]->in * all[k]->out;
    numbers[n] = all[k]->bias;
    counts[n++] = all[k]->out;
  }
  numbers[n] = f->query_norm;
  counts[n++] = f->c.d;
  numbers[n] = f->key_norm;
  counts[n++] = f->c.d;
  numbers[n] = f->rope_cos;
  counts[n++] = f->rope_positions * (f->c.rotary / 2);
  numbers[n] = f->rope_sin;
  counts[n++] = f->rope_positions * (f->c.rotary / 2);
  return n;
}

static void change_numbers(float *numbers, int64_t n, uint64_t seed) {
  test_random random;
  test_random_seed(&random, seed);
  for (int64_t i = 0; i < n; i++)
    numbers[i] += (float)(0.25 * test_random_normal(&random));
}

static float *output_of(mha_context *context, const mha_weights *weights) {
  mha_error error;
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
  return test_gather(&fixture.output);
}

/* As an optimizer does: the layer then gives the bits of one that is made anew, and others than
 * before. Its own sinks, too, which the fixture knows as the call's. */
static void borrowed_numbers_may_change_between_calls(void **state) {
  float sinks[4] = {0.0F, 0.5F, -0.5F, 1.0F};
  float *numbers[16];
  int64_t counts[16];
  (void)state;
  const test_case c = {.seed = 12,
                       .B = 2,
                       .Lq = 9,
                       .H = 4,
                       .G = 2,
                       .d = 6,
                       .borrow = true,
                       .biases = TEST_ALL,
                       .source = TEST_SELF,
                       .norm = MHA_NORM_PER_HEAD,
                       .rope = MHA_ROPE_HALVES,
                       .rotary = 4,
                       .rope_tables = true};
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  test_build(&fixture, &c);
  fixture.matrices.sinks = sinks;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK, NULL);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  const int n = list_borrowed(numbers, counts);
  float *before = output_of(context, weights);
  const int64_t floats = c.B * c.Lq * fixture.c.Eo;
  for (int k = 0; k <= n; k++) {
    mha_weights *fresh = NULL;
    change_numbers(k < n ? numbers[k] : sinks, k < n ? counts[k] : 4, (uint64_t)k);
    test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &fresh, NULL), MHA_OK, NULL);
    float *after = output_of(context, weights);
    float *expected = output_of(context, fresh);
    test_note("borrowed array %d", k);
    test_same_bits("output", test_view_shape(&fixture.output), after, expected);
    /* a bias of K moves all scores of a query alike, but not behind a norm and positions */
    assert_memory_not_equal(after, before, (size_t)floats * sizeof *after);
    free(before);
    free(expected);
    before = after;
    mha_weights_destroy(fresh);
  }
  free(before);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

static void references_are_counted(void **state) {
  mha_weights *weights = NULL;
  const test_case c = small_layer(false);
  (void)state;
  test_build(&fixture, &c);
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK, NULL);
  const int64_t live = fixture.allocator.live;
  assert_ptr_equal(mha_weights_retain(weights), weights);
  assert_ptr_equal(mha_weights_retain(weights), weights);
  mha_weights_destroy(weights);
  mha_weights_destroy(weights);
  assert_int_equal(fixture.allocator.live, live);
  mha_weights_destroy(weights);
  test_allocator_check(&fixture.allocator);
  mha_weights_destroy(NULL);
  test_release(&fixture);
}

static void count_release(void *user) {
  ++*(int *)user;
}

/* Borrowed arrays are given back once, with the last reference; not by a creation that fails. */
static void borrowed_arrays_are_given_back(void **state) {
  mha_weights *weights = NULL;
  mha_error error;
  int released = 0;
  const test_case c = small_layer(true);
  (void)state;
  test_build(&fixture, &c);
  mha_matrices *m = &fixture.matrices;
  m->release = count_release;
  m->release_user = &released;
  test_expect(mha_weights_create(&fixture.config, m, &weights, &error), MHA_OK, &error);
  assert_ptr_equal(mha_weights_retain(weights), weights);
  mha_weights_destroy(weights);
  assert_int_equal(released, 0);
  mha_weights_destroy(weights);
  assert_int_equal(released, 1);
  m->query_ld = 1;
  test_expect(mha_weights_create(&fixture.config, m, &weights, &error), MHA_ERROR_STRIDE, &error);
  m->query_ld = 0;
  fixture.allocator.fail_at = fixture.allocator.calls + 1;
  test_expect(mha_weights_create(&fixture.config, m, &weights, &error), MHA_ERROR_MEMORY, &error);
  m->ownership = MHA_COPY; /* nothing stays borrowed */
  test_expect(mha_weights_create(&fixture.config, m, &weights, &error), MHA_ERROR_VALUE, &error);
  assert_non_null(strstr(error.message, "matrices.release"));
  assert_int_equal(released, 1);
  test_allocator_check(&fixture.allocator);
  test_release(&fixture);
}

static void unknown_element_types(void **state) {
  const test_case c = small_layer(false);
  (void)state;
  test_build(&fixture, &c);
  int32_t *const elements[] = {&fixture.matrices.query_element, &fixture.matrices.key_element,
                               &fixture.matrices.value_element, &fixture.matrices.output_element};
  const char *const names[] = {"query_element", "key_element", "value_element", "output_element"};
  for (int k = 0; k < 4; k++) {
    mha_weights *weights = NULL;
    mha_error error;
    *elements[k] = k % 2 ? -1 : MHA_Q4_0 + 1;
    test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error),
                MHA_ERROR_UNSUPPORTED, &error);
    assert_non_null(strstr(error.message, names[k]));
    fixture.matrices.query = k == 0 ? NULL : fixture.matrices.query; /* though nobody reads it */
    test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error),
                MHA_ERROR_UNSUPPORTED, &error);
    *elements[k] = MHA_F32;
  }
  test_release(&fixture);
}

/* What was stored before is overwritten with NULL when creation fails. */
static void failure_stores_null(void **state) {
  mha_config config;
  mha_matrices m;
  mha_error error;
  int anything = 0;
  mha_weights *weights = (mha_weights *)(void *)&anything;
  (void)state;
  MHA_INIT(&m);
  mha_config_init(&config, 10, 3);
  test_expect(mha_weights_create(&config, &m, &weights, &error), MHA_ERROR_HEADS, &error);
  assert_null(weights);
}

static void load_article(int64_t heads, mha_weights **weights, mha_status expected,
                         mha_error *error) {
  mha_config config;
  mha_config_init(&config, 0, heads);
  test_expect(mha_weights_load(&config, MHA_TEST_DATA_DIR "/article", NULL, weights, error),
              expected, error);
}

/* The article's folder holds W_Q, W_K, W_V and W_O, float64, [8][8]. */
static void a_folder_of_npy_files(void **state) {
  enum { L = 7, E = 8 };
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_config got;
  mha_error error;
  float x[L * E], output[L * E];
  double bound[L * E];
  (void)state;
  load_article(2, &weights, MHA_OK, &error);
  MHA_INIT(&got);
  test_expect(mha_weights_config(weights, &got, NULL), MHA_OK, NULL);
  assert_int_equal(got.query_width, E);
  assert_int_equal(got.head_size, 4);
  double *numbers = test_read_npy(MHA_TEST_DATA_DIR "/article/X.npy", L * E);
  for (int i = 0; i < L * E; i++) {
    x[i] = (float)numbers[i];
    bound[i] = 1e-5; /* float32 against the article's float64 */
  }
  free(numbers);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  test_expect(mha_self_attention(context, weights, x, 1, L, output, &error), MHA_OK, &error);
  numbers = test_read_npy(MHA_TEST_DATA_DIR "/article/output.npy", L * E);
  test_compare("output", (test_shape){{1, 1, L, E}}, output, numbers, bound);
  free(numbers);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
}

static void folders_that_do_not_fit(void **state) {
  mha_weights *weights = NULL;
  mha_config config;
  mha_error error;
  (void)state;
  load_article(3, &weights, MHA_ERROR_HEADS, &error); /* 8 columns, 3 heads */
  assert_null(weights);
  mha_config_init(&config, 9, 2); /* Eq is 8 in the files */
  test_expect(mha_weights_load(&config, MHA_TEST_DATA_DIR "/article", NULL, &weights, &error),
              MHA_ERROR_WEIGHTS, &error);
  assert_non_null(strstr(error.message, "W_Q"));
  mha_config_init(&config, 0, 2);
  test_expect(
      mha_weights_load(&config, MHA_TEST_DATA_DIR "/no/such/folder", NULL, &weights, &error),
      MHA_ERROR_IO, &error);
  assert_non_null(strstr(error.message, "no/such/folder"));
  test_expect(mha_weights_load(&config, MHA_TEST_DATA_DIR "/article", "layer.", &weights, &error),
              MHA_ERROR_WEIGHTS, &error);
  assert_non_null(strstr(error.message, "layer."));
  test_expect(mha_weights_load(NULL, MHA_TEST_DATA_DIR "/article", NULL, &weights, &error),
              MHA_ERROR_NULL, &error);
  test_expect(mha_weights_load(&config, NULL, NULL, &weights, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_weights_load(&config, MHA_TEST_DATA_DIR "/article", NULL, NULL, &error),
              MHA_ERROR_NULL, &error);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sizes_left_zero_are_derived),
      cmocka_unit_test(absent_matrices_force_sizes),
      cmocka_unit_test(sizes_that_cannot_be_derived),
      cmocka_unit_test(the_config_keeps_its_score_rule),
      cmocka_unit_test(copied_numbers_are_the_layers),
      cmocka_unit_test(borrowed_numbers_stay_the_callers),
      cmocka_unit_test(borrowed_numbers_are_used_as_they_lie),
      cmocka_unit_test(borrowed_numbers_may_change_between_calls),
      cmocka_unit_test(references_are_counted),
      cmocka_unit_test(borrowed_arrays_are_given_back),
      cmocka_unit_test(unknown_element_types),
      cmocka_unit_test(failure_stores_null),
      cmocka_unit_test(a_folder_of_npy_files),
      cmocka_unit_test(folders_that_do_not_fit),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
