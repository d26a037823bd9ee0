/* The article's example: every intermediate result, in the library and in the judge, against
 * numbers that NumPy computed in float64 (data/article). */
#include "fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { L = 7, E = 8, H = 2, D = 4 };

/* float32 against float64: what the article's reader is promised. */
static const double tolerance = 1e-5;

static double *article(const char *name, int64_t n) {
  char path[1024];
  (void)snprintf(path, sizeof path, "%s/article/%s.npy", MHA_TEST_DATA_DIR, name);
  return test_read_npy(path, n);
}

static float *article_floats(const char *name, int64_t n) {
  double *wide = article(name, n);
  float *numbers = malloc((size_t)n * sizeof *numbers);
  assert_non_null(numbers);
  for (int64_t i = 0; i < n; i++)
    numbers[i] = (float)wide[i];
  free(wide);
  return numbers;
}

static void expect_close(const char *what, const float *got, const double *expected, int64_t n) {
  double bound[H * L * E];
  assert_true(n <= H * L * E);
  for (int64_t i = 0; i < n; i++)
    bound[i] = tolerance;
  test_compare(what, (test_shape){{1, 1, 1, n}}, got, expected, bound);
}

/* What the trace showed, copied out dense. */
typedef struct seen_step {
  char name[16];
  int32_t rank;
  int64_t shape[4];
  float numbers[H * L * E];
} seen_step;

typedef struct seen_steps {
  int n;
  seen_step step[16];
} seen_steps;

static void remember_step(void *user, const mha_trace_step *step) {
  seen_steps *seen = user;
  seen_step *into = &seen->step[seen->n++];
  int64_t at[4] = {0, 0, 0, 0}, n = 1;
  (void)snprintf(into->name, sizeof into->name, "%s", step->name);
  into->rank = step->rank;
  for (int32_t i = 0; i < 4; i++)
    into->shape[i] = i < step->rank ? step->shape[i] : 1;
  for (int32_t i = 0; i < 4; i++)
    n *= into->shape[i];
  for (int64_t index = 0; index < n; index++) {
    int64_t rest = index, offset = 0;
    for (int32_t i = 3; i >= 0; i--) {
      at[i] = rest % into->shape[i];
      rest /= into->shape[i];
    }
    for (int32_t i = 0; i < step->rank; i++)
      offset += at[i] * step->strides[i];
    into->numbers[index] = step->data[offset];
  }
}

/* The article's input and its four matrices, [in][out]. */
typedef struct article_numbers {
  float *x, *w_q, *w_k, *w_v, *w_o;
} article_numbers;

static article_numbers load_numbers(void) {
  return (article_numbers){article_floats("X", L * E), article_floats("W_Q", E * E),
                           article_floats("W_K", E * E), article_floats("W_V", E * E),
                           article_floats("W_O", E * E)};
}

static void free_numbers(article_numbers numbers) {
  free(numbers.x);
  free(numbers.w_q);
  free(numbers.w_k);
  free(numbers.w_v);
  free(numbers.w_o);
}

static void expect_article(const char *what, const char *file, const float *got, int64_t n) {
  double *numbers = article(file, n);
  expect_close(what, got, numbers, n);
  free(numbers);
}

/* The order of the article, and its shapes with a batch of one in front. */
static void expect_steps(const seen_steps *seen) {
  static const struct {
    const char *name;
    int32_t rank;
    int64_t shape[4];
  } expected[] = {
      {"Q", 3, {1, L, H * D, 1}},   {"K", 3, {1, L, H * D, 1}}, {"V", 3, {1, L, H * D, 1}},
      {"weights", 4, {1, H, L, L}}, {"heads", 4, {1, H, L, D}}, {"concat", 3, {1, L, H * D, 1}},
      {"output", 3, {1, L, E, 1}},
  };
  assert_int_equal(seen->n, (int)(sizeof expected / sizeof *expected));
  for (int i = 0; i < seen->n; i++) {
    const seen_step *step = &seen->step[i];
    int64_t n = 1;
    assert_string_equal(step->name, expected[i].name);
    assert_int_equal(step->rank, expected[i].rank);
    for (int axis = 0; axis < 4; axis++) {
      assert_int_equal(step->shape[axis], expected[i].shape[axis]);
      n *= expected[i].shape[axis];
    }
    expect_article(step->name, step->name, step->numbers, n);
  }
}

