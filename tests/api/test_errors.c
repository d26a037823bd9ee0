/* Every wrong argument gives its own status and a message that names it, and writes nothing: each
 * row of the tables spoils one member of a call that is right otherwise. */
#include "fixture.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_fixture fixture; /* one at a time; too large for a stack */

/* ---- Calls that are right -------------------------------------------------------------------- */

typedef enum baseline {
  LAYER,        /* mha_forward, cross attention, no rules */
  SELF,         /* mha_forward with key and value NULL */
  LAYER_RULES,  /* mha_forward with every rule and every result */
  LAYER_PACKED, /* mha_forward with packed input */
  CORE,         /* mha_attend, no rules */
  CORE_RULES,
  CORE_PACKED,
  CREATE /* mha_weights_create alone */
} baseline;

enum { B = 2, LQ = 3, LK = 5, H = 4, G = 2, D = 3, DV = 2, E = 12 };

static void build(baseline which) {
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

static void expect_untouched(void) {
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

/* The error struct begins as garbage, and its message ends within its bytes. */
static void fill_with_garbage(mha_error *error) {
  memset(error, 0xab, sizeof *error);
}

static void expect_error(mha_status got, mha_status expected, const mha_error *error,
                         const char *word) {
  assert_non_null(memchr(error->message, 0, sizeof error->message));
  test_expect(got, expected, error);
  if (!strstr(error->message, word))
    test_failed("the message does not name %s: \"%s\"", word, error->message);
  if (!strstr(error->message, "; rule: "))
    test_failed("the message states no rule: \"%s\"", error->message);
}

/* Creates the layer as it is in the fixture, calls, and expects the error with and without an
 * mha_error; then undoes nothing: the caller releases the fixture. */
static void expect_call_fails(mha_status expected, const char *word) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  if (!fixture.c.core)
    test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK,
                NULL);
  test_expect(mha_context_create(&fixture.options, &context, NULL), MHA_OK, NULL);
  const int64_t calls = fixture.allocator.calls;
  fill_with_garbage(&error);
  expect_error(test_call(&fixture, context, weights, &error), expected, &error, word);
  test_expect(test_call(&fixture, context, weights, NULL), expected, NULL);
  expect_untouched();
  assert_int_equal(fixture.allocator.calls, calls); /* found before memory is taken */
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_allocator_check(&fixture.allocator);
}

static void expect_create_fails(mha_status expected, const char *word) {
  int anything = 0;
  mha_weights *weights = (mha_weights *)(void *)&anything;
  mha_error error;
  fill_with_garbage(&error);
  expect_error(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), expected,
               &error, word);
  assert_null(weights);
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), expected,
              NULL);
  assert_int_equal(fixture.allocator.calls, 0);
}

/* ---- The tables ------------------------------------------------------------------------------ */

typedef enum kind { INT64, INT32, UINT32, FLOAT, NO_POINTER, ELEMENT } kind;

/* `member` of `target` becomes `integer` or `number`; ELEMENT: [1] of the array it points to. */
typedef struct row {
  baseline base;
  size_t target; /* offset of the struct in the fixture */
  size_t member;
  kind kind;
  int64_t integer;
  float number;
  mha_status status;
  const char *word;
} row;

#define MEMBER(base, struct_, type, member, kind, integer, number, status, word)                   \
  {                                                                                                \
    base, offsetof(test_fixture, struct_), offsetof(type, member), kind, integer, number, status,  \
        word                                                                                       \
  }
