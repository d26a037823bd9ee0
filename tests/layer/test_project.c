/* The steps apart: mha_project_inputs's Q, K and V against the judge and, bit for bit, against what
 * the trace of mha_forward shows; then mha_attend and mha_project_output make mha_forward of them.
 */
#include "backward_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static test_fixture fixture;
static mha_context *context;
static mha_weights *weights;

static int64_t entries(void) {
  return fixture.c.packed ? 1 : fixture.c.B;
}

/* Dense [B][L][heads][size], poisoned. */
static test_view make(int64_t length, int64_t heads, int64_t size) {
  return test_make_view(&fixture, TEST_DENSE, MHA_F32, length, heads, size);
}

/* Builds a random layer. */
static void build(test_random *random, uint64_t seed) {
  mha_error error;
  test_case c = test_back_draw(random, seed, false).forward;
  test_build(&fixture, &c);
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
}

static void release(void) {
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* ---- against the judge ---- */

/* Rows that are computed have the judge's numbers, the others are as they were. */
static void judge_rows(const char *what, const test_view *got, const oracle_numbers *expected,
                       bool keys) {
  const int64_t width = got->heads * got->size;
  for (int64_t b = 0; b < got->batch; b++)
    for (int64_t i = 0; i < got->length; i++) {
      const float *row = test_at(got, b, i, 0, 0);
      const int64_t at = (b * got->length + i) * width;
      if (keys ? test_reads_key(&fixture, b, i) : test_reads_query(&fixture, b, i))
        test_compare(what, (test_shape){{1, 1, 1, width}}, row, expected->value + at,
                     expected->bound + at);
      else
        for (int64_t c = 0; c < width; c++)
          if (!isnan(row[c]))
            test_failed("%s: row %lld of entry %lld was written", what, (long long)i, (long long)b);
    }
}

/* What the layer says and the call leaves to it. */
static mha_rules core_rules(void) {
  mha_rules rules = fixture.rules;
  if (!(rules.flags & MHA_SCALE) && fixture.config.flags & MHA_SCALE) {
    rules.flags |= MHA_SCALE;
    rules.scale = fixture.config.scale;
  }
  if (!(rules.flags & MHA_SOFTCAP) && rules.softcap == 0)
    rules.softcap = fixture.config.softcap;
  if (!rules.sinks)
    rules.sinks = fixture.matrices.sinks;
  return rules;
}

static mha_tensor show(const test_view *view) {
  return (mha_tensor){.data = view->data,
                      .batch = view->batch,
                      .length = view->length,
                      .heads = view->heads,
                      .size = view->size};
}

static void attend(const test_view *q, const test_view *k, const test_view *v,
                   const test_view *concat) {
  const mha_tensor tensors[] = {show(q), show(k), show(v)};
  const mha_rules rules = core_rules();
  mha_attend_args args;
  mha_error error;
  MHA_INIT(&args);
  args.n_sequences = fixture.c.packed ? fixture.c.B : 0;
  args.output = concat->data;
  args.rules = &rules;
  test_expect(mha_attend(context, &tensors[0], &tensors[1], &tensors[2], &args, &error), MHA_OK,
              &error);
}

static void check(test_random *random, uint64_t seed) {
  oracle_result result;
  mha_error error;
  build(random, seed);
  const test_case *c = &fixture.c;
  const test_view q = make(c->Lq, c->H, c->d);
  const test_view k = make(c->Lk, c->G, c->d);
  const test_view v = make(c->Lk, c->G, c->dv);
  const test_view concat = make(c->Lq, c->H, c->dv);
  test_poison_results(&fixture);
  test_expect(mha_project_inputs(context, weights, &fixture.args, q.data, k.data, v.data, &error),
              MHA_OK, &error);
  test_ask_oracle(&fixture, &result);
  judge_rows("q", &q, &result.q, false);
  judge_rows("k", &k, &result.k, true);
  judge_rows("v", &v, &result.v, true);
  if (c->dropout == 0 && c->Lq > 0) {
    attend(&q, &k, &v, &concat);
    test_expect(mha_project_output(context, weights, &fixture.args, concat.data, &error), MHA_OK,
                &error);
    float *output = test_gather(&fixture.output);
    test_compare("output", test_view_shape(&fixture.output), output, result.output.value,
                 result.output.bound);
    free(output);
    test_check_gaps(&fixture);
  }
  oracle_free(&result);
  release();
}

static void random_layers(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 71);
  for (uint64_t seed = 1; seed <= (test_small() ? 60 : 600); seed++)
    check(&random, seed);
}

