/* Every wrong argument gives its own status and a message that names it, and writes nothing: each
 * row of the tables spoils one member of a call that is right otherwise. */
#include "baseline.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

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
#define DROPOUT(base, number)                                                                      \
  MEMBER(base, rules, mha_rules, dropout, FLOAT, 0, number, MHA_ERROR_VALUE, "rules.dropout")
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
  baseline_build(r->base);
  if (r->kind == FLOAT && r->member == offsetof(mha_rules, scale))
    fixture.rules.flags |= MHA_SCALE;
  set(r);
  test_note("row %zu: %s becomes %" PRId64 " or %g", index, r->word, r->integer, (double)r->number);
  if (r->base == CREATE)
    baseline_expect_create_fails(r->status, r->word);
  else
    baseline_expect_call_fails(r->status, r->word);
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
    baseline_build(CREATE);
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
    baseline_expect_create_fails(wrong_preparations[i].status, wrong_preparations[i].word);
    test_release(&fixture);
  }
  test_note("%s", "");
}

static void layer_sinks_that_are_wrong(void **state) {
  const float bad[] = {NAN, INFINITY};
  (void)state;
  for (size_t i = 0; i < COUNT(bad); i++) {
    const float sinks[H] = {0.0F, -INFINITY, 1.0F, bad[i]};
    baseline_build(CREATE);
    fixture.matrices.sinks = sinks;
    baseline_expect_create_fails(MHA_ERROR_VALUE, "sinks");
    test_release(&fixture);
  }
}

static void layer_scales_that_are_not_finite(void **state) {
  const float bad[] = {NAN, INFINITY, -INFINITY};
  (void)state;
  for (size_t i = 0; i < COUNT(bad); i++) {
    baseline_build(CREATE);
    fixture.config.flags = MHA_SCALE;
    fixture.config.scale = bad[i];
    baseline_expect_create_fails(MHA_ERROR_VALUE, "scale");
    test_release(&fixture);
  }
}

static void widths_that_the_heads_do_not_divide(void **state) {
  (void)state;
  baseline_build(CREATE);
  fixture.config.head_size = 0;
  fixture.config.query_width = 10;
  baseline_expect_create_fails(MHA_ERROR_HEADS, "config.query_width");
  test_release(&fixture);
  baseline_build(CREATE);
  fixture.config.head_size = 0;
  fixture.config.query_width = 0;
  baseline_expect_create_fails(MHA_ERROR_SIZE, "head_size");
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
        DROPOUT(all, 1.0F),
        DROPOUT(all, -0.5F),
        DROPOUT(all, -1e-45F),
        DROPOUT(all, 2.0F),
        DROPOUT(all, NAN),
        DROPOUT(all, INFINITY),
        DROPOUT(all, -INFINITY),
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
      baseline_build(core ? CORE_RULES : LAYER_RULES);
      fixture.slopes[H - 1] = bad[i];
      baseline_expect_call_fails(MHA_ERROR_VALUE, "alibi_slopes");
      test_release(&fixture);
      baseline_build(core ? CORE_RULES : LAYER_RULES);
      fixture.sinks[H - 1] = bad[i];
      if (i < 2) /* −inf is no sink */
        baseline_expect_call_fails(MHA_ERROR_VALUE, "sinks");
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
      baseline_build(packed);
      fixture.rules.query_starts = queries[i];
      baseline_expect_call_fails(MHA_ERROR_LENGTH, "query_starts");
      fixture.rules.query_starts = fixture.query_starts;
      fixture.rules.key_starts = keys[i];
      baseline_expect_call_fails(MHA_ERROR_LENGTH, "key_starts");
      test_release(&fixture);
    }
    baseline_build(packed);
    fixture.rules.key_starts = NULL; /* although there is a key */
    baseline_expect_call_fails(MHA_ERROR_NULL, "key_starts");
    fixture.rules.key_starts = fixture.key_starts;
    fixture.rules.query_starts = NULL;
    if (!core)
      baseline_expect_call_fails(MHA_ERROR_NULL, "query_starts");
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
      baseline_build(core ? CORE_PACKED : LAYER_PACKED);
      mha_rules *a = &fixture.rules;
      a->query_lengths = which == 0 ? lengths : NULL;
      a->key_lengths = which == 1 ? lengths : NULL;
      if (which == 2)
        a->attend = (mha_mask){bytes, 1, 1, 1, LK, 0, 0, 0, 0, 0};
      if (which == 3)
        a->bias = (mha_bias){floats, 1, 1, 1, LK, 0, 0, 0, 0, 0};
      fixture.results.weights = which == 4 ? results : NULL;
      fixture.results.average = which == 5 ? results : NULL;
      baseline_expect_call_fails(MHA_ERROR_UNSUPPORTED, words[which]);
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
    baseline_build(CORE);
    test_note("strides %zu of q", i);
    fixture.q.batch_stride = rows[i].strides[0];
    fixture.q.row_stride = rows[i].strides[1];
    fixture.q.head_stride = rows[i].strides[2];
    fixture.q.size_stride = rows[i].strides[3];
    baseline_expect_call_fails(rows[i].status, "q");
    test_release(&fixture);
  }
  for (size_t i = 0; i < COUNT(outputs); i++) {
    baseline_build(CORE);
    test_note("strides %zu of the output", i);
    fixture.attend_args.output_batch_stride = outputs[i][0];
    fixture.attend_args.output_row_stride = outputs[i][1];
    fixture.attend_args.output_head_stride = outputs[i][2];
    /* rows closer than a head's size cannot be a leading dimension; the rest shares addresses */
    baseline_expect_call_fails(outputs[i][1] < DV ? MHA_ERROR_STRIDE : MHA_ERROR_OVERLAP, "output");
    test_release(&fixture);
  }
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
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
