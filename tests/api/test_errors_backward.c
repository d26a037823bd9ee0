/* Every wrong argument of a way back, of a tape and of a shape that is for training gives its own
 * status and a message that names it, and writes nothing: no gradient, no byte of memory taken. */
#include "backward.h"
#include "baseline.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_backward back;
static mha_weights *weights;
static mha_context *context;

static const int64_t over_int = INT64_C(1) << 31; /* one more than the BLAS's integer holds */

/* ---- calls ---- */

static void make_parts(void) {
  weights = NULL;
  if (!fixture.c.core)
    test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK,
                NULL);
  test_expect(mha_context_create(&fixture.options, &context, NULL), MHA_OK, NULL);
}

static void build(baseline which) {
  baseline_build(which);
  test_backward_build(&back, &fixture);
  make_parts();
}

static void release(void) {
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_allocator_check(&fixture.allocator);
  test_release(&fixture);
}

static mha_status call_back(mha_error *error) {
  return test_backward_call(&back, &fixture, context, weights, error);
}

/* The error with and without an mha_error, before any memory is taken. */
static void expect_fails(mha_status expected, const char *word) {
  mha_error error;
  const int64_t calls = fixture.allocator.calls;
  baseline_fill_with_garbage(&error);
  baseline_expect_error(call_back(&error), expected, &error, word);
  test_expect(call_back(NULL), expected, NULL);
  test_backward_expect_poison(&back);
  baseline_expect_untouched();
  assert_int_equal(fixture.allocator.calls, calls);
}

static void expect_works(void) {
  mha_error error;
  baseline_fill_with_garbage(&error);
  test_expect(call_back(&error), MHA_OK, &error);
  assert_int_equal(error.status, MHA_OK);
  assert_string_equal(error.message, "");
  baseline_expect_untouched(); /* the forward call's outputs are not looked at */
  test_backward_poison(&back);
}

/* ---- what is missing ---- */

static void pointers_that_are_null(void **state) {
  mha_error error;
  (void)state;
  build(LAYER);
  const test_fixture *f = &fixture;
  baseline_expect_error(mha_backward(NULL, weights, &f->args, &back.args, &error), MHA_ERROR_NULL,
                        &error, "context");
  baseline_expect_error(mha_backward(context, NULL, &f->args, &back.args, &error), MHA_ERROR_NULL,
                        &error, "weights");
  baseline_expect_error(mha_backward(context, weights, NULL, &back.args, &error), MHA_ERROR_NULL,
                        &error, "args");
  baseline_expect_error(mha_backward(context, weights, &f->args, NULL, &error), MHA_ERROR_NULL,
                        &error, "back");
  back.args.dy = NULL;
  expect_fails(MHA_ERROR_NULL, "back.dy");
  back.args.dy = back.dy;
  fixture.args.query = NULL;
  expect_fails(MHA_ERROR_NULL, "args.query");
  fixture.args.query = f->query.data;
  fixture.args.output = NULL; /* is not looked at */
  expect_works();
  release();
}

static void tensors_that_are_null(void **state) {
  mha_error error;
  const test_fixture *f = &fixture;
  const mha_attend_backward_args *a = &back.attend;
  (void)state;
  build(CORE);
  baseline_expect_error(mha_attend_backward(NULL, &f->q, &f->k, &f->v, &f->attend_args, a, &error),
                        MHA_ERROR_NULL, &error, "context");
  baseline_expect_error(
      mha_attend_backward(context, NULL, &f->k, &f->v, &f->attend_args, a, &error), MHA_ERROR_NULL,
      &error, "q is NULL");
  baseline_expect_error(
      mha_attend_backward(context, &f->q, NULL, &f->v, &f->attend_args, a, &error), MHA_ERROR_NULL,
      &error, "k is NULL");
  baseline_expect_error(
      mha_attend_backward(context, &f->q, &f->k, NULL, &f->attend_args, a, &error), MHA_ERROR_NULL,
      &error, "v is NULL");
  baseline_expect_error(mha_attend_backward(context, &f->q, &f->k, &f->v, NULL, a, &error),
                        MHA_ERROR_NULL, &error, "args");
  baseline_expect_error(
      mha_attend_backward(context, &f->q, &f->k, &f->v, &f->attend_args, NULL, &error),
      MHA_ERROR_NULL, &error, "back");
  back.attend.dy = NULL;
  expect_fails(MHA_ERROR_NULL, "back.dy");
  back.attend.dy = back.dy;
  fixture.attend_args.output = NULL;
  expect_works();
  back.attend.log_sum_exp = f->lse; /* output and log-sum-exp belong together */
  expect_fails(MHA_ERROR_NULL, "args.output");
  release();
}

