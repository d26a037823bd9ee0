/* One attention of several: parts of the keys, each attended to by itself, merged by their
 * log-sum-exps, are the attention over all keys. */
#include "fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { MOST_PARTS = 5 };

static test_fixture f; /* too large for a stack */

/* ---- Parts ----------------------------------------------------------------------------------- */

/* What the parts left, and the call that merges it into the fixture's results. */
typedef struct parts {
  test_pool pool;
  int64_t n;
  int64_t ends[MOST_PARTS]; /* keys of each, behind the last */
  mha_tensor outputs[MOST_PARTS];
  float *lse[MOST_PARTS];
  const float *lses[MOST_PARTS];
  mha_merge_args args;
} parts;

/* The same rules for keys [begin, end) alone. */
static mha_rules rules_of_part(int64_t begin, int64_t end, int64_t *offsets) {
  mha_rules rules = f.rules;
  const test_case *c = &f.c;
  rules.alignment = MHA_ALIGN_OFFSET;
  for (int64_t b = 0; b < c->B; b++) {
    const int64_t own = c->alignment == MHA_ALIGN_BOTTOM_RIGHT ? c->Lk - c->Lq
                        : c->alignment == MHA_ALIGN_OFFSET     ? c->offset
                                                               : 0;
    offsets[b] = own - begin;
  }
  rules.offsets = offsets;
  rules.sinks = NULL;
  if (rules.bias.data) {
    rules.bias.row_stride = c->Lk;
    rules.bias.head_stride = rules.bias.rows * c->Lk;
    rules.bias.batch_stride = rules.bias.heads * rules.bias.head_stride;
    rules.bias.data = (const float *)rules.bias.data + begin;
    rules.bias.columns = end - begin;
  }
  return rules;
}

static void attend_to_part(parts *p, int64_t u, int64_t begin, mha_context *context) {
  const test_case *c = &f.c;
  const int64_t n = p->ends[u] - begin;
  int64_t offsets[4];
  mha_error error;
  mha_attend_args args;
  mha_results results;
  mha_tensor k = f.k, v = f.v;
  const mha_rules rules = rules_of_part(begin, p->ends[u], offsets);
  float *output = test_pool_floats(&p->pool, c->B * c->Lq * c->H * c->dv);
  p->lse[u] = test_pool_floats(&p->pool, c->B * c->H * c->Lq);
  p->lses[u] = p->lse[u];
  k.data = (const float *)k.data + begin * k.row_stride;
  v.data = (const float *)v.data + begin * v.row_stride;
  k.length = v.length = n;
  MHA_INIT(&args);
  MHA_INIT(&results);
  args.flags = MHA_ALLOW_EMPTY;
  args.output = output;
  args.rules = &rules;
  args.results = &results;
  results.log_sum_exp = p->lse[u];
  test_expect(mha_attend(context, &f.q, &k, &v, &args, &error), MHA_OK, &error);
  p->outputs[u] = (mha_tensor){output, c->B, c->Lq, c->H, c->dv, 0, 0, 0, 0, MHA_F32, 0};
}

/* Attends to `n` parts of the fixture's keys, some of which may have none. */
static void make_parts(parts *p, int64_t n) {
  mha_context *context = NULL;
  const test_case *c = &f.c;
  memset(p, 0, sizeof *p);
  p->n = n;
  /* explicit strides, which a part keeps */
  f.k = (mha_tensor){
      f.key.data,        c->B, c->Lk,   c->G, c->d, f.key.batch_stride, f.key.row_stride,
      f.key.head_stride, 1,    MHA_F32, 0};
  f.v = (mha_tensor){
      f.value.data,        c->B, c->Lk,   c->G, c->dv, f.value.batch_stride, f.value.row_stride,
      f.value.head_stride, 1,    MHA_F32, 0};
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  for (int64_t u = 0, begin = 0; u < n; begin = p->ends[u++]) {
    p->ends[u] = u == n - 1 ? c->Lk : test_random_range(&f.random, begin, c->Lk);
    attend_to_part(p, u, begin, context);
  }
  mha_context_destroy(context);
  MHA_INIT(&p->args);
  p->args.n_parts = n;
  p->args.outputs = p->outputs;
  p->args.log_sum_exps = p->lses;
  p->args.sinks = f.sinks;
  p->args.output = f.attend_args.output;
  p->args.output_batch_stride = f.output.batch_stride;
  p->args.output_row_stride = f.output.row_stride;
  p->args.output_head_stride = f.output.head_stride;
  p->args.log_sum_exp = f.lse;
}