#define CONFIG(member, value, status)                                                              \
  MEMBER(CREATE, config, mha_config, member, INT64, value, 0.0F, status, "config." #member)
#define MATRIX(member, value, status)                                                              \
  MEMBER(CREATE, matrices, mha_matrices, member, INT64, value, 0.0F, status, "matrices." #member)
#define ARGS(base, member, value, status, word)                                                    \
  MEMBER(base, args, mha_forward_args, member, INT64, value, 0.0F, status, "args." word)
#define NO_ARG(base, member, word)                                                                 \
  MEMBER(base, args, mha_forward_args, member, NO_POINTER, 0, 0.0F, MHA_ERROR_NULL, "args." word)
#define RESULT(base, member, value)                                                                \
  MEMBER(base, results, mha_results, member, INT32, value, 0.0F, MHA_ERROR_VALUE,                  \
         "results." #member)
#define RULE(base, member, kind, value, status, word)                                              \
  MEMBER(base, rules, mha_rules, member, kind, value, 0.0F, status, "rules." word)
#define SCORE(member, number, word)                                                                \
  MEMBER(CORE_RULES, rules, mha_rules, member, FLOAT, 0, number, MHA_ERROR_VALUE, "rules." word)
#define TENSOR(tensor, member, value, status)                                                      \
  MEMBER(CORE, tensor, mha_tensor, member, INT64, value, 0.0F, status, #tensor)
#define ATTEND(base, member, value, status, word)                                                  \
  MEMBER(base, attend_args, mha_attend_args, member, INT64, value, 0.0F, status, "args." word)

static void set(const row *r) {
  char *at = (char *)&fixture + r->target + r->member;
  const int32_t narrow = (int32_t)r->integer;
  const void *none = NULL;
  char *array = NULL;
  switch (r->kind) {
  case INT64:
    memcpy(at, &r->integer, sizeof r->integer);
    break;
  case INT32:
  case UINT32:
    memcpy(at, &narrow, sizeof narrow);
    break;
  case FLOAT:
    memcpy(at, &r->number, sizeof r->number);
    break;
  case NO_POINTER:
    memcpy(at, &none, sizeof none);
    break;
  case ELEMENT:
    memcpy(&array, at, sizeof array);
    memcpy(array + sizeof r->integer, &r->integer, sizeof r->integer);
    break;
  }
}

static void try_row(const row *r, size_t index) {
  build(r->base);
  if (r->kind == FLOAT && r->member == offsetof(mha_rules, scale))
    fixture.rules.flags |= MHA_SCALE;
  set(r);
  test_note("row %zu: %s becomes %" PRId64 " or %g", index, r->word, r->integer, (double)r->number);
  if (r->base == CREATE)
    expect_create_fails(r->status, r->word);
  else
    expect_call_fails(r->status, r->word);
  test_release(&fixture);
}

static const int64_t over_int = INT64_C(1) << 31; /* one more than the BLAS's integer holds */

static void layers_that_do_not_fit(void **state) {
  const row rows[] = {
      CONFIG(n_heads, 0, MHA_ERROR_SIZE),
      CONFIG(n_heads, -1, MHA_ERROR_SIZE),
      CONFIG(n_heads, INT64_MIN, MHA_ERROR_SIZE),
      CONFIG(n_kv_heads, -1, MHA_ERROR_SIZE),
      CONFIG(n_kv_heads, 3, MHA_ERROR_HEADS),
      CONFIG(n_kv_heads, 8, MHA_ERROR_HEADS),
      CONFIG(head_size, -1, MHA_ERROR_SIZE),
      CONFIG(head_size, over_int, MHA_ERROR_OVERFLOW),
      CONFIG(head_size, INT64_MAX, MHA_ERROR_OVERFLOW),
      CONFIG(head_size, INT64_MAX / 4 + 2, MHA_ERROR_OVERFLOW),
      CONFIG(value_head_size, -1, MHA_ERROR_SIZE),
      CONFIG(value_head_size, INT64_MAX, MHA_ERROR_OVERFLOW),
      CONFIG(query_width, -1, MHA_ERROR_SIZE),
      CONFIG(query_width, over_int, MHA_ERROR_OVERFLOW),
      CONFIG(key_width, -1, MHA_ERROR_SIZE),
      CONFIG(key_width, over_int, MHA_ERROR_OVERFLOW),
      CONFIG(value_width, -1, MHA_ERROR_SIZE),
      CONFIG(value_width, INT64_MAX, MHA_ERROR_OVERFLOW),
      CONFIG(output_width, -1, MHA_ERROR_SIZE),
      CONFIG(output_width, over_int, MHA_ERROR_OVERFLOW),
      MATRIX(query_ld, H * D - 1, MHA_ERROR_STRIDE),
      MATRIX(query_ld, -1, MHA_ERROR_STRIDE),
      MATRIX(query_ld, over_int, MHA_ERROR_OVERFLOW),
      MATRIX(key_ld, G * D - 1, MHA_ERROR_STRIDE),
      MATRIX(value_ld, G * DV - 1, MHA_ERROR_STRIDE),
      MATRIX(output_ld, E - 1, MHA_ERROR_STRIDE),
      MEMBER(CREATE, config, mha_config, flags, UINT32, 2, 0.0F, MHA_ERROR_VALUE, "flags"),
      MEMBER(CREATE, config, mha_config, softcap, FLOAT, 0, NAN, MHA_ERROR_VALUE, "softcap"),
      MEMBER(CREATE, config, mha_config, softcap, FLOAT, 0, INFINITY, MHA_ERROR_VALUE, "softcap"),
      MEMBER(CREATE, config, mha_config, softcap, FLOAT, 0, -1.0F, MHA_ERROR_VALUE, "softcap"),
      MEMBER(CREATE, matrices, mha_matrices, orientation, INT32, 0, 0.0F, MHA_ERROR_VALUE,
             "orientation"),
      MEMBER(CREATE, matrices, mha_matrices, orientation, INT32, 3, 0.0F, MHA_ERROR_VALUE,
             "orientation"),
      MEMBER(CREATE, matrices, mha_matrices, ownership, INT32, 2, 0.0F, MHA_ERROR_VALUE,
             "ownership"),
      MEMBER(CREATE, matrices, mha_matrices, ownership, INT32, -1, 0.0F, MHA_ERROR_VALUE,
             "ownership"),
      MEMBER(CREATE, config, mha_config, reserved, INT32, 1, 0.0F, MHA_ERROR_VALUE, "reserved"),
      /* Ek = 12 and G·d = 6, Ev = 12 and G·dv = 4, Eo = 12 and H·dv = 8: not the identity */
      MEMBER(CREATE, matrices, mha_matrices, key, NO_POINTER, 0, 0.0F, MHA_ERROR_WEIGHTS, "key"),
      MEMBER(CREATE, matrices, mha_matrices, value, NO_POINTER, 0, 0.0F, MHA_ERROR_WEIGHTS,
             "value"),
      MEMBER(CREATE, matrices, mha_matrices, output, NO_POINTER, 0, 0.0F, MHA_ERROR_WEIGHTS,
             "output"),
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    try_row(&rows[i], i);
}

/* What is wrong about the norm and the rotary positions of a layer. */
typedef struct preparation {
  int32_t norm;
  float epsilon;
  bool query_norm, key_norm;
  int32_t rope;
  int64_t rotary;
  double base;
  int64_t positions;
  bool cosines, sines;
  mha_status status;
  const char *word;
} preparation;

static const preparation wrong_preparations[] = {
    {.norm = 3, .epsilon = 1, .status = MHA_ERROR_VALUE, .word = "norm"},
    {.norm = -1, .epsilon = 1, .status = MHA_ERROR_VALUE, .word = "norm"},
    {.norm = 1, .epsilon = 0, .status = MHA_ERROR_VALUE, .word = "norm_epsilon"},
    {.norm = 2, .epsilon = -1e-5F, .status = MHA_ERROR_VALUE, .word = "norm_epsilon"},
    {.norm = 1, .epsilon = NAN, .status = MHA_ERROR_VALUE, .word = "norm_epsilon"},
    {.norm = 1, .epsilon = INFINITY, .status = MHA_ERROR_VALUE, .word = "norm_epsilon"},
    {.query_norm = true, .status = MHA_ERROR_WEIGHTS, .word = "query_norm"},
    {.key_norm = true, .status = MHA_ERROR_WEIGHTS, .word = "key_norm"},
    {.rope = 3, .status = MHA_ERROR_VALUE, .word = "rope"},
    {.rope = -1, .status = MHA_ERROR_VALUE, .word = "rope"},
    {.rope = 1, .rotary = 1, .status = MHA_ERROR_SIZE, .word = "rotary_size"},
    {.rope = 1, .rotary = 4, .status = MHA_ERROR_SIZE, .word = "rotary_size"}, /* d is 3 */
    {.rope = 1, .rotary = -2, .status = MHA_ERROR_SIZE, .word = "rotary_size"},
    {.rope = 1, .rotary = INT64_MIN, .status = MHA_ERROR_SIZE, .word = "rotary_size"},
    {.rope = 2, .rotary = 0, .status = MHA_ERROR_SIZE, .word = "rotary_size"}, /* d is odd */
    {.rope = 1, .rotary = 2, .base = -1, .status = MHA_ERROR_VALUE, .word = "rope_base"},
    {.rope = 1, .rotary = 2, .base = (double)NAN, .status = MHA_ERROR_VALUE, .word = "rope_base"},
    {.rope = 1,
     .rotary = 2,
     .base = (double)INFINITY,
     .status = MHA_ERROR_VALUE,
     .word = "rope_base"},
    {.rope = 1,
     .rotary = 2,
     .cosines = true,
     .positions = 4,
     .status = MHA_ERROR_NULL,
     .word = "rope_sin"},
    {.rope = 1,
     .rotary = 2,
     .sines = true,
     .positions = 4,
     .status = MHA_ERROR_NULL,
     .word = "rope_cos"},
    {.rope = 1,
     .rotary = 2,
     .cosines = true,
     .sines = true,
     .status = MHA_ERROR_SIZE,
     .word = "rope_positions"},
    {.rope = 1,
     .rotary = 2,
     .cosines = true,
     .sines = true,
     .positions = -1,
     .status = MHA_ERROR_SIZE,
     .word = "rope_positions"},
};

static void norms_and_positions_that_are_wrong(void **state) {
  static const float numbers[64];
  (void)state;
  for (size_t i = 0; i < COUNT(wrong_preparations); i++) {
    build(CREATE);
    mha_config *c = &fixture.config;
    c->norm = wrong_preparations[i].norm;
    c->norm_epsilon = wrong_preparations[i].epsilon;
    fixture.matrices.query_norm = wrong_preparations[i].query_norm ? numbers : NULL;
    fixture.matrices.key_norm = wrong_preparations[i].key_norm ? numbers : NULL;
    c->rope = wrong_preparations[i].rope;
    c->rotary_size = wrong_preparations[i].rotary;
    c->rope_base = wrong_preparations[i].base;
    c->rope_positions = wrong_preparations[i].positions;
    c->rope_cos = wrong_preparations[i].cosines ? numbers : NULL;
    c->rope_sin = wrong_preparations[i].sines ? numbers : NULL;
    test_note("row %zu", i);
    expect_create_fails(wrong_preparations[i].status, wrong_preparations[i].word);
    test_release(&fixture);
  }
  test_note("%s", "");
}

static void layer_sinks_that_are_wrong(void **state) {
  const float bad[] = {NAN, INFINITY};
  (void)state;
  for (size_t i = 0; i < COUNT(bad); i++) {
    const float sinks[H] = {0.0F, -INFINITY, 1.0F, bad[i]};
    build(CREATE);
    fixture.matrices.sinks = sinks;
    expect_create_fails(MHA_ERROR_VALUE, "sinks");
    test_release(&fixture);
  }
}

static void layer_scales_that_are_not_finite(void **state) {
  const float bad[] = {NAN, INFINITY, -INFINITY};
  (void)state;
  for (size_t i = 0; i < COUNT(bad); i++) {
    build(CREATE);
    fixture.config.flags = MHA_SCALE;
    fixture.config.scale = bad[i];
    expect_create_fails(MHA_ERROR_VALUE, "scale");
    test_release(&fixture);
  }
}

static void widths_that_the_heads_do_not_divide(void **state) {
  (void)state;
  build(CREATE);
  fixture.config.head_size = 0;
  fixture.config.query_width = 10;
  expect_create_fails(MHA_ERROR_HEADS, "config.query_width");
  test_release(&fixture);
  build(CREATE);
  fixture.config.head_size = 0;
  fixture.config.query_width = 0;
  expect_create_fails(MHA_ERROR_SIZE, "head_size");
  test_release(&fixture);
}

static void sizes_and_strides_of_a_layer_call(void **state) {
  const row rows[] = {
      ARGS(LAYER, batch, -1, MHA_ERROR_SIZE, "batch"),
      ARGS(LAYER, batch, INT64_MIN, MHA_ERROR_SIZE, "batch"),
      ARGS(LAYER, batch, INT64_MAX, MHA_ERROR_OVERFLOW, "query"),
      ARGS(LAYER, query_length, -1, MHA_ERROR_SIZE, "query_length"),
      ARGS(LAYER, query_length, INT64_MAX, MHA_ERROR_OVERFLOW, "query"),
      ARGS(LAYER, query_length, INT64_MAX / 12, MHA_ERROR_OVERFLOW, "query"),
      ARGS(LAYER, query_length, INT64_MAX / 48, MHA_ERROR_OVERFLOW, "query"),
      ARGS(LAYER, key_length, -1, MHA_ERROR_SIZE, "key_length"),
      ARGS(LAYER, key_length, INT64_MAX, MHA_ERROR_OVERFLOW, "key"),
      ARGS(LAYER, query_row_stride, E - 1, MHA_ERROR_STRIDE, "query"),
      ARGS(LAYER, query_row_stride, -E, MHA_ERROR_STRIDE, "query"),
      ARGS(LAYER, query_row_stride, over_int, MHA_ERROR_OVERFLOW, "query"),
      ARGS(LAYER, query_batch_stride, -1, MHA_ERROR_STRIDE, "query"),
      ARGS(LAYER, query_batch_stride, INT64_MAX, MHA_ERROR_OVERFLOW, "query"),
      ARGS(LAYER, key_row_stride, 1, MHA_ERROR_STRIDE, "key"),
      ARGS(LAYER, key_batch_stride, -100, MHA_ERROR_STRIDE, "key"),
      ARGS(LAYER, value_row_stride, 1, MHA_ERROR_STRIDE, "value"),
      ARGS(LAYER, value_batch_stride, INT64_MIN, MHA_ERROR_STRIDE, "value"),
      ARGS(LAYER, output_row_stride, E - 1, MHA_ERROR_STRIDE, "output"),
      ARGS(LAYER, output_row_stride, -E, MHA_ERROR_STRIDE, "output"),
      ARGS(LAYER, output_row_stride, over_int, MHA_ERROR_OVERFLOW, "output"),
      ARGS(LAYER, output_batch_stride, -1, MHA_ERROR_STRIDE, "output"),
      ARGS(LAYER, output_batch_stride, 1, MHA_ERROR_OVERLAP, "output"),
      ARGS(LAYER, output_batch_stride, LQ * E - 1, MHA_ERROR_OVERLAP, "output"),
      ARGS(LAYER, output_batch_stride, E, MHA_ERROR_OVERLAP, "output"),
      ARGS(SELF, key_length, LQ + 1, MHA_ERROR_SIZE, "key_length"),
      ARGS(SELF, key_length, LQ - 1, MHA_ERROR_SIZE, "key_length"),
      NO_ARG(LAYER, query, "query"),
      NO_ARG(SELF, query, "query"),
      NO_ARG(LAYER, key, "key"), /* a value without a key */
      NO_ARG(LAYER, output, "output"),
      NO_ARG(LAYER_RULES, query, "query"),
      NO_ARG(LAYER_PACKED, query, "query"),
      MEMBER(LAYER, args, mha_forward_args, cache_mode, INT32, 1, 0.0F, MHA_ERROR_NULL, "cache"),
      MEMBER(LAYER, args, mha_forward_args, cache_mode, INT32, 3, 0.0F, MHA_ERROR_VALUE,
             "cache_mode"),
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    try_row(&rows[i], i);
}

/* The same rules, through the layer and through the core. */
static void rules_that_are_wrong(void **state) {
  (void)state;
  for (int core = 0; core < 2; core++) {
    const baseline all = core ? CORE_RULES : LAYER_RULES;
    const row rows[] = {
        RULE(all, flags, UINT32, 8, MHA_ERROR_VALUE, "flags"),
        RULE(all, flags, UINT32, -1, MHA_ERROR_VALUE, "flags"),
        RULE(all, alignment, INT32, -1, MHA_ERROR_VALUE, "alignment"),
        RULE(all, alignment, INT32, 3, MHA_ERROR_VALUE, "alignment"),
        RULE(all, reserved, INT32, 1, MHA_ERROR_VALUE, "reserved"),
        RULE(all, attend.element, INT32, 1, MHA_ERROR_UNSUPPORTED, "attend.element"),
        RULE(all, bias.element, INT32, 1, MHA_ERROR_UNSUPPORTED, "bias.element"),
        RULE(all, bias.element, INT32, -1, MHA_ERROR_UNSUPPORTED, "bias.element"),
        RULE(all, attend.reserved, INT32, 1, MHA_ERROR_VALUE, "attend.reserved"),
        RULE(all, bias.reserved, INT32, 1, MHA_ERROR_VALUE, "bias.reserved"),
        RESULT(all, stage, -1),
        RESULT(all, stage, 4),
        RESULT(all, reserved, 1),
        RULE(all, window_left, INT64, -2, MHA_ERROR_VALUE, "window_left"),
        RULE(all, window_left, INT64, INT64_MIN, MHA_ERROR_VALUE, "window_left"),
        RULE(all, window_right, INT64, -2, MHA_ERROR_VALUE, "window_left and window_right"),
        RULE(all, query_lengths, ELEMENT, -1, MHA_ERROR_LENGTH, "query_lengths"),
        RULE(all, query_lengths, ELEMENT, LQ + 1, MHA_ERROR_LENGTH, "query_lengths"),
        RULE(all, query_lengths, ELEMENT, INT64_MAX, MHA_ERROR_LENGTH, "query_lengths"),
        RULE(all, key_lengths, ELEMENT, -1, MHA_ERROR_LENGTH, "key_lengths"),
        RULE(all, key_lengths, ELEMENT, LK + 1, MHA_ERROR_LENGTH, "key_lengths"),
        RULE(all, key_lengths, ELEMENT, INT64_MIN, MHA_ERROR_LENGTH, "key_lengths"),
        RULE(all, attend.batch, INT64, 0, MHA_ERROR_SIZE, "attend.batch"),
        RULE(all, attend.batch, INT64, B + 1, MHA_ERROR_SIZE, "attend.batch"),
        RULE(all, attend.heads, INT64, G, MHA_ERROR_SIZE, "attend.heads"),
        RULE(all, attend.heads, INT64, -1, MHA_ERROR_SIZE, "attend.heads"),
        RULE(all, attend.rows, INT64, LQ - 1, MHA_ERROR_SIZE, "attend.rows"),
        RULE(all, attend.columns, INT64, LK - 1, MHA_ERROR_SIZE, "attend.columns"),
        RULE(all, attend.columns, INT64, 1, MHA_ERROR_SIZE, "attend.columns"),
        RULE(all, attend.row_stride, INT64, -1, MHA_ERROR_STRIDE, "attend"),
        RULE(all, attend.head_stride, INT64, -5, MHA_ERROR_STRIDE, "attend"),
        RULE(all, attend.batch_stride, INT64, INT64_MIN, MHA_ERROR_STRIDE, "attend"),
        RULE(all, attend.batch_stride, INT64, INT64_MAX, MHA_ERROR_OVERFLOW, "attend"),
        RULE(all, attend.row_stride, INT64, INT64_MAX, MHA_ERROR_OVERFLOW, "attend"),
        RULE(all, bias.batch, INT64, 3, MHA_ERROR_SIZE, "bias.batch"),
        RULE(all, bias.heads, INT64, 3, MHA_ERROR_SIZE, "bias.heads"),
        RULE(all, bias.rows, INT64, 2, MHA_ERROR_SIZE, "bias.rows"),
        RULE(all, bias.columns, INT64, LK + 1, MHA_ERROR_SIZE, "bias.columns"),
        RULE(all, bias.columns, INT64, 0, MHA_ERROR_SIZE, "bias.columns"),
        RULE(all, bias.row_stride, INT64, -LK, MHA_ERROR_STRIDE, "bias"),
        RULE(all, bias.head_stride, INT64, INT64_MAX, MHA_ERROR_OVERFLOW, "bias"),
        RULE(all, bias.batch_stride, INT64, INT64_MAX / 2, MHA_ERROR_OVERFLOW, "bias"),
    };
    for (size_t i = 0; i < COUNT(rows); i++)
      try_row(&rows[i], i);
  }
}

static void numbers_that_are_wrong(void **state) {
  const row rows[] = {
      SCORE(scale, NAN, "scale"),          SCORE(scale, INFINITY, "scale"),
      SCORE(scale, -INFINITY, "scale"),    SCORE(softcap, NAN, "softcap"),
      SCORE(softcap, INFINITY, "softcap"), SCORE(softcap, -0.5F, "softcap"),
  };
  const float bad[] = {NAN, INFINITY, -INFINITY};
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    try_row(&rows[i], i);
  for (int core = 0; core < 2; core++)
    for (size_t i = 0; i < COUNT(bad); i++) {
      build(core ? CORE_RULES : LAYER_RULES);
      fixture.slopes[H - 1] = bad[i];
      expect_call_fails(MHA_ERROR_VALUE, "alibi_slopes");
      test_release(&fixture);
      build(core ? CORE_RULES : LAYER_RULES);
      fixture.sinks[H - 1] = bad[i];
      if (i < 2) /* −inf is no sink */
        expect_call_fails(MHA_ERROR_VALUE, "sinks");
      test_release(&fixture);
    }
}

static void packed_offsets_that_are_wrong(void **state) {
  const int64_t queries[][3] = {{1, 2, 3}, {-1, 2, 3}, {0, 2, 1},
                                {0, 2, 4}, {0, -1, 3}, {0, INT64_MAX, 3}};
  const int64_t keys[][3] = {{1, 2, 5}, {-1, 2, 5},        {0, 5, 4},
                             {0, 2, 6}, {0, INT64_MIN, 5}, {0, 6, 5}};
  (void)state;
  for (int core = 0; core < 2; core++) {
    const baseline packed = core ? CORE_PACKED : LAYER_PACKED;
    for (size_t i = 0; i < COUNT(queries); i++) {
      build(packed);
      fixture.rules.query_starts = queries[i];
      expect_call_fails(MHA_ERROR_LENGTH, "query_starts");
      fixture.rules.query_starts = fixture.query_starts;
      fixture.rules.key_starts = keys[i];
      expect_call_fails(MHA_ERROR_LENGTH, "key_starts");
      test_release(&fixture);
    }
    build(packed);
    fixture.rules.key_starts = NULL; /* although there is a key */
    expect_call_fails(MHA_ERROR_NULL, "key_starts");
    fixture.rules.key_starts = fixture.key_starts;
    fixture.rules.query_starts = NULL;
    if (!core)
      expect_call_fails(MHA_ERROR_NULL, "query_starts");
    test_release(&fixture);
  }
}

static void what_packed_input_excludes(void **state) {
  static const int64_t lengths[B] = {1, 1};
  static const float floats[B * H * LQ * LK] = {0};
  static const uint8_t bytes[LK] = {1, 1, 1, 1, 1};
  static float results[B * H * LQ * LK];
  (void)state;
  for (int core = 0; core < 2; core++)
    for (int which = 0; which < 6; which++) {
      const char *const words[] = {"query_lengths", "key_lengths", "attend",
                                   "bias",          "weights",     "average"};
      build(core ? CORE_PACKED : LAYER_PACKED);
      mha_rules *a = &fixture.rules;
      a->query_lengths = which == 0 ? lengths : NULL;
      a->key_lengths = which == 1 ? lengths : NULL;
      if (which == 2)
        a->attend = (mha_mask){bytes, 1, 1, 1, LK, 0, 0, 0, 0, 0};
      if (which == 3)
        a->bias = (mha_bias){floats, 1, 1, 1, LK, 0, 0, 0, 0, 0};
      fixture.results.weights = which == 4 ? results : NULL;
      fixture.results.average = which == 5 ? results : NULL;
      expect_call_fails(MHA_ERROR_UNSUPPORTED, words[which]);
      test_release(&fixture);
    }
}

static void tensors_that_do_not_fit(void **state) {
  const row rows[] = {
      TENSOR(q, batch, -1, MHA_ERROR_SIZE),
      TENSOR(q, length, -1, MHA_ERROR_SIZE),
      TENSOR(q, heads, 0, MHA_ERROR_SIZE),
      TENSOR(q, heads, -1, MHA_ERROR_SIZE),
      TENSOR(q, heads, 3, MHA_ERROR_HEADS),
      TENSOR(q, size, 0, MHA_ERROR_SIZE),
      TENSOR(q, size, D + 1, MHA_ERROR_SIZE),
      MEMBER(CORE, q, mha_tensor, batch, INT64, B + 1, 0.0F, MHA_ERROR_SIZE, "batch"),
      TENSOR(q, batch, INT64_MAX, MHA_ERROR_OVERFLOW),
      TENSOR(q, length, INT64_MAX / 4, MHA_ERROR_OVERFLOW),
      TENSOR(q, data, 0, MHA_ERROR_NULL),
      TENSOR(k, data, 0, MHA_ERROR_NULL),
      TENSOR(k, batch, 1, MHA_ERROR_SIZE),
      TENSOR(k, heads, 3, MHA_ERROR_SIZE), /* and 2 in v */
      TENSOR(k, length, LK - 1, MHA_ERROR_SIZE),
      TENSOR(k, size, D - 1, MHA_ERROR_SIZE),
      TENSOR(v, data, 0, MHA_ERROR_NULL),
      TENSOR(v, batch, 1, MHA_ERROR_SIZE),
      TENSOR(v, heads, 1, MHA_ERROR_SIZE),
      TENSOR(v, length, LK + 1, MHA_ERROR_SIZE),
      TENSOR(v, size, 0, MHA_ERROR_SIZE),
      TENSOR(v, size, INT64_MAX, MHA_ERROR_OVERFLOW),
      TENSOR(q, size_stride, 2, MHA_ERROR_STRIDE),
      TENSOR(k, size_stride, -1, MHA_ERROR_STRIDE),
      TENSOR(q, row_stride, 5, MHA_ERROR_STRIDE), /* the others 0: size_stride must be 1 */
      ATTEND(CORE, n_sequences, 1, MHA_ERROR_SIZE, "n_sequences"),
      ATTEND(CORE, n_sequences, -1, MHA_ERROR_SIZE, "n_sequences"),
      ATTEND(CORE_PACKED, n_sequences, -1, MHA_ERROR_SIZE, "n_sequences"),
      MEMBER(CORE, attend_args, mha_attend_args, output, NO_POINTER, 0, 0.0F, MHA_ERROR_NULL,
             "output"),
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    try_row(&rows[i], i);
}

static void strides_that_no_product_can_take(void **state) {
  /* batch, row, head, size stride of q, whose dense ones are 36, 12, 3, 1 */
  const struct {
    int64_t strides[4];
    mha_status status;
  } rows[] = {
      {{36, 12, 3, 0}, MHA_ERROR_STRIDE},
      {{36, 12, 3, 2}, MHA_ERROR_STRIDE},
      {{36, -12, 3, 1}, MHA_ERROR_STRIDE},
      {{-36, 12, 3, 1}, MHA_ERROR_STRIDE},
      {{36, 12, -3, 1}, MHA_ERROR_STRIDE},
      {{36, 2, 12, 1}, MHA_ERROR_STRIDE},
      {{36, 0, 3, 1}, MHA_ERROR_STRIDE},
      {{36, INT64_C(1) << 31, 3, 1}, MHA_ERROR_OVERFLOW},
      {{INT64_MAX, 12, 3, 1}, MHA_ERROR_OVERFLOW},
  };
  const int64_t outputs[][3] = {{24, 8, 1}, {24, 2, 2}, {8, 8, 2}, {0, 8, 2},
                                {24, 0, 2}, {24, 8, 0}, {23, 8, 2}};
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    build(CORE);
    test_note("strides %zu of q", i);
    fixture.q.batch_stride = rows[i].strides[0];
    fixture.q.row_stride = rows[i].strides[1];
    fixture.q.head_stride = rows[i].strides[2];
    fixture.q.size_stride = rows[i].strides[3];
    expect_call_fails(rows[i].status, "q");
    test_release(&fixture);
  }
  for (size_t i = 0; i < COUNT(outputs); i++) {
    build(CORE);
    test_note("strides %zu of the output", i);
    fixture.attend_args.output_batch_stride = outputs[i][0];
    fixture.attend_args.output_row_stride = outputs[i][1];
    fixture.attend_args.output_head_stride = outputs[i][2];
    /* rows closer than a head's size cannot be a leading dimension; the rest shares addresses */
    expect_call_fails(outputs[i][1] < DV ? MHA_ERROR_STRIDE : MHA_ERROR_OVERLAP, "output");
    test_release(&fixture);
  }
}

/* ---- Pointers to structs --------------------------------------------------------------------- */

static void structs_that_are_null(void **state) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_config config;
  mha_shape shape;
  mha_error error;
  size_t bytes = 0;
  (void)state;
  build(LAYER);
  MHA_INIT(&config);
  MHA_INIT(&shape);
  shape.batch = shape.query_length = 1;
  expect_error(mha_weights_create(NULL, &fixture.matrices, &weights, &error), MHA_ERROR_NULL,
               &error, "config");
  expect_error(mha_weights_create(&fixture.config, NULL, &weights, &error), MHA_ERROR_NULL, &error,
               "matrices");
  expect_error(mha_weights_create(&fixture.config, &fixture.matrices, NULL, &error), MHA_ERROR_NULL,
               &error, "weights");
  expect_error(mha_context_create(NULL, NULL, &error), MHA_ERROR_NULL, &error, "context");
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK, NULL);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  expect_error(mha_weights_config(NULL, &config, &error), MHA_ERROR_NULL, &error, "weights");
  expect_error(mha_weights_config(weights, NULL, &error), MHA_ERROR_NULL, &error, "config");
  expect_error(mha_workspace_bytes(NULL, weights, &shape, &bytes, &error), MHA_ERROR_NULL, &error,
               "context");
  expect_error(mha_workspace_bytes(context, weights, NULL, &bytes, &error), MHA_ERROR_NULL, &error,
               "shape");
  expect_error(mha_workspace_bytes(context, weights, &shape, NULL, &error), MHA_ERROR_NULL, &error,
               "bytes");
  expect_error(mha_context_reserve(NULL, weights, &shape, &error), MHA_ERROR_NULL, &error,
               "context");
  expect_error(mha_context_reserve(context, weights, NULL, &error), MHA_ERROR_NULL, &error,
               "shape");
  expect_error(mha_context_trace(NULL, NULL, NULL, &error), MHA_ERROR_NULL, &error, "context");
  expect_error(mha_forward(NULL, weights, &fixture.args, &error), MHA_ERROR_NULL, &error,
               "context");
  expect_error(mha_forward(context, NULL, &fixture.args, &error), MHA_ERROR_NULL, &error,
               "weights");
  expect_error(mha_forward(context, weights, NULL, &error), MHA_ERROR_NULL, &error, "args");
  expect_untouched();
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

static void tensors_that_are_null(void **state) {
  mha_context *context = NULL;
  mha_error error;
  const test_fixture *f = &fixture;
  (void)state;
  build(CORE);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  expect_error(mha_attend(NULL, &f->q, &f->k, &f->v, &f->attend_args, &error), MHA_ERROR_NULL,
               &error, "context");
  expect_error(mha_attend(context, NULL, &f->k, &f->v, &f->attend_args, &error), MHA_ERROR_NULL,
               &error, "q");
  expect_error(mha_attend(context, &f->q, NULL, &f->v, &f->attend_args, &error), MHA_ERROR_NULL,
               &error, "k");
  expect_error(mha_attend(context, &f->q, &f->k, NULL, &f->attend_args, &error), MHA_ERROR_NULL,
               &error, "v");
  expect_error(mha_attend(context, &f->q, &f->k, &f->v, NULL, &error), MHA_ERROR_NULL, &error,
               "args");
  expect_untouched();
  mha_context_destroy(context);
  test_release(&fixture);
}

static void self_attention_checks_too(void **state) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  (void)state;
  build(SELF);
  float *x = fixture.query.data, *y = fixture.output.data;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK, NULL);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  expect_error(mha_self_attention(NULL, weights, x, B, LQ, y, &error), MHA_ERROR_NULL, &error,
               "context");
  expect_error(mha_self_attention(context, NULL, x, B, LQ, y, &error), MHA_ERROR_NULL, &error,
               "weights");
  expect_error(mha_self_attention(context, weights, NULL, B, LQ, y, &error), MHA_ERROR_NULL, &error,
               "x is NULL");
  expect_error(mha_self_attention(context, weights, x, B, LQ, NULL, &error), MHA_ERROR_NULL, &error,
               "output");
  expect_error(mha_self_attention(context, weights, x, -1, LQ, y, &error), MHA_ERROR_SIZE, &error,
               "batch is");
  expect_error(mha_self_attention(context, weights, x, B, -1, y, &error), MHA_ERROR_SIZE, &error,
               "length");
  expect_error(mha_self_attention(context, weights, x, B, INT64_MAX, y, &error), MHA_ERROR_OVERFLOW,
               &error, "x has");
  expect_error(mha_self_attention(context, weights, x, B, LQ, x, &error), MHA_ERROR_OVERLAP, &error,
               "output overlaps x;");
  expect_untouched();
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* Ek ≠ Eq: the query cannot serve as a key. */
static void a_key_is_needed_where_widths_differ(void **state) {
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 2, .Lk = 2, .H = 2, .d = 2, .Ek = 5});
  fixture.args.key = fixture.args.value = NULL;
  expect_call_fails(MHA_ERROR_NULL, "key");
  test_release(&fixture);
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 2, .Lk = 2, .H = 2, .d = 2, .Ev = 5});
  fixture.args.value = NULL;
  expect_call_fails(MHA_ERROR_NULL, "value");
  test_release(&fixture);
}