/* Without rows nothing is read: dy may be NULL, and what is wanted is 0. */
static void calls_without_rows(void **state) {
  (void)state;
  for (int core = 0; core < 2; core++)
    for (int way = 0; way < 2; way++) {
      build(core ? CORE : LAYER);
      fixture.args.flags = fixture.attend_args.flags = MHA_ALLOW_EMPTY;
      if (way == 0)
        fixture.args.batch = fixture.q.batch = fixture.k.batch = fixture.v.batch = 0;
      else
        fixture.args.query_length = fixture.q.length = 0;
      back.args.dy = back.attend.dy = NULL;
      mha_error error;
      test_note("core %d, way %d", core, way);
      test_expect(call_back(&error), MHA_OK, &error);
      for (size_t i = 0; i < back.n; i++) {
        const test_asked_gradient *g = &back.gradients[i];
        const bool is_input = g->member == &back.args.d_query || g->member == &back.attend.d_q ||
                              (way == 0 && (core || i < 3));
        for (int64_t at = 0; at < g->floats; at++)
          if (is_input ? !test_is_poison(g->data[at]) : g->data[at] != 0.0F)
            test_failed("%s: element %" PRId64 " is %g", g->name, at, (double)g->data[at]);
      }
      release();
    }
}

/* Keys without a query have gradients of 0, also where they would be normalised and turned, from a
 * tape and computed again: nothing was kept of them that could be looked at. */
static void keys_without_queries(void **state) {
  (void)state;
  for (int norm = MHA_NORM_NONE; norm <= MHA_NORM_FULL; norm++)
    for (int with_tape = 0; with_tape < 2; with_tape++) {
      mha_tape *tape = NULL;
      mha_error error;
      test_build(&fixture, &(test_case){.seed = 1,
                                        .B = 2,
                                        .Lq = 1,
                                        .Lk = 5,
                                        .H = 4,
                                        .G = 2,
                                        .d = 4,
                                        .biases = TEST_ALL,
                                        .norm = (mha_norm)norm,
                                        .rope = MHA_ROPE_HALVES});
      test_backward_build(&back, &fixture);
      make_parts();
      test_expect(mha_tape_create(&fixture.allocator.mha, &tape, NULL), MHA_OK, NULL);
      fixture.args.flags = MHA_ALLOW_EMPTY;
      fixture.args.query_length = 0;
      fixture.args.tape = tape;
      test_expect(mha_forward(context, weights, &fixture.args, &error), MHA_OK, &error);
      fixture.args.tape = NULL;
      back.args.tape = with_tape ? tape : NULL;
      back.args.dy = NULL;
      test_expect(call_back(&error), MHA_OK, &error);
      for (size_t i = 1; i < back.n; i++) /* the first is d_query, which has no rows */
        for (int64_t at = 0; at < back.gradients[i].floats; at++)
          if (back.gradients[i].data[at] != 0.0F)
            test_failed("norm %d, tape %d: %s is %g", norm, with_tape, back.gradients[i].name,
                        (double)back.gradients[i].data[at]);
      mha_tape_destroy(tape);
      release();
    }
}

/* A bias of no entries or no rows has no number, and neither has its gradient; one that is
 * broadcast along them has, and its gradient is 0, and may not overlap another. */
static void a_bias_without_rows(void **state) {
  (void)state;
  for (int core = 0; core < 2; core++)
    for (int way = 0; way < 4; way++) {
      const bool no_batch = way & 1, broadcast = way & 2;
      mha_error error;
      baseline_build(core ? CORE : LAYER);
      mha_bias *bias = &fixture.rules.bias;
      float numbers[LK] = {0};
      float *gradient = test_pool_floats(&fixture.pool, broadcast ? LK : 0);
      fixture.args.flags = fixture.attend_args.flags = MHA_ALLOW_EMPTY;
      if (no_batch)
        fixture.args.batch = fixture.q.batch = fixture.k.batch = fixture.v.batch = 0;
      else
        fixture.args.query_length = fixture.q.length = 0;
      bias->data = numbers;
      bias->batch = no_batch && !broadcast ? 0 : 1;
      bias->heads = 1;
      bias->rows = !no_batch && !broadcast ? 0 : 1;
      bias->columns = LK;
      fixture.args.rules = fixture.attend_args.rules = &fixture.rules;
      test_backward_build(&back, &fixture);
      make_parts();
      back.args.d_bias = back.attend.d_bias = gradient;
      test_note("core %d, way %d", core, way);
      test_expect(call_back(&error), MHA_OK, &error);
      for (int j = 0; broadcast && j < LK; j++)
        assert_true(gradient[j] == 0.0F);
      if (broadcast && !no_batch) {
        *back.gradients[1].member = gradient; /* keys have gradients all the same */
        test_expect(call_back(&error), MHA_ERROR_OVERLAP, &error);
      }
      release();
    }
}

/* ---- members of the structs ---- */

