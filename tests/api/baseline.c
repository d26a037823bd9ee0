/* Owns the one fixture that is spoiled, and looks at what a refusal left of it. */
#include "baseline.h"

#include <inttypes.h>
#include <string.h>

test_fixture fixture;

void baseline_build(baseline which) {
  const bool rules = which == LAYER_RULES || which == CORE_RULES;
  const test_case c = {.seed = 1,
                       .B = B,
                       .Lq = LQ,
                       .Lk = LK,
                       .H = H,
                       .G = G,
                       .d = D,
                       .dv = DV,
                       .Eq = E,
                       .Ek = E,
                       .Ev = E,
                       .Eo = E,
                       .borrow = true,
                       .biases = TEST_ALL,
                       .source = which == SELF ? TEST_SELF : TEST_CROSS,
                       .core = which == CORE || which == CORE_RULES || which == CORE_PACKED,
                       .packed = which == LAYER_PACKED || which == CORE_PACKED,
                       .causal = rules,
                       .window = rules,
                       .left = 2,
                       .right = 1,
                       .query_lengths = rules,
                       .key_lengths = rules,
                       .has_mask = rules,
                       .has_bias = rules,
                       .mask_extents = TEST_FULL,
                       .bias_extents = TEST_FULL,
                       .alibi = rules,
                       .sinks = rules,
                       .offset_each = rules,
                       .alignment = MHA_ALIGN_OFFSET,
                       .norm = which == LAYER_RULES ? MHA_NORM_FULL : MHA_NORM_NONE,
                       .rope = which == LAYER_RULES ? MHA_ROPE_HALVES : MHA_ROPE_NONE,
                       .rotary = 2,
                       .rope_tables = true,
                       .positions_given = true,
                       .want = rules ? TEST_WANT_ALL : TEST_WANT_LSE};
  test_build(&fixture, &c);
  test_poison_results(&fixture);
}

static size_t matrix_bytes(const test_matrix *m) {
  return (size_t)(m->in * m->out) * sizeof(float);
}

size_t baseline_list_inputs(baseline_region *r) {
  const test_fixture *f = &fixture;
  const size_t entries = B * sizeof(int64_t);
  const baseline_region all[] = {
      {"query", f->query.data, (size_t)f->query.floats * sizeof(float)},
      {"key", f->key.data, (size_t)f->key.floats * sizeof(float)},
      {"value", f->value.data, (size_t)f->value.floats * sizeof(float)},
      {"attend", f->mask, (size_t)f->mask_bytes},
      {"bias", f->bias, (size_t)f->bias_floats * sizeof(float)},
      {"query_lengths", f->query_lengths, entries},
      {"key_lengths", f->key_lengths, entries},
      {"offsets", f->offsets, entries},
      {"query_starts", f->query_starts, entries + sizeof(int64_t)},
      {"key_starts", f->key_starts, entries + sizeof(int64_t)},
      {"alibi_slopes", f->slopes, H * sizeof(float)},
      {"sinks", f->sinks, H * sizeof(float)},
      {"the query norm", f->query_norm, H * D * sizeof(float)},
      {"the key norm", f->key_norm, G * D * sizeof(float)},
      {"rope_cos", f->rope_cos, (size_t)f->rope_positions * sizeof(float)},
      {"rope_sin", f->rope_sin, (size_t)f->rope_positions * sizeof(float)},
      {"query_positions", f->query_positions, B * LQ * sizeof(int64_t)},
      {"key_positions", f->key_positions, B * LK * sizeof(int64_t)},
      {"weights", f->wq.data, matrix_bytes(&f->wq)},
      {"weights", f->wk.data, matrix_bytes(&f->wk)},
      {"weights", f->wv.data, matrix_bytes(&f->wv)},
      {"weights", f->wo.data, matrix_bytes(&f->wo)},
      {"weights", f->wq.bias, (size_t)f->wq.out * sizeof(float)},
      {"weights", f->wk.bias, (size_t)f->wk.out * sizeof(float)},
      {"weights", f->wv.bias, (size_t)f->wv.out * sizeof(float)},
      {"weights", f->wo.bias, (size_t)f->wo.out * sizeof(float)}};
  memcpy(r, all, sizeof all);
  return sizeof all / sizeof *all;
}

void baseline_expect_untouched(void) {
  for (int64_t at = 0; at < fixture.output.floats; at++)
    if (!test_equal_bits(fixture.output.data[at], fixture.before[at]))
      test_failed("output element %" PRId64 " was written", at);
  for (int64_t at = 0; at < fixture.weights_n; at++)
    assert_true(test_is_poison(fixture.weights[at]));
  for (int64_t at = 0; at < fixture.average_n; at++)
    assert_true(test_is_poison(fixture.average[at]));
  for (int64_t at = 0; at < fixture.lse_n; at++)
    assert_true(test_is_poison(fixture.lse[at]));
}

void baseline_fill_with_garbage(mha_error *error) {
  memset(error, 0xab, sizeof *error);
}

void baseline_expect_error(mha_status got, mha_status expected, const mha_error *error,
                           const char *word) {
  assert_non_null(memchr(error->message, 0, sizeof error->message));
  test_expect(got, expected, error);
  if (!strstr(error->message, word))
    test_failed("the message does not name %s: \"%s\"", word, error->message);
  if (!strstr(error->message, "; rule: "))
    test_failed("the message states no rule: \"%s\"", error->message);
}

void baseline_expect_call_fails(mha_status expected, const char *word) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  if (!fixture.c.core)
    test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK,
                NULL);
  test_expect(mha_context_create(&fixture.options, &context, NULL), MHA_OK, NULL);
  const int64_t calls = fixture.allocator.calls;
  baseline_fill_with_garbage(&error);
  baseline_expect_error(test_call(&fixture, context, weights, &error), expected, &error, word);
  test_expect(test_call(&fixture, context, weights, NULL), expected, NULL);
  baseline_expect_untouched();
  assert_int_equal(fixture.allocator.calls, calls); /* found before memory is taken */
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_allocator_check(&fixture.allocator);
}

void baseline_expect_create_fails(mha_status expected, const char *word) {
  int anything = 0;
  mha_weights *weights = (mha_weights *)(void *)&anything;
  mha_error error;
  baseline_fill_with_garbage(&error);
  baseline_expect_error(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error),
                        expected, &error, word);
  assert_null(weights);
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), expected,
              NULL);
  assert_int_equal(fixture.allocator.calls, 0);
}