static void options_that_are_wrong(void **state) {
  const struct {
    uint32_t flags;
    int32_t threads;
    const char *word;
  } rows[] = {{2, 0, "flags"},
              {UINT32_MAX, 0, "flags"},
              {0, -1, "n_threads"},
              {0, 1025, "n_threads"},
              {0, INT32_MIN, "n_threads"}};
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    int anything = 0;
    mha_context *context = (mha_context *)(void *)&anything;
    mha_context_options options;
    mha_error error;
    MHA_INIT(&options);
    options.flags = rows[i].flags;
    options.n_threads = rows[i].threads;
    expect_error(mha_context_create(&options, &context, &error), MHA_ERROR_VALUE, &error,
                 rows[i].word);
    assert_null(context);
  }
}

static void shapes_that_are_wrong(void **state) {
  const struct {
    int64_t batch, query_length, key_length, n_heads, value_head_size;
    mha_status status;
    const char *word;
  } rows[] = {{-1, 1, 1, 1, 1, MHA_ERROR_SIZE, "batch"},
              {1, -1, 1, 1, 1, MHA_ERROR_SIZE, "query_length"},
              {1, 1, -1, 1, 1, MHA_ERROR_SIZE, "key_length"},
              {1, 1, 1, 0, 1, MHA_ERROR_SIZE, "n_heads"},
              {1, 1, 1, 1, 0, MHA_ERROR_SIZE, "value_head_size"},
              {1, 1, 1, 1, -1, MHA_ERROR_SIZE, "value_head_size"}};
  mha_context *context = NULL;
  (void)state;
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  for (size_t i = 0; i < COUNT(rows); i++) {
    mha_shape shape;
    mha_error error;
    size_t bytes = 77;
    MHA_INIT(&shape);
    shape.batch = rows[i].batch;
    shape.query_length = rows[i].query_length;
    shape.key_length = rows[i].key_length;
    shape.n_heads = rows[i].n_heads;
    shape.value_head_size = rows[i].value_head_size;
    test_note("shape %zu", i);
    expect_error(mha_workspace_bytes(context, NULL, &shape, &bytes, &error), rows[i].status, &error,
                 rows[i].word);
    assert_int_equal(bytes, 77);
    expect_error(mha_context_reserve(context, NULL, &shape, &error), rows[i].status, &error,
                 rows[i].word);
  }
  mha_context_destroy(context);
}