static void flags_and_strides_of_a_layer(void **state) {
  (void)state;
  build(LAYER);
  mha_backward_args *a = &back.args;
  a->flags = 1;
  expect_fails(MHA_ERROR_VALUE, "back.flags");
  a->flags = UINT32_MAX;
  expect_fails(MHA_ERROR_VALUE, "back.flags");
  a->flags = 0;
  const struct {
    int64_t batch, row;
    mha_status status;
  } rows[] = {{0, E - 1, MHA_ERROR_STRIDE},     {0, -E, MHA_ERROR_STRIDE},
              {0, INT64_MIN, MHA_ERROR_STRIDE}, {0, over_int, MHA_ERROR_OVERFLOW},
              {-1, 0, MHA_ERROR_STRIDE},        {INT64_MAX, 0, MHA_ERROR_OVERFLOW}};
  for (size_t i = 0; i < COUNT(rows); i++) {
    test_note("row %zu", i);
    a->dy_batch_stride = rows[i].batch;
    a->dy_row_stride = rows[i].row;
    expect_fails(rows[i].status, "back.dy");
  }
  a->dy_batch_stride = 1; /* entries of an input may share rows */
  a->dy_row_stride = 0;
  expect_works();
  release();
}

static void flags_and_strides_of_step_3(void **state) {
  (void)state;
  build(CORE);
  mha_attend_backward_args *a = &back.attend;
  a->flags = 1;
  expect_fails(MHA_ERROR_VALUE, "back.flags");
  a->flags = 0;
  const struct {
    int64_t batch, row, head;
    mha_status status;
  } rows[] = {
      {LQ * H * DV, DV - 1, DV, MHA_ERROR_STRIDE},     {LQ * H * DV, -1, DV, MHA_ERROR_STRIDE},
      {LQ * H * DV, H * DV, -1, MHA_ERROR_STRIDE},     {-1, H * DV, DV, MHA_ERROR_STRIDE},
      {LQ * H * DV, over_int, DV, MHA_ERROR_OVERFLOW}, {INT64_MAX, H * DV, DV, MHA_ERROR_OVERFLOW}};
  for (size_t i = 0; i < COUNT(rows); i++) {
    test_note("row %zu", i);
    a->dy_batch_stride = rows[i].batch;
    a->dy_row_stride = rows[i].row;
    a->dy_head_stride = rows[i].head;
    expect_fails(rows[i].status, "back.dy");
  }
  release();
}

/* The arguments of the forward call are judged by the rules of the forward call. */
static void arguments_of_the_forward_call(void **state) {
  (void)state;
  build(LAYER_RULES);
  mha_forward_args *a = &fixture.args;
  a->batch = -1;
  expect_fails(MHA_ERROR_SIZE, "args.batch");
  a->batch = 0;
  expect_fails(MHA_ERROR_SIZE, "args.batch");
  a->batch = B;
  a->query_row_stride = E - 1;
  expect_fails(MHA_ERROR_STRIDE, "args.query");
  a->query_row_stride = 0;
  a->flags = 2;
  expect_fails(MHA_ERROR_VALUE, "args.flags");
  a->flags = 0;
  fixture.rules.dropout = 1.0F;
  expect_fails(MHA_ERROR_VALUE, "rules.dropout");
  fixture.rules.dropout = 0.0F;
  fixture.key_lengths[1] = LK + 1;
  expect_fails(MHA_ERROR_LENGTH, "rules.key_lengths[1]");
  fixture.key_lengths[1] = LK;
  a->struct_size = 8;
  expect_fails(MHA_ERROR_STRUCT_SIZE, "args");
  a->struct_size = sizeof *a;
  a->output_row_stride = 1; /* what is not looked at cannot be wrong */
  a->output_batch_stride = -5;
  a->output = back.dy;
  mha_results nonsense = {.struct_size = 1};
  a->results = &nonsense;
  expect_works();
  release();
}

static void entries_of_an_input_that_overlap(void **state) {
  (void)state;
  build(LAYER);
  fixture.args.key_batch_stride = E; /* an input may, its gradient may not */
  expect_fails(MHA_ERROR_OVERLAP, "back.d_key");
  back.args.d_key = NULL;
  expect_works();
  release();
  build(CORE);
  fixture.k.batch_stride = 0; /* the same keys for all entries */
  fixture.k.row_stride = G * D;
  fixture.k.head_stride = D;
  fixture.k.size_stride = 1;
  expect_fails(MHA_ERROR_OVERLAP, "back.d_k");
  back.attend.d_k = NULL;
  expect_works();
  release();
}

/* ---- gradients of what is not there ---- */

static void expect_missing(float **member, const char *name, const char *thing) {
  float *before = *member;
  float number = test_poison();
  *member = &number;
  test_note("%s", name);
  expect_fails(MHA_ERROR_WEIGHTS, name);
  expect_fails(MHA_ERROR_WEIGHTS, thing);
  assert_true(test_is_poison(number));
  *member = before;
}