static test_case merged_case(uint64_t seed) {
  test_random r;
  test_random_seed(&r, seed);
  const test_case c = {.seed = seed,
                       .core = true,
                       .B = test_random_range(&r, 1, 3),
                       .Lq = test_random_range(&r, 1, 9),
                       .Lk = test_random_range(&r, 1, 40),
                       .H = 2 * test_random_range(&r, 1, 2),
                       .G = test_random_range(&r, 1, 2),
                       .d = test_random_range(&r, 1, 9),
                       .dv = test_random_range(&r, 1, 130),
                       .layout = (test_layout)test_random_range(&r, TEST_DENSE, TEST_HEAD_FIRST),
                       .causal = test_random_range(&r, 0, 1),
                       .window = test_random_range(&r, 0, 3) == 0,
                       .left = test_random_range(&r, 0, 12),
                       .right = test_random_range(&r, -1, 3),
                       .alignment = (mha_alignment)test_random_range(&r, 0, 2),
                       .offset = test_random_range(&r, -4, 30),
                       .has_bias = test_random_range(&r, 0, 1),
                       .bias_hides = test_random_range(&r, 0, 1),
                       .bias_extents = (unsigned)test_random_range(&r, 0, 7),
                       .alibi = test_random_range(&r, 0, 1),
                       .sinks = test_random_range(&r, 0, 1),
                       .want = TEST_WANT_LSE};
  return c;
}

static void expect_merge(const mha_merge_args *args) {
  mha_error error;
  test_expect(mha_merge(args, &error), MHA_OK, &error);
}

/* ---- Properties ------------------------------------------------------------------------------ */

static void parts_make_the_whole(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= (test_small() ? 20 : 300); seed++) {
    const test_case c = merged_case(seed);
    static parts p;
    oracle_result result;
    test_build(&f, &c);
    test_ask_oracle(&f, &result);
    make_parts(&p, 1 + (int64_t)(seed % MOST_PARTS));
    test_poison_results(&f);
    expect_merge(&p.args);
    test_check_gaps(&f);
    test_judge(&f, &result);
    oracle_free(&result);
    test_pool_free(&p.pool);
    test_release(&f);
  }
}

static void one_part_is_the_whole_bit_by_bit(void **state) {
  (void)state;
  for (uint64_t seed = 400; seed < 420; seed++) {
    test_case c = merged_case(seed);
    static parts p;
    c.sinks = false;
    test_build(&f, &c);
    make_parts(&p, 1);
    test_poison_results(&f);
    expect_merge(&p.args);
    float *merged = test_gather(&f.output);
    test_same_bits("output", test_view_shape(&f.output), merged, p.outputs[0].data);
    test_same_bits("lse", (test_shape){{1, 1, 1, f.lse_n}}, f.lse, p.lse[0]);
    free(merged);
    test_pool_free(&p.pool);
    test_release(&f);
  }
}

static void in_place_is_the_same(void **state) {
  (void)state;
  for (uint64_t seed = 500; seed < 540; seed++) {
    const test_case c = merged_case(seed);
    static parts p;
    test_build(&f, &c);
    make_parts(&p, 3);
    test_poison_results(&f);
    expect_merge(&p.args);
    float *apart = test_gather(&f.output);
    const int64_t onto = (int64_t)(seed % 3);
    p.args.output = (float *)(uintptr_t)p.outputs[onto].data;
    p.args.output_batch_stride = p.args.output_row_stride = p.args.output_head_stride = 0;
    p.args.log_sum_exp = p.lse[onto];
    expect_merge(&p.args);
    test_same_bits("output", test_view_shape(&f.output), p.args.output, apart);
    test_same_bits("lse", (test_shape){{1, 1, 1, f.lse_n}}, p.args.log_sum_exp, f.lse);
    free(apart);
    test_pool_free(&p.pool);
    test_release(&f);
  }
}

/* ---- Rows by hand ---------------------------------------------------------------------------- */

typedef struct by_hand {
  float outputs[2][2], lses[2][1], merged[2], lse;
  mha_tensor tensors[2];
  const float *lists[2];
  mha_merge_args args;
} by_hand;

/* Two parts of one row of two numbers. */
static void build_by_hand(by_hand *h, float lse_0, float lse_1) {
  memset(h, 0, sizeof *h);
  for (int u = 0; u < 2; u++) {
    h->outputs[u][0] = u ? 3.0F : 1.0F;
    h->outputs[u][1] = u ? -8.0F : 4.0F;
    h->lses[u][0] = u ? lse_1 : lse_0;
    h->tensors[u] = (mha_tensor){h->outputs[u], 1, 1, 1, 2, 0, 0, 0, 0, MHA_F32, 0};
    h->lists[u] = h->lses[u];
  }
  MHA_INIT(&h->args);
  h->args.n_parts = 2;
  h->args.outputs = h->tensors;
  h->args.log_sum_exps = h->lists;
  h->args.output = h->merged;
  h->args.log_sum_exp = &h->lse;
}