/* ---- Sizes of structs ------------------------------------------------------------------------ */

/* The structs that begin with their size, each with a call that reads it. */
typedef enum sized {
  CONFIG_,
  MATRICES_,
  OPTIONS_,
  SHAPE_,
  RULES_,
  RESULTS_,
  ARGS_,
  ATTEND_,
  CACHE_,
  GOT_,
  MERGE_
} sized;

static const size_t known_bytes[] = {
    sizeof(mha_config),       sizeof(mha_matrices),    sizeof(mha_context_options),
    sizeof(mha_shape),        sizeof(mha_rules),       sizeof(mha_results),
    sizeof(mha_forward_args), sizeof(mha_attend_args), sizeof(mha_cache_options),
    sizeof(mha_config),       sizeof(mha_merge_args)};
static const char *const sized_names[] = {"config",  "matrices", "options", "shape",
                                          "rules",   "results",  "args",    "args",
                                          "options", "config",   "args"};

/* A call with `structure` in the place of the one that is right. */
static mha_status call_with(sized which, void *structure, mha_error *error) {
  mha_weights *weights = NULL, *created = NULL;
  mha_context *context = NULL, *other = NULL;
  mha_cache *cache = NULL;
  mha_status status = MHA_OK;
  size_t bytes = 0;
  test_fixture *f = &fixture;
  test_expect(mha_weights_create(&f->config, &f->matrices, &weights, NULL), MHA_OK, NULL);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  switch (which) {
  case CONFIG_:
    status = mha_weights_create(structure, &f->matrices, &created, error);
    break;
  case MATRICES_:
    status = mha_weights_create(&f->config, structure, &created, error);
    break;
  case OPTIONS_:
    status = mha_context_create(structure, &other, error);
    break;
  case SHAPE_:
    status = mha_workspace_bytes(context, weights, structure, &bytes, error);
    break;
  case RULES_:
    f->args.rules = structure;
    status = mha_forward(context, weights, &f->args, error);
    f->args.rules = &f->rules;
    break;
  case RESULTS_:
    f->args.results = structure;
    status = mha_forward(context, weights, &f->args, error);
    f->args.results = &f->results;
    break;
  case ARGS_:
    status = mha_forward(context, weights, structure, error);
    break;
  case ATTEND_:
    status = mha_attend(context, &f->q, &f->k, &f->v, structure, error);
    break;
  case CACHE_:
    status = mha_cache_create(structure, &cache, error);
    break;
  case GOT_:
    status = mha_weights_config(weights, structure, error);
    break;
  case MERGE_:
    status = mha_merge(structure, error);
    break;
  }
  mha_cache_destroy(cache);
  mha_context_destroy(other);
  mha_context_destroy(context);
  mha_weights_destroy(created);
  mha_weights_destroy(weights);
  return status;
}