static void gradients_of_what_a_layer_has_not(void **state) {
  (void)state;
  mha_backward_args *a = &back.args;
  build(SELF);
  expect_missing(&a->d_key, "back.d_key", "args.key");
  expect_missing(&a->d_value, "back.d_value", "args.value");
  expect_missing(&a->d_query_norm, "back.d_query_norm", "config.norm");
  expect_missing(&a->d_key_norm, "back.d_key_norm", "config.norm");
  expect_missing(&a->d_bias, "back.d_bias", "rules.bias");
  expect_missing(&a->d_alibi_slopes, "back.d_alibi_slopes", "rules.alibi_slopes");
  expect_missing(&a->d_sinks, "back.d_sinks", "sinks");
  release();
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 3, .H = 2, .d = 3, .absent = TEST_ALL});
  test_backward_build(&back, &fixture);
  make_parts();
  const struct {
    float **member;
    const char *name, *thing;
  } all[] = {{&a->d_wq, "back.d_wq", "Wq"}, {&a->d_wk, "back.d_wk", "Wk"},
             {&a->d_wv, "back.d_wv", "Wv"}, {&a->d_wo, "back.d_wo", "Wo"},
             {&a->d_bq, "back.d_bq", "bq"}, {&a->d_bk, "back.d_bk", "bk"},
             {&a->d_bv, "back.d_bv", "bv"}, {&a->d_bo, "back.d_bo", "bo"}};
  for (size_t i = 0; i < COUNT(all); i++)
    expect_missing(all[i].member, all[i].name, all[i].thing);
  release();
}

static void gradients_of_what_step_3_has_not(void **state) {
  (void)state;
  mha_attend_backward_args *a = &back.attend;
  build(CORE);
  expect_missing(&a->d_bias, "back.d_bias", "rules.bias");
  expect_missing(&a->d_alibi_slopes, "back.d_alibi_slopes", "rules.alibi_slopes");
  expect_missing(&a->d_sinks, "back.d_sinks", "rules.sinks");
  release();
}

/* A layer's own sinks have a gradient, and none where the call's take their place. */
static void sinks_of_the_layer(void **state) {
  float own[H] = {0.5F};
  float gradient[H] = {0};
  (void)state;
  baseline_build(LAYER);
  fixture.matrices.sinks = own;
  test_backward_build(&back, &fixture);
  make_parts();
  back.args.d_sinks = gradient;
  expect_works();
  for (int h = 0; h < H; h++)
    assert_true(gradient[h] != 0.0F);
  release();
}

/* ---- overlaps ---- */

/* A gradient that begins in the other's last element, or ends in its first one. */
static void expect_overlap(const test_asked_gradient *g, const baseline_region *other) {
  char *begin = other->data;
  const size_t last = (other->bytes - 1) / sizeof(float) * sizeof(float);
  char *places[] = {begin + last, begin + sizeof(float) - (size_t)g->floats * sizeof(float)};
  for (size_t i = 0; i < COUNT(places); i++) {
    test_note("%s laid over %s, place %zu", g->name, other->name, i);
    *g->member = (float *)(void *)places[i];
    expect_fails(MHA_ERROR_OVERLAP, g->name);
  }
  *g->member = g->data;
}

static void gradients_overlap_nothing(void **state) {
  const baseline all[] = {LAYER_RULES, CORE_RULES, LAYER_PACKED, CORE_PACKED};
  (void)state;
  for (size_t base = 0; base < COUNT(all); base++) {
    baseline_region others[BASELINE_INPUTS + TEST_MAX_GRADIENTS + 3];
    build(all[base]);
    size_t n = baseline_list_inputs(others);
    const baseline_region dy = {"back.dy", back.dy, (size_t)back.dy_floats * sizeof(float)};
    const baseline_region lse = {"back.log_sum_exp", fixture.lse,
                                 (size_t)fixture.lse_n * sizeof(float)};
    const baseline_region output = {"args.output", fixture.output.data,
                                    (size_t)fixture.output.floats * sizeof(float)};
    others[n++] = dy;
    if (fixture.c.core) {
      others[n++] = lse;
      others[n++] = output;
      back.attend.log_sum_exp = fixture.lse;
    }
    for (size_t i = 0; i < back.n; i++) {
      const test_asked_gradient *g = &back.gradients[i];
      for (size_t o = 0; o < n; o++)
        if (others[o].data && (others[o].data != fixture.offsets || fixture.rules.offsets))
          expect_overlap(g, &others[o]);
      for (size_t k = 0; k < back.n; k++) {
        const test_asked_gradient *h = &back.gradients[k];
        const baseline_region other = {h->name, h->data, (size_t)h->floats * sizeof(float)};
        if (k != i)
          expect_overlap(g, &other);
      }
    }
    release();
  }
}

/* A bias that steps over its numbers more than once, a diagonal band for one, has no gradient. */
static void a_bias_that_repeats_itself(void **state) {
  const struct {
    int64_t batch, head, row;
  } repeating[] = {{LQ * H * LK, LQ * LK, 1},
                   {LQ * H * LK, LQ * LK, LK - 1},
                   {LQ * H * LK, LK, LK},
                   {1, LQ * LK, LK}};
  const baseline all[] = {LAYER_RULES, CORE_RULES};
  (void)state;
  for (size_t base = 0; base < COUNT(all); base++)
    for (size_t i = 0; i < COUNT(repeating); i++) {
      build(all[base]);
      fixture.rules.bias.batch_stride = repeating[i].batch;
      fixture.rules.bias.head_stride = repeating[i].head;
      fixture.rules.bias.row_stride = repeating[i].row;
      test_note("base %zu, row %zu", base, i);
      expect_fails(MHA_ERROR_OVERLAP, "back.d_bias");
      back.args.d_bias = back.attend.d_bias = NULL;
      expect_works();
      release();
    }
}