static void numbers_by_hand(void **state) {
  by_hand h;
  const float sinks[] = {logf(2.0F)};
  (void)state;
  build_by_hand(&h, 0.0F, logf(3.0F)); /* weights 1/4 and 3/4 */
  expect_merge(&h.args);
  test_near("first", (double)h.merged[0], 2.5, 1e-6);
  test_near("second", (double)h.merged[1], -5.0, 1e-6);
  test_near("lse", (double)h.lse, log(4.0), 1e-6);
  h.args.sinks = sinks; /* 1, 3 and 2 for the sink */
  expect_merge(&h.args);
  test_near("first beside a sink", (double)h.merged[0], 10.0 / 6.0, 1e-6);
  test_near("lse without the sink", (double)h.lse, log(4.0), 1e-6);
}

static void parts_without_keys_add_nothing(void **state) {
  by_hand h;
  (void)state;
  build_by_hand(&h, -INFINITY, -3.0F);
  h.outputs[0][0] = NAN;
  h.outputs[0][1] = INFINITY;
  expect_merge(&h.args);
  assert_true(h.merged[0] == 3.0F && h.merged[1] == -8.0F && h.lse == -3.0F);
  h.lses[1][0] = -INFINITY; /* nobody sees a key: 0, sink or not */
  for (int sink = 0; sink < 2; sink++) {
    const float sinks[] = {5.0F};
    h.args.sinks = sink ? sinks : NULL;
    expect_merge(&h.args);
    assert_true(h.merged[0] == 0.0F && h.merged[1] == 0.0F && h.lse == -INFINITY);
  }
}

static void far_apart_and_large(void **state) {
  by_hand h;
  const float huge[] = {3e38F};
  (void)state;
  build_by_hand(&h, 3e38F, -3e38F);
  expect_merge(&h.args);
  assert_true(h.merged[0] == 1.0F && h.merged[1] == 4.0F && h.lse == 3e38F);
  build_by_hand(&h, 0.0F, 0.0F);
  h.args.sinks = huge;
  expect_merge(&h.args);
  assert_true(h.merged[0] == 0.0F && h.merged[1] == 0.0F);
}

static void nan_is_seen(void **state) {
  by_hand h;
  (void)state;
  build_by_hand(&h, NAN, 0.0F);
  expect_merge(&h.args);
  assert_true(isnan(h.merged[0]) && isnan(h.merged[1]) && isnan(h.lse));
  build_by_hand(&h, 0.0F, 0.0F);
  h.outputs[1][1] = NAN;
  expect_merge(&h.args);
  assert_true(h.merged[0] == 2.0F && isnan(h.merged[1]));
}

static void no_rows_is_nothing_to_do(void **state) {
  by_hand h;
  (void)state;
  build_by_hand(&h, 0.0F, 0.0F);
  h.tensors[0].batch = h.tensors[1].batch = INT64_MAX; /* of nothing */
  h.tensors[0].length = h.tensors[1].length = 0;
  h.args.flags = MHA_ALLOW_EMPTY;
  expect_merge(&h.args);
  assert_true(h.merged[0] == 0.0F && h.lse == 0.0F);
  build_by_hand(&h, 0.0F, 0.0F);
  h.tensors[0].length = h.tensors[1].length = 0;
  h.tensors[0].data = h.tensors[1].data = NULL;
  h.lists[0] = h.lists[1] = NULL;
  h.args.output = NULL;
  h.args.log_sum_exp = NULL;
  expect_merge(&h.args);
}

/* ---- Bad input ------------------------------------------------------------------------------- */

static void refuse(by_hand *h, mha_status expected, const char *word) {
  const by_hand before = *h;
  mha_error error;
  test_note("%s", word);
  test_expect(mha_merge(&h->args, &error), expected, &error);
  if (!strstr(error.message, word))
    test_failed("the message is \"%s\"", error.message);
  assert_memory_equal(h->merged, before.merged, sizeof h->merged);
  assert_true(h->lse == before.lse);
}

/* One thing in the arguments is wrong, or in the parts; the tables say what comes of it. */
typedef struct refusal {
  mha_status status;
  const char *word;
} refusal;