static const void *right_struct(sized which) {
  static mha_shape shape;
  static mha_config got;
  MHA_INIT(&shape);
  shape.batch = shape.query_length = 1;
  MHA_INIT(&got);
  static mha_cache_options cache;
  MHA_INIT(&cache);
  cache.n_entries = cache.capacity = cache.n_kv_heads = cache.head_size = 1;
  static const float part[1], zero[1];
  static float merged[1];
  static const float *const lses[] = {zero};
  static const mha_tensor parts[] = {{part, 1, 1, 1, 1, 0, 0, 0, 0, MHA_F32, 0}};
  static mha_merge_args merge;
  MHA_INIT(&merge);
  merge.n_parts = 1;
  merge.outputs = parts;
  merge.log_sum_exps = lses;
  merge.output = merged;
  const void *all[] = {&fixture.config,
                       &fixture.matrices,
                       &fixture.options,
                       &shape,
                       &fixture.rules,
                       &fixture.results,
                       &fixture.args,
                       &fixture.attend_args,
                       &cache,
                       &got,
                       &merge};
  return all[which];
}

static void every_size_of_every_struct(void **state) {
  enum { TAIL = 40 };
  (void)state;
  for (int which = CONFIG_; which <= MERGE_; which++) {
    mha_error error;
    const size_t known = known_bytes[which];
    build(which == ATTEND_ ? CORE : LAYER);
    char *structure = test_pool_bytes(&fixture.pool, (known + TAIL + 7) / 8 * 8);
    memset(structure, 0, known + TAIL);
    memcpy(structure, right_struct((sized)which), known);
    for (size_t bytes = 0; bytes < known; bytes++) {
      memcpy(structure, &bytes, sizeof bytes);
      test_note("%s of %zu bytes", sized_names[which], bytes);
      fill_with_garbage(&error);
      expect_error(call_with((sized)which, structure, &error), MHA_ERROR_STRUCT_SIZE, &error,
                   sized_names[which]);
      expect_untouched();
    }
    for (size_t bytes = known + 1; bytes <= known + TAIL; bytes++) {
      memcpy(structure, &bytes, sizeof bytes);
      test_note("%s of %zu bytes", sized_names[which], bytes);
      structure[bytes - 1] = 1; /* something this version does not know */
      expect_error(call_with((sized)which, structure, &error), MHA_ERROR_STRUCT_SIZE, &error,
                   sized_names[which]);
      expect_untouched();
      structure[bytes - 1] = 0;
    }
    for (size_t bytes = known; bytes <= known + TAIL; bytes += TAIL) {
      memcpy(structure, &bytes, sizeof bytes);
      test_note("%s of %zu bytes", sized_names[which], bytes);
      test_expect(call_with((sized)which, structure, &error), MHA_OK, &error);
    }
    test_release(&fixture);
  }
}