/* ---- what may lie side by side ---- */

/* d_wq, d_wk and d_wv as columns of one block. */
static void gradients_of_matrices_in_one_block(void **state) {
  enum { COLUMNS = H * D + G * D + G * DV };
  (void)state;
  baseline_build(LAYER);
  fixture.matrices.query_ld = fixture.matrices.key_ld = fixture.matrices.value_ld = COLUMNS;
  float *block = test_pool_floats(&fixture.pool, E * COLUMNS);
  test_fill_normal(&fixture.random, block, E * COLUMNS, 0.3);
  fixture.matrices.query = block;
  fixture.matrices.key = block + H * D;
  fixture.matrices.value = block + H * D + G * D;
  test_backward_build(&back, &fixture);
  make_parts();
  float *gradients = test_pool_floats(&fixture.pool, E * COLUMNS);
  back.args.d_wq = gradients;
  back.args.d_wk = gradients + H * D;
  back.args.d_wv = gradients + H * D + G * D;
  expect_works();
  for (int at = 0; at < E * COLUMNS; at++)
    assert_false(test_is_poison(gradients[at]));
  test_fill_poison(gradients, E * COLUMNS);
  back.args.d_wk = gradients + H * D - 1; /* one column of Wq's */
  expect_fails(MHA_ERROR_OVERLAP, "back.d_wk");
  back.args.d_wk = gradients + H * D + 1; /* one of Wv's */
  expect_fails(MHA_ERROR_OVERLAP, "back.d_w");
  for (int at = 0; at < E * COLUMNS; at++)
    assert_true(test_is_poison(gradients[at]));
  release();
}

/* How the three parts of one block lie: the strides of a part, and where the next begins. */
typedef struct parts_of_a_block {
  const char *name;
  int64_t batch, row, head, next;
} parts_of_a_block;

enum { PART_HEADS = 2, PART_SIZE = 3, PART = PART_HEADS * PART_SIZE };

static void expect_parts(const parts_of_a_block *p, int64_t batch, int64_t length) {
  const int64_t n = batch * length * 3 * PART;
  test_build(&fixture, &(test_case){.seed = 3,
                                    .core = true,
                                    .B = batch,
                                    .Lq = length,
                                    .Lk = length,
                                    .H = PART_HEADS,
                                    .d = PART_SIZE});
  test_backward_build(&back, &fixture);
  make_parts();
  float *block = test_pool_floats(&fixture.pool, n);
  float *gradients = test_pool_floats(&fixture.pool, n);
  test_fill_normal(&fixture.random, block, n, 1.0);
  mha_tensor *tensors[] = {&fixture.q, &fixture.k, &fixture.v};
  float **members[] = {&back.attend.d_q, &back.attend.d_k, &back.attend.d_v};
  for (int k = 0; k < 3; k++) {
    tensors[k]->data = block + k * p->next;
    tensors[k]->batch_stride = p->batch;
    tensors[k]->row_stride = p->row;
    tensors[k]->head_stride = p->head;
    tensors[k]->size_stride = 1;
    *members[k] = gradients + k * p->next;
  }
  test_note("%s, batch %d, length %d", p->name, (int)batch, (int)length);
  expect_works();
  for (int64_t at = 0; at < n; at++)
    if (test_is_poison(gradients[at]))
      test_failed("element %d was not written", (int)at);
  test_fill_poison(gradients, n);
  back.attend.d_k = gradients + p->next - 1;
  expect_fails(MHA_ERROR_OVERLAP, "back.d_k");
  release();
}

static void gradients_of_tensors_in_one_block(void **state) {
  (void)state;
  for (int64_t batch = 1; batch <= 2; batch++)
    for (int64_t L = 1; L <= 4; L += 3) {
      const parts_of_a_block all[] = {
          {"[B][L][3][H][d]", L * 3 * PART, 3 * PART, PART_SIZE, PART},
          {"[B][L][H][3][d]", L * 3 * PART, 3 * PART, 3 * PART_SIZE, PART_SIZE},
          {"[B][3][H][L][d]", L * 3 * PART, PART_SIZE, L * PART_SIZE, L * PART},
          {"[3][B][L][H][d]", L * PART, PART, PART_SIZE, batch * L * PART},
          {"[L][B][3][H][d]", 3 * PART, batch * 3 * PART, PART_SIZE, PART}};
      for (size_t i = 0; i < COUNT(all); i++)
        expect_parts(&all[i], batch, L);
    }
}

/* query, key and value, and their gradients, side by side in each row: [B][L][3][E] and
 * [L][B][3][E]. */