/* ---- against the trace ---- */

typedef struct traced {
  float *steps[3]; /* Q, K, V */
  int64_t n[3];
} traced;

static void keep_step(void *user, const mha_trace_step *step) {
  static const char names[] = "QKV";
  traced *t = user;
  const char *at = strchr(names, step->name[0]);
  if (!at || step->name[1])
    return;
  const size_t i = (size_t)(at - names);
  t->n[i] = step->shape[0] * step->shape[1] * step->shape[2];
  t->steps[i] = test_allocate((size_t)t->n[i], sizeof(float));
  memcpy(t->steps[i], step->data, (size_t)t->n[i] * sizeof(float)); /* they are dense */
}

static void same_rows(const test_view *got, const float *traced_rows, bool keys) {
  const int64_t width = got->heads * got->size;
  for (int64_t b = 0; b < got->batch; b++)
    for (int64_t i = 0; i < got->length; i++)
      if (keys ? test_reads_key(&fixture, b, i) : test_reads_query(&fixture, b, i))
        test_same_bits("a traced row", (test_shape){{1, 1, 1, width}}, test_at(got, b, i, 0, 0),
                       traced_rows + (b * got->length + i) * width);
}

/* Each wanted alone has the bits that all together have, which are those of mha_forward. */
static void the_bits_of_a_call(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 72);
  for (uint64_t seed = 1; seed <= 60; seed++) {
    traced t = {{NULL}, {0}};
    mha_error error;
    build(&random, seed);
    const test_case *c = &fixture.c;
    const test_view q = make(c->Lq, c->H, c->d);
    const test_view k = make(c->Lk, c->G, c->d);
    const test_view v = make(c->Lk, c->G, c->dv);
    test_expect(mha_context_trace(context, keep_step, &t, &error), MHA_OK, &error);
    test_poison_results(&fixture);
    test_expect(mha_forward(context, weights, &fixture.args, &error), MHA_OK, &error);
    test_expect(mha_context_trace(context, NULL, NULL, &error), MHA_OK, &error);
    test_expect(mha_project_inputs(context, weights, &fixture.args, q.data, NULL, NULL, &error),
                MHA_OK, &error);
    test_expect(mha_project_inputs(context, weights, &fixture.args, NULL, k.data, v.data, &error),
                MHA_OK, &error);
    if (t.steps[0]) {
      same_rows(&q, t.steps[0], false);
      same_rows(&k, t.steps[1], true);
      same_rows(&v, t.steps[2], true);
    }
    for (int i = 0; i < 3; i++)
      free(t.steps[i]);
    release();
  }
}

/* ---- what is wrong ---- */