/* Structs that nobody prepared, each where readable memory ends. */
static void garbage_in_every_struct(void **state) {
  const size_t sizes[] = {MHA_MAX_STRUCT_BYTES + 1, (size_t)0xabababab, SIZE_MAX};
  (void)state;
  for (int which = CONFIG_; which <= MERGE_; which++)
    for (size_t i = 0; i < COUNT(sizes); i++) {
      mha_error error;
      const size_t known = known_bytes[which];
      build(which == ATTEND_ ? CORE : LAYER);
      char *structure = test_pool_bytes(&fixture.pool, known);
      memcpy(structure, right_struct((sized)which), known);
      memcpy(structure, &sizes[i], sizeof sizes[i]);
      test_note("%s of %zu bytes", sized_names[which], sizes[i]);
      fill_with_garbage(&error);
      expect_error(call_with((sized)which, structure, &error), MHA_ERROR_STRUCT_SIZE, &error,
                   "MHA_INIT");
      expect_untouched();
      test_release(&fixture);
    }
}

/* MHA_INIT zeroes all and stores the size. */
static void structs_are_prepared(void **state) {
  mha_rules rules;
  mha_config config;
  (void)state;
  memset(&rules, 0xff, sizeof rules);
  MHA_INIT(&rules);
  assert_int_equal(rules.struct_size, sizeof rules);
  for (size_t i = sizeof rules.struct_size; i < sizeof rules; i++)
    assert_int_equal(((unsigned char *)&rules)[i], 0);
  memset(&config, 0xff, sizeof config);
  mha_config_init(&config, 12, 3);
  assert_int_equal(config.struct_size, sizeof config);
  assert_int_equal(config.query_width, 12);
  assert_int_equal(config.n_heads, 3);
  assert_int_equal(config.head_size, 0);
  assert_int_equal(config.flags, 0);
  assert_null(config.allocator);
}