static void gradients_of_inputs_in_one_block(void **state) {
  (void)state;
  for (int first = 0; first < 2; first++)
    for (int64_t L = 1; L <= 3; L += 2) {
      const int64_t n = B * L * 3 * E;
      test_build(&fixture, &(test_case){.seed = 5, .B = B, .Lq = L, .Lk = L, .H = 4, .d = 3});
      test_backward_build(&back, &fixture);
      make_parts();
      float *block = test_pool_floats(&fixture.pool, n);
      float *gradients = test_pool_floats(&fixture.pool, n);
      test_fill_normal(&fixture.random, block, n, 1.0);
      mha_forward_args *a = &fixture.args;
      a->query = block;
      a->key = block + E;
      a->value = block + 2 * E;
      a->query_batch_stride = a->key_batch_stride = a->value_batch_stride =
          first ? 3 * E : L * 3 * E;
      a->query_row_stride = a->key_row_stride = a->value_row_stride = first ? B * 3 * E : 3 * E;
      back.args.d_query = gradients;
      back.args.d_key = gradients + E;
      back.args.d_value = gradients + 2 * E;
      test_note("length first %d, length %d", first, (int)L);
      expect_works();
      for (int64_t at = 0; at < n; at++)
        assert_false(test_is_poison(gradients[at]));
      test_fill_poison(gradients, n);
      back.args.d_value = gradients + 2 * E - 1;
      expect_fails(MHA_ERROR_OVERLAP, "back.d_value");
      release();
    }
}

/* ---- tapes and caches ---- */

static void tapes_that_are_null(void **state) {
  mha_error error;
  mha_tape *tape = NULL;
  mha_shape shape;
  size_t bytes = 77;
  (void)state;
  build(LAYER);
  MHA_INIT(&shape);
  shape.batch = shape.query_length = 1;
  baseline_expect_error(mha_tape_create(NULL, NULL, &error), MHA_ERROR_NULL, &error, "tape");
  test_expect(mha_tape_create(NULL, &tape, &error), MHA_OK, &error);
  assert_string_equal(error.message, "");
  baseline_expect_error(mha_tape_bytes(NULL, &shape, &bytes, &error), MHA_ERROR_NULL, &error,
                        "weights");
  baseline_expect_error(mha_tape_bytes(weights, NULL, &bytes, &error), MHA_ERROR_NULL, &error,
                        "shape");
  baseline_expect_error(mha_tape_bytes(weights, &shape, NULL, &error), MHA_ERROR_NULL, &error,
                        "bytes");
  baseline_expect_error(mha_tape_reserve(NULL, weights, &shape, &error), MHA_ERROR_NULL, &error,
                        "tape");
  baseline_expect_error(mha_tape_reserve(tape, NULL, &shape, &error), MHA_ERROR_NULL, &error,
                        "weights");
  baseline_expect_error(mha_tape_reserve(tape, weights, NULL, &error), MHA_ERROR_NULL, &error,
                        "shape");
  assert_int_equal(bytes, 77);
  mha_tape_destroy(tape);
  mha_tape_destroy(NULL);
  release();
}

static void shapes_for_training(void **state) {
  const struct {
    int64_t batch, query_length, key_length;
    int32_t backward, cached;
    mha_status of_tape, of_context;
    const char *word;
  } rows[] = {
      {-1, 1, 1, 0, 0, MHA_ERROR_SIZE, MHA_ERROR_SIZE, "shape.batch"},
      {1, -1, 1, 0, 0, MHA_ERROR_SIZE, MHA_ERROR_SIZE, "shape.query_length"},
      {1, 1, -1, 0, 0, MHA_ERROR_SIZE, MHA_ERROR_SIZE, "shape.key_length"},
      {1, 1, 1, -1, 0, MHA_ERROR_VALUE, MHA_ERROR_VALUE, "shape.backward"},
      {1, 1, 1, 3, 0, MHA_ERROR_VALUE, MHA_ERROR_VALUE, "shape.backward"},
      {1, 1, 1, 0, 1, MHA_ERROR_UNSUPPORTED, MHA_OK, "shape.cached"},
      {1, 1, 1, 1, 1, MHA_ERROR_UNSUPPORTED, MHA_ERROR_UNSUPPORTED, "shape.cached"},
      {1, 1, 1, 2, 1, MHA_ERROR_UNSUPPORTED, MHA_ERROR_UNSUPPORTED, "shape.cached"},
      {1, INT64_MAX / 8, 1, 1, 0, MHA_ERROR_OVERFLOW, MHA_ERROR_OVERFLOW, "shape"},
      {1, 1, INT64_MAX / 8, 2, 0, MHA_ERROR_OVERFLOW, MHA_ERROR_OVERFLOW, "shape"},
      {INT64_MAX / 8, 1, 1, 2, 0, MHA_ERROR_OVERFLOW, MHA_ERROR_OVERFLOW, "shape"},
      {INT64_MAX, INT64_MAX, INT64_MAX, 2, 0, MHA_ERROR_OVERFLOW, MHA_ERROR_OVERFLOW, "shape"}};
  (void)state;
  build(LAYER);
  mha_tape *tape = NULL;
  test_expect(mha_tape_create(&fixture.allocator.mha, &tape, NULL), MHA_OK, NULL);
  const int64_t calls = fixture.allocator.calls;
  for (size_t i = 0; i < COUNT(rows); i++) {
    mha_error error;
    mha_shape shape;
    size_t bytes = 77;
    MHA_INIT(&shape);
    shape.batch = rows[i].batch;
    shape.query_length = rows[i].query_length;
    shape.key_length = rows[i].key_length;
    shape.backward = rows[i].backward;
    shape.cached = rows[i].cached;
    test_note("row %zu", i);
    baseline_expect_error(mha_tape_bytes(weights, &shape, &bytes, &error), rows[i].of_tape, &error,
                          rows[i].word);
    assert_int_equal(bytes, 77);
    baseline_expect_error(mha_tape_reserve(tape, weights, &shape, &error), rows[i].of_tape, &error,
                          rows[i].word);
    if (!rows[i].of_context)
      continue;
    baseline_expect_error(mha_workspace_bytes(context, weights, &shape, &bytes, &error),
                          rows[i].of_context, &error, rows[i].word);
    assert_int_equal(bytes, 77);
    baseline_expect_error(mha_context_reserve(context, weights, &shape, &error), rows[i].of_context,
                          &error, rows[i].word);
  }
  assert_int_equal(fixture.allocator.calls, calls);
  mha_tape_destroy(tape);
  release();
}