static void wrong_arguments(void **state) {
  const test_case c = {.B = 2, .Lq = 3, .Lk = 4, .H = 2, .d = 4, .biases = TEST_ALL};
  mha_error error;
  (void)state;
  test_build(&fixture, &c);
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
  const test_view q = make(3, 2, 4);
  const test_view k = make(4, 2, 4);
  const test_view v = make(4, 2, 4);
  float *const all[] = {q.data, k.data, v.data};
  mha_forward_args args = fixture.args;
  test_expect(mha_project_inputs(NULL, weights, &args, all[0], NULL, NULL, &error), MHA_ERROR_NULL,
              &error);
  test_expect(mha_project_inputs(context, NULL, &args, all[0], NULL, NULL, &error), MHA_ERROR_NULL,
              &error);
  test_expect(mha_project_inputs(context, weights, NULL, all[0], NULL, NULL, &error),
              MHA_ERROR_NULL, &error);
  test_expect(mha_project_inputs(context, weights, &args, NULL, NULL, NULL, &error), MHA_ERROR_NULL,
              &error);
  test_expect(mha_project_inputs(context, weights, &args, all[0], all[1], NULL, &error),
              MHA_ERROR_NULL, &error);
  test_expect(mha_project_inputs(context, weights, &args, all[0], NULL, all[2], &error),
              MHA_ERROR_NULL, &error);
  test_expect(mha_project_inputs(context, weights, &args, all[0], all[1], all[1], &error),
              MHA_ERROR_OVERLAP, &error);
  test_expect(mha_project_inputs(context, weights, &args, fixture.query.data, NULL, NULL, &error),
              MHA_ERROR_OVERLAP, &error);
  test_expect(mha_project_output(context, weights, &args, NULL, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_project_output(context, weights, &args, fixture.output.data, &error),
              MHA_ERROR_OVERLAP, &error);
  args.struct_size = 1;
  test_expect(mha_project_inputs(context, weights, &args, all[0], NULL, NULL, &error),
              MHA_ERROR_STRUCT_SIZE, &error);
  test_expect(mha_project_output(context, weights, &args, all[0], &error), MHA_ERROR_STRUCT_SIZE,
              &error);
  args = fixture.args;
  args.query_length = -1;
  test_expect(mha_project_inputs(context, weights, &args, all[0], NULL, NULL, &error),
              MHA_ERROR_SIZE, &error);
  mha_cache_options options;
  mha_cache *cache = NULL;
  MHA_INIT(&options);
  options.n_entries = 2;
  options.capacity = 8;
  options.weights = weights;
  test_expect(mha_cache_create(&options, &cache, &error), MHA_OK, &error);
  args = fixture.args;
  args.cache = cache;
  test_expect(mha_project_inputs(context, weights, &args, all[0], NULL, NULL, &error),
              MHA_ERROR_UNSUPPORTED, &error);
  test_expect(mha_project_output(context, weights, &args, all[0], &error), MHA_ERROR_UNSUPPORTED,
              &error);
  for (int i = 0; i < 3; i++)
    for (int64_t n = 0; n < (i ? 4 : 3) * entries() * 8; n++)
      assert_true(isnan(all[i][n]));
  mha_cache_destroy(cache);
  release();
}

/* The n-th allocation fails: the places are as they were, and a later call succeeds. */
static void memory_that_is_missing(void **state) {
  const test_case c = {.B = 2, .Lq = 30, .H = 2, .d = 4, .source = TEST_SELF};
  mha_status status = MHA_ERROR_MEMORY;
  mha_error error;
  (void)state;
  for (int64_t n = 1; status; n++) {
    test_build(&fixture, &c);
    test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
                &error);
    test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
    const test_view q = make(30, 2, 4);
    fixture.allocator.fail_at = fixture.allocator.calls + n;
    status = mha_project_inputs(context, weights, &fixture.args, q.data, NULL, NULL, &error);
    test_expect(status, status ? MHA_ERROR_MEMORY : MHA_OK, &error);
    assert_true(!isnan(q.data[0]) == !status);
    assert_true(n < 9 && (status || n > 1));
    test_expect(mha_project_inputs(context, weights, &fixture.args, q.data, NULL, NULL, &error),
                MHA_OK, &error);
    release();
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(random_layers),
      cmocka_unit_test(the_bits_of_a_call),
      cmocka_unit_test(wrong_arguments),
      cmocka_unit_test(memory_that_is_missing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