static void every_step(void **state) {
  static seen_steps seen;
  const article_numbers numbers = load_numbers();
  float output[L * E], weights_out[H * L * L];
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_config config;
  mha_matrices matrices;
  mha_results results;
  mha_forward_args args;
  mha_error error;
  (void)state;
  mha_config_init(&config, E, H);
  MHA_INIT(&matrices);
  matrices.orientation = MHA_IN_OUT;
  matrices.query = numbers.w_q;
  matrices.key = numbers.w_k;
  matrices.value = numbers.w_v;
  matrices.output = numbers.w_o;
  test_expect(mha_weights_create(&config, &matrices, &weights, &error), MHA_OK, &error);
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  test_expect(mha_context_trace(context, remember_step, &seen, &error), MHA_OK, &error);
  MHA_INIT(&results);
  results.weights = weights_out;
  MHA_INIT(&args);
  args.batch = 1;
  args.query_length = L;
  args.query = numbers.x;
  args.output = output;
  args.results = &results;
  test_expect(mha_forward(context, weights, &args, &error), MHA_OK, &error);
  expect_steps(&seen);
  expect_article("weights asked for", "weights", weights_out, (int64_t)H * L * L);
  expect_article("output", "output", output, L * E);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  free_numbers(numbers);
}

/* The short use that the header shows, word for word but for the sizes. */
static void the_headers_example(void **state) {
  const article_numbers numbers = load_numbers();
  const float *x = numbers.x, *w_q = numbers.w_q, *w_k = numbers.w_k;
  const float *w_v = numbers.w_v, *w_o = numbers.w_o;
  float output[L * E];
  (void)state;

  mha_config config;
  mha_config_init(&config, E, H);
  mha_matrices matrices;
  MHA_INIT(&matrices);
  matrices.orientation = MHA_IN_OUT;
  matrices.query = w_q;
  matrices.key = w_k;
  matrices.value = w_v;
  matrices.output = w_o;

  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  if (mha_weights_create(&config, &matrices, &weights, &error) ||
      mha_context_create(NULL, &context, &error) ||
      mha_self_attention(context, weights, x, 1, L, output, &error))
    test_failed("%s", error.message);
  mha_context_destroy(context);
  mha_weights_destroy(weights);

  expect_article("output", "output", output, L * E);
  free_numbers(numbers);
}

/* Two float64 computations of 8 terms agree far below float32's roundoff. */
static void expect_judged(const char *name, const oracle_numbers *judged) {
  double *numbers = article(name, judged->n);
  for (int64_t i = 0; i < judged->n; i++)
    test_near(name, judged->value[i], numbers[i], 1e-12);
  free(numbers);
}

static void the_judge_agrees(void **state) {
  double *x = article("X", L * E), *w_q = article("W_Q", E * E), *w_k = article("W_K", E * E);
  double *w_v = article("W_V", E * E), *w_o = article("W_O", E * E);
  oracle_result result;
  (void)state;
  const oracle_problem problem = {.B = 1,
                                  .Lq = L,
                                  .Lk = L,
                                  .H = H,
                                  .G = H,
                                  .d = D,
                                  .dv = D,
                                  .Eq = E,
                                  .Ek = E,
                                  .Ev = E,
                                  .Eo = E,
                                  .query = x,
                                  .key = x,
                                  .value = x,
                                  .wq = {w_q, NULL, false, E},
                                  .wk = {w_k, NULL, false, E},
                                  .wv = {w_v, NULL, false, E},
                                  .wo = {w_o, NULL, false, E}};
  oracle_solve(&problem, &result);
  expect_judged("Q", &result.q);
  expect_judged("K", &result.k);
  expect_judged("V", &result.v);
  expect_judged("weights", &result.stage[3]);
  expect_judged("concat", &result.concat);
  expect_judged("output", &result.output);
  oracle_free(&result);
  free(x);
  free(w_q);
  free(w_k);
  free(w_v);
  free(w_o);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_step),
      cmocka_unit_test(the_headers_example),
      cmocka_unit_test(the_judge_agrees),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