static void fill(mha_tape *tape) {
  mha_error error;
  fixture.args.tape = tape;
  test_expect(mha_forward(context, weights, &fixture.args, &error), MHA_OK, &error);
  fixture.args.tape = NULL;
  test_poison_results(&fixture);
}

/* Each wrong tape, and the right one in between, which stays good. */
static void tapes_of_other_calls(void **state) {
  mha_tape *tape = NULL;
  mha_weights *other = NULL;
  (void)state;
  build(LAYER);
  mha_forward_args *a = &fixture.args;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &other, NULL), MHA_OK, NULL);
  test_expect(mha_tape_create(NULL, &tape, NULL), MHA_OK, NULL);
  fixture.options.allocator = NULL; /* for its growing */
  test_expect(call_back(NULL), MHA_OK, NULL);
  test_backward_poison(&back);
  back.args.tape = tape;
  expect_fails(MHA_ERROR_VALUE, "back.tape is empty");
  fill(tape);
  expect_works();
  mha_weights *mine = weights;
  weights = other;
  expect_fails(MHA_ERROR_VALUE, "back.tape has a call of another layer");
  weights = mine;
  a->batch = B - 1;
  expect_fails(MHA_ERROR_VALUE, "back.tape");
  a->batch = B;
  a->query_length = LQ - 1;
  expect_fails(MHA_ERROR_VALUE, "back.tape");
  a->query_length = LQ;
  a->key_length = LK - 1;
  expect_fails(MHA_ERROR_VALUE, "back.tape");
  a->key_length = LK;
  expect_works();
  mha_shape shape;
  MHA_INIT(&shape);
  shape.batch = B;
  shape.query_length = LQ;
  shape.key_length = LK;
  test_expect(mha_tape_reserve(tape, weights, &shape, NULL), MHA_OK, NULL);
  expect_fails(MHA_ERROR_VALUE, "back.tape is empty");
  mha_tape_destroy(tape);
  mha_weights_destroy(other);
  release();
}

/* A call that is refused leaves a tape as it was. */
static void tapes_of_calls_that_fail(void **state) {
  mha_tape *tape = NULL;
  mha_error error;
  (void)state;
  build(LAYER);
  mha_forward_args *a = &fixture.args;
  test_expect(mha_tape_create(NULL, &tape, NULL), MHA_OK, NULL);
  fill(tape);
  back.args.tape = tape;
  expect_works();
  a->tape = tape;
  a->query_row_stride = 1;
  test_expect(mha_forward(context, weights, a, &error), MHA_ERROR_STRIDE, &error);
  a->query_row_stride = 0;
  a->output = (float *)(void *)(uintptr_t)a->query;
  test_expect(mha_forward(context, weights, a, &error), MHA_ERROR_OVERLAP, &error);
  a->output = fixture.output.data;
  expect_works();
  mha_tape_destroy(tape);
  a->tape = NULL;
  release();
}