/* ---- Overlaps -------------------------------------------------------------------------------- */

typedef struct region {
  const char *name;
  void *data;
  size_t bytes;
} region;

static size_t matrix_bytes(const test_matrix *m) {
  return (size_t)(m->in * m->out) * sizeof(float);
}

/* Everything that a call reads. */
static size_t list_inputs(region *r) {
  const test_fixture *f = &fixture;
  const size_t entries = B * sizeof(int64_t);
  const region all[] = {{"query", f->query.data, (size_t)f->query.floats * sizeof(float)},
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
  return COUNT(all);
}

/* The four results, and how to make one lie elsewhere. */
static size_t list_outputs(region *r) {
  const test_fixture *f = &fixture;
  const region all[] = {{"output", f->output.data, (size_t)f->output.floats * sizeof(float)},
                        {"weights", f->weights, (size_t)f->weights_n * sizeof(float)},
                        {"average", f->average, (size_t)f->average_n * sizeof(float)},
                        {"log_sum_exp", f->lse, (size_t)f->lse_n * sizeof(float)}};
  memcpy(r, all, sizeof all);
  return COUNT(all);
}

static void move_output(size_t which, float *to) {
  switch (which) {
  case 0:
    fixture.args.output = fixture.attend_args.output = to;
    break;
  case 1:
    fixture.results.weights = to;
    break;
  case 2:
    fixture.results.average = to;
    break;
  default:
    fixture.results.log_sum_exp = to;
  }
}

/* An output that begins in the input's last element, or ends in its first one. */
static void expect_overlap(size_t which, const region *output, const region *other) {
  char *begin = other->data;
  const size_t last = (other->bytes - 1) / sizeof(float) * sizeof(float);
  char *places[] = {begin + last, begin + sizeof(float) - output->bytes};
  for (size_t i = 0; i < COUNT(places); i++) {
    test_note("%s laid over %s, place %zu", output->name, other->name, i);
    move_output(which, (float *)(void *)places[i]);
    expect_call_fails(MHA_ERROR_OVERLAP, output->name);
  }
  move_output(which, output->data);
}

static void outputs_overlap_nothing(void **state) {
  const baseline all[] = {LAYER_RULES, CORE_RULES, LAYER_PACKED, CORE_PACKED};
  (void)state;
  for (size_t base = 0; base < COUNT(all); base++) {
    region inputs[32], outputs[4];
    build(all[base]);
    const size_t n_inputs = list_inputs(inputs), n_outputs = list_outputs(outputs);
    for (size_t o = 0; o < n_outputs; o++) {
      for (size_t i = 0; outputs[o].data && i < n_inputs; i++)
        if (inputs[i].data && (inputs[i].data != fixture.offsets || fixture.rules.offsets))
          expect_overlap(o, &outputs[o], &inputs[i]);
      for (size_t p = 0; outputs[o].data && p < n_outputs; p++)
        if (p != o && outputs[p].data)
          expect_overlap(o, &outputs[o], &outputs[p]);
    }
    test_release(&fixture);
  }
}

/* The layer's own sinks are weights of it, whether the call uses them or brings others. */
static void outputs_overlap_no_sinks_of_the_layer(void **state) {
  (void)state;
  for (int others = 0; others < 2; others++) {
    float sinks[H] = {0}, own[H] = {1.0F};
    build(LAYER_RULES);
    region outputs[4];
    const size_t n_outputs = list_outputs(outputs);
    const region layers = {"the layer's sinks", sinks, sizeof sinks};
    fixture.matrices.sinks = sinks;
    fixture.rules.sinks = others ? own : NULL;
    for (size_t o = 0; o < n_outputs; o++)
      expect_overlap(o, &outputs[o], &layers);
    test_release(&fixture);
  }
}

/* Neighbours that touch are no overlap: output right behind the input, and right before it. */
static void neighbours_may_touch(void **state) {
  enum { N = B * LQ * E };
  (void)state;
  for (int before = 0; before < 2; before++) {
    oracle_result result;
    build(SELF);
    test_ask_oracle(&fixture, &result);
    float *block = test_pool_floats(&fixture.pool, 2 * N);
    float *x = block + (before ? N : 0);
    memcpy(x, fixture.query.data, N * sizeof *x);
    fixture.args.query = x;
    fixture.output.data = fixture.args.output = block + (before ? 0 : N);
    test_run(&fixture);
    test_judge(&fixture, &result);
    oracle_free(&result);
    test_release(&fixture);
  }
}

/* After all kinds of errors a context serves the next call. */
static void a_context_survives_errors(void **state) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  oracle_result result;
  (void)state;
  build(LAYER_RULES);
  test_ask_oracle(&fixture, &result);
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK, NULL);
  test_expect(mha_context_create(&fixture.options, &context, NULL), MHA_OK, NULL);
  for (int round = 0; round < 3; round++) {
    fixture.args.query_row_stride = 1;
    test_expect(test_call(&fixture, context, weights, &error), MHA_ERROR_STRIDE, &error);
    fixture.args.query_row_stride = 0;
    fixture.key_lengths[0] += 100;
    test_expect(test_call(&fixture, context, weights, &error), MHA_ERROR_LENGTH, &error);
    fixture.key_lengths[0] -= 100;
    test_poison_results(&fixture);
    fill_with_garbage(&error);
    test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
    test_judge(&fixture, &result);
  }
  oracle_free(&result);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(layers_that_do_not_fit),
      cmocka_unit_test(norms_and_positions_that_are_wrong),
      cmocka_unit_test(layer_sinks_that_are_wrong),
      cmocka_unit_test(layer_scales_that_are_not_finite),
      cmocka_unit_test(widths_that_the_heads_do_not_divide),
      cmocka_unit_test(sizes_and_strides_of_a_layer_call),
      cmocka_unit_test(rules_that_are_wrong),
      cmocka_unit_test(numbers_that_are_wrong),
      cmocka_unit_test(packed_offsets_that_are_wrong),
      cmocka_unit_test(what_packed_input_excludes),
      cmocka_unit_test(tensors_that_do_not_fit),
      cmocka_unit_test(strides_that_no_product_can_take),
      cmocka_unit_test(structs_that_are_null),
      cmocka_unit_test(tensors_that_are_null),
      cmocka_unit_test(self_attention_checks_too),
      cmocka_unit_test(a_key_is_needed_where_widths_differ),
      cmocka_unit_test(options_that_are_wrong),
      cmocka_unit_test(shapes_that_are_wrong),
      cmocka_unit_test(every_size_of_every_struct),
      cmocka_unit_test(garbage_in_every_struct),
      cmocka_unit_test(structs_are_prepared),
      cmocka_unit_test(outputs_overlap_nothing),
      cmocka_unit_test(outputs_overlap_no_sinks_of_the_layer),
      cmocka_unit_test(neighbours_may_touch),
      cmocka_unit_test(a_context_survives_errors),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