static const refusal of_arguments[] = {
    {MHA_ERROR_STRUCT_SIZE, "struct_size"},
    {MHA_ERROR_SIZE, "n_parts"},
    {MHA_ERROR_SIZE, "n_parts"},
    {MHA_ERROR_NULL, "outputs"},
    {MHA_ERROR_NULL, "log_sum_exps"},
    {MHA_ERROR_NULL, "args.output"},
    {MHA_ERROR_OVERLAP, "overlaps"},
    {MHA_ERROR_OVERLAP, "overlaps"},
    {MHA_ERROR_OVERLAP, "overlaps"},
    {MHA_ERROR_VALUE, "sinks[0]"},
    {MHA_ERROR_OVERLAP, "overlaps"},
    {MHA_ERROR_VALUE, "flags"},
    {MHA_ERROR_VALUE, "reserved"},
    {MHA_ERROR_OVERLAP, "log_sum_exps"},
    {MHA_ERROR_OVERLAP, "outputs"},
};

static void spoil_arguments(by_hand *h, size_t which) {
  static const float bad_sinks[] = {NAN};
  mha_merge_args *a = &h->args;
  a->struct_size = which == 0 ? 3 : a->struct_size;
  a->n_parts = which == 1 ? 0 : which == 2 ? INT64_MIN : a->n_parts;
  a->outputs = which == 3 ? NULL : a->outputs;
  a->log_sum_exps = which == 4 ? NULL : a->log_sum_exps;
  a->output = which == 5    ? NULL
              : which == 6  ? h->outputs[1] + 1
              : which == 13 ? (float *)(void *)h->lists
                            : a->output;
  a->log_sum_exp = which == 7    ? h->merged
                   : which == 8  ? h->outputs[0]
                   : which == 14 ? (float *)(void *)h->tensors
                                 : a->log_sum_exp;
  a->sinks = which == 9 ? bad_sinks : which == 10 ? h->merged : NULL;
  a->flags = which == 11;
  a->reserved = which == 12;
}

static const refusal of_parts[] = {
    {MHA_ERROR_NULL, "log_sum_exps[1]"},     {MHA_ERROR_NULL, "outputs[1].data"},
    {MHA_ERROR_SIZE, "outputs[1]"},          {MHA_ERROR_SIZE, "outputs[0]"},
    {MHA_ERROR_UNSUPPORTED, "outputs[1]"},   {MHA_ERROR_STRIDE, "size stride"},
    {MHA_ERROR_SIZE, "outputs[0].batch is"}, {MHA_ERROR_SIZE, "outputs[0].length is"},
};

static void spoil_parts(by_hand *h, size_t which) {
  mha_tensor *t = h->tensors;
  h->lists[1] = which == 0 ? NULL : h->lists[1];
  t[1].data = which == 1 ? NULL : t[1].data;
  t[1].size = which == 2 ? 1 : t[1].size;
  t[0].heads = which == 3 ? 0 : t[0].heads;
  t[1].element = which == 4;
  t[1].size_stride = which == 5 ? 2 : 0;
  t[0].batch = t[1].batch = which != 6;
  t[0].length = t[1].length = which != 7;
}

static void what_is_refused(void **state) {
  by_hand h;
  mha_error error;
  (void)state;
  test_expect(mha_merge(NULL, &error), MHA_ERROR_NULL, &error);
  for (size_t k = 0; k < COUNT(of_arguments); k++) {
    build_by_hand(&h, 0.0F, 0.0F);
    spoil_arguments(&h, k);
    refuse(&h, of_arguments[k].status, of_arguments[k].word);
  }
  for (size_t k = 0; k < COUNT(of_parts); k++) {
    build_by_hand(&h, 0.0F, 0.0F);
    spoil_parts(&h, k);
    refuse(&h, of_parts[k].status, of_parts[k].word);
  }
}

static void sizes_that_overflow(void **state) {
  by_hand h;
  (void)state;
  build_by_hand(&h, 0.0F, 0.0F);
  for (int u = 0; u < 2; u++) {
    h.tensors[u].batch = INT64_C(1) << 40;
    h.tensors[u].length = INT64_C(1) << 40;
  }
  refuse(&h, MHA_ERROR_OVERFLOW, "outputs[0]");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(parts_make_the_whole),
      cmocka_unit_test(one_part_is_the_whole_bit_by_bit),
      cmocka_unit_test(in_place_is_the_same),
      cmocka_unit_test(numbers_by_hand),
      cmocka_unit_test(parts_without_keys_add_nothing),
      cmocka_unit_test(far_apart_and_large),
      cmocka_unit_test(nan_is_seen),
      cmocka_unit_test(no_rows_is_nothing_to_do),
      cmocka_unit_test(what_is_refused),
      cmocka_unit_test(sizes_that_overflow),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