static void nothing_passes_through_a_cache(void **state) {
  mha_cache *cache = NULL;
  mha_cache_options options;
  mha_tape *tape = NULL;
  mha_error error;
  (void)state;
  build(LAYER);
  MHA_INIT(&options);
  options.n_entries = B;
  options.capacity = LK;
  options.n_kv_heads = G;
  options.head_size = D;
  options.value_head_size = DV;
  test_expect(mha_cache_create(&options, &cache, &error), MHA_OK, &error);
  test_expect(mha_tape_create(NULL, &tape, NULL), MHA_OK, NULL);
  fixture.args.cache = cache;
  expect_fails(MHA_ERROR_UNSUPPORTED, "args.cache");
  fixture.args.tape = tape;
  baseline_fill_with_garbage(&error);
  baseline_expect_error(mha_forward(context, weights, &fixture.args, &error), MHA_ERROR_UNSUPPORTED,
                        &error, "args.tape");
  baseline_expect_untouched();
  for (int64_t b = 0; b < B; b++) {
    int64_t length = -1;
    test_expect(mha_cache_length(cache, b, &length, NULL), MHA_OK, NULL);
    assert_int_equal(length, 0);
  }
  fixture.args.tape = NULL;
  fixture.args.cache = NULL;
  mha_tape_destroy(tape);
  mha_cache_destroy(cache);
  release();
}

/* ---- a context that is inside a call ---- */

typedef struct intruder {
  mha_tape *tape, *outer;
  mha_status back, forward, refill, reserve;
  mha_error error;
  int steps;
} intruder;

/* From within the trace of a call, in the same context: also with the tape that the call reads. */
static void intrude(void *user, const mha_trace_step *step) {
  intruder *in = user;
  test_fixture *f = &fixture;
  mha_backward_args again = back.args;
  mha_shape shape;
  (void)step;
  MHA_INIT(&shape);
  shape.batch = shape.query_length = 64;
  shape.backward = MHA_BACKWARD_ALONE;
  in->steps++;
  again.tape = NULL;
  baseline_fill_with_garbage(&in->error);
  in->back = mha_backward(context, weights, &f->args, &again, &in->error);
  in->reserve = mha_context_reserve(context, weights, &shape, NULL);
  mha_forward_args larger = f->args;
  larger.tape = in->tape;
  in->forward = mha_forward(context, weights, &larger, NULL);
  larger.batch = 1; /* other sizes, so a tape that it opened would not fit */
  larger.tape = in->outer;
  in->refill = mha_forward(context, weights, &larger, NULL);
}

static void a_busy_context(void **state) {
  (void)state;
  for (int with_tape = 0; with_tape < 2; with_tape++) {
    intruder in = {0};
    mha_tape *tape = NULL;
    mha_error error;
    build(LAYER);
    test_expect(mha_tape_create(NULL, &tape, NULL), MHA_OK, NULL);
    test_expect(mha_tape_create(NULL, &in.tape, NULL), MHA_OK, NULL);
    fill(tape);
    back.args.tape = with_tape ? tape : NULL;
    test_expect(call_back(&error), MHA_OK, &error);
    float *expected = test_backward_copy(&back);
    test_backward_poison(&back);
    in.outer = tape;
    test_expect(mha_context_trace(context, intrude, &in, NULL), MHA_OK, NULL);
    test_expect(call_back(&error), MHA_OK, &error);
    test_expect(mha_context_trace(context, NULL, NULL, NULL), MHA_OK, NULL);
    assert_int_equal(in.steps, 8);
    baseline_expect_error(in.back, MHA_ERROR_BUSY, &in.error, "context");
    assert_int_equal(in.forward, MHA_ERROR_BUSY);
    assert_int_equal(in.refill, MHA_ERROR_BUSY);
    assert_int_equal(in.reserve, MHA_ERROR_BUSY);
    test_backward_expect_bits(&back, expected);
    test_backward_poison(&back);
    back.args.tape = tape; /* as it was */
    test_expect(call_back(&error), MHA_OK, &error);
    test_backward_expect_bits(&back, expected);
    free(expected);
    mha_tape_destroy(tape);
    mha_tape_destroy(in.tape);
    release();
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(pointers_that_are_null),
      cmocka_unit_test(tensors_that_are_null),
      cmocka_unit_test(calls_without_rows),
      cmocka_unit_test(keys_without_queries),
      cmocka_unit_test(a_bias_without_rows),
      cmocka_unit_test(flags_and_strides_of_a_layer),
      cmocka_unit_test(flags_and_strides_of_step_3),
      cmocka_unit_test(arguments_of_the_forward_call),
      cmocka_unit_test(entries_of_an_input_that_overlap),
      cmocka_unit_test(gradients_of_what_a_layer_has_not),
      cmocka_unit_test(gradients_of_what_step_3_has_not),
      cmocka_unit_test(sinks_of_the_layer),
      cmocka_unit_test(gradients_overlap_nothing),
      cmocka_unit_test(a_bias_that_repeats_itself),
      cmocka_unit_test(gradients_of_matrices_in_one_block),
      cmocka_unit_test(gradients_of_tensors_in_one_block),
      cmocka_unit_test(gradients_of_inputs_in_one_block),
      cmocka_unit_test(tapes_that_are_null),
      cmocka_unit_test(shapes_for_training),
      cmocka_unit_test(tapes_of_other_calls),
      cmocka_unit_test(tapes_of_calls_that_fail),
      cmocka_unit_test(nothing_passes_through_a_cache),
      cmocka_unit_test(a_busy_context),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
