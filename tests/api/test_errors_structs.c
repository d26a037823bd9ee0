/* Structs that are NULL, of other sizes or full of garbage, and outputs that overlap what a call
 * reads or writes: each has its own status and a message that names it, and nothing is written. */
#include "backward.h"
#include "baseline.h"

#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- Pointers to structs --------------------------------------------------------------------- */

static void structs_that_are_null(void **state) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_config config;
  mha_shape shape;
  mha_error error;
  size_t bytes = 0;
  (void)state;
  baseline_build(LAYER);
  MHA_INIT(&config);
  MHA_INIT(&shape);
  shape.batch = shape.query_length = 1;
  baseline_expect_error(mha_weights_create(NULL, &fixture.matrices, &weights, &error),
                        MHA_ERROR_NULL, &error, "config");
  baseline_expect_error(mha_weights_create(&fixture.config, NULL, &weights, &error), MHA_ERROR_NULL,
                        &error, "matrices");
  baseline_expect_error(mha_weights_create(&fixture.config, &fixture.matrices, NULL, &error),
                        MHA_ERROR_NULL, &error, "weights");
  baseline_expect_error(mha_context_create(NULL, NULL, &error), MHA_ERROR_NULL, &error, "context");
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK, NULL);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  baseline_expect_error(mha_weights_config(NULL, &config, &error), MHA_ERROR_NULL, &error,
                        "weights");
  baseline_expect_error(mha_weights_config(weights, NULL, &error), MHA_ERROR_NULL, &error,
                        "config");
  baseline_expect_error(mha_workspace_bytes(NULL, weights, &shape, &bytes, &error), MHA_ERROR_NULL,
                        &error, "context");
  baseline_expect_error(mha_workspace_bytes(context, weights, NULL, &bytes, &error), MHA_ERROR_NULL,
                        &error, "shape");
  baseline_expect_error(mha_workspace_bytes(context, weights, &shape, NULL, &error), MHA_ERROR_NULL,
                        &error, "bytes");
  baseline_expect_error(mha_context_reserve(NULL, weights, &shape, &error), MHA_ERROR_NULL, &error,
                        "context");
  baseline_expect_error(mha_context_reserve(context, weights, NULL, &error), MHA_ERROR_NULL, &error,
                        "shape");
  baseline_expect_error(mha_context_trace(NULL, NULL, NULL, &error), MHA_ERROR_NULL, &error,
                        "context");
  baseline_expect_error(mha_forward(NULL, weights, &fixture.args, &error), MHA_ERROR_NULL, &error,
                        "context");
  baseline_expect_error(mha_forward(context, NULL, &fixture.args, &error), MHA_ERROR_NULL, &error,
                        "weights");
  baseline_expect_error(mha_forward(context, weights, NULL, &error), MHA_ERROR_NULL, &error,
                        "args");
  baseline_expect_untouched();
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

static void tensors_that_are_null(void **state) {
  mha_context *context = NULL;
  mha_error error;
  const test_fixture *f = &fixture;
  (void)state;
  baseline_build(CORE);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  baseline_expect_error(mha_attend(NULL, &f->q, &f->k, &f->v, &f->attend_args, &error),
                        MHA_ERROR_NULL, &error, "context");
  baseline_expect_error(mha_attend(context, NULL, &f->k, &f->v, &f->attend_args, &error),
                        MHA_ERROR_NULL, &error, "q");
  baseline_expect_error(mha_attend(context, &f->q, NULL, &f->v, &f->attend_args, &error),
                        MHA_ERROR_NULL, &error, "k");
  baseline_expect_error(mha_attend(context, &f->q, &f->k, NULL, &f->attend_args, &error),
                        MHA_ERROR_NULL, &error, "v");
  baseline_expect_error(mha_attend(context, &f->q, &f->k, &f->v, NULL, &error), MHA_ERROR_NULL,
                        &error, "args");
  baseline_expect_untouched();
  mha_context_destroy(context);
  test_release(&fixture);
}

static void self_attention_checks_too(void **state) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  (void)state;
  baseline_build(SELF);
  float *x = fixture.query.data, *y = fixture.output.data;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK, NULL);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  baseline_expect_error(mha_self_attention(NULL, weights, x, B, LQ, y, &error), MHA_ERROR_NULL,
                        &error, "context");
  baseline_expect_error(mha_self_attention(context, NULL, x, B, LQ, y, &error), MHA_ERROR_NULL,
                        &error, "weights");
  baseline_expect_error(mha_self_attention(context, weights, NULL, B, LQ, y, &error),
                        MHA_ERROR_NULL, &error, "x is NULL");
  baseline_expect_error(mha_self_attention(context, weights, x, B, LQ, NULL, &error),
                        MHA_ERROR_NULL, &error, "output");
  baseline_expect_error(mha_self_attention(context, weights, x, -1, LQ, y, &error), MHA_ERROR_SIZE,
                        &error, "batch is");
  baseline_expect_error(mha_self_attention(context, weights, x, B, -1, y, &error), MHA_ERROR_SIZE,
                        &error, "length");
  baseline_expect_error(mha_self_attention(context, weights, x, B, INT64_MAX, y, &error),
                        MHA_ERROR_OVERFLOW, &error, "x has");
  baseline_expect_error(mha_self_attention(context, weights, x, B, LQ, x, &error),
                        MHA_ERROR_OVERLAP, &error, "output overlaps x;");
  baseline_expect_untouched();
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* Ek ≠ Eq: the query cannot serve as a key. */
static void a_key_is_needed_where_widths_differ(void **state) {
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 2, .Lk = 2, .H = 2, .d = 2, .Ek = 5});
  fixture.args.key = fixture.args.value = NULL;
  baseline_expect_call_fails(MHA_ERROR_NULL, "key");
  test_release(&fixture);
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 2, .Lk = 2, .H = 2, .d = 2, .Ev = 5});
  fixture.args.value = NULL;
  baseline_expect_call_fails(MHA_ERROR_NULL, "value");
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
    baseline_expect_error(mha_context_create(&options, &context, &error), MHA_ERROR_VALUE, &error,
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
    baseline_expect_error(mha_workspace_bytes(context, NULL, &shape, &bytes, &error),
                          rows[i].status, &error, rows[i].word);
    assert_int_equal(bytes, 77);
    baseline_expect_error(mha_context_reserve(context, NULL, &shape, &error), rows[i].status,
                          &error, rows[i].word);
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
  MERGE_,
  BACK_,
  ATTEND_BACK_,
  LAST_SIZED = ATTEND_BACK_
} sized;

static const size_t known_bytes[] = {sizeof(mha_config),
                                     sizeof(mha_matrices),
                                     sizeof(mha_context_options),
                                     sizeof(mha_shape),
                                     sizeof(mha_rules),
                                     sizeof(mha_results),
                                     sizeof(mha_forward_args),
                                     sizeof(mha_attend_args),
                                     sizeof(mha_cache_options),
                                     sizeof(mha_config),
                                     sizeof(mha_merge_args),
                                     sizeof(mha_backward_args),
                                     sizeof(mha_attend_backward_args)};
static const char *const sized_names[] = {"config",  "matrices", "options", "shape",   "rules",
                                          "results", "args",     "args",    "options", "config",
                                          "args",    "back",     "back"};

static test_backward back; /* what is wanted of the last two */

static bool is_core(sized which) {
  return which == ATTEND_ || which == ATTEND_BACK_;
}

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
  case BACK_:
    status = mha_backward(context, weights, &f->args, structure, error);
    break;
  case ATTEND_BACK_:
    status = mha_attend_backward(context, &f->q, &f->k, &f->v, &f->attend_args, structure, error);
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
  test_backward_build(&back, &fixture);
  const void *all[] = {
      &fixture.config,  &fixture.matrices, &fixture.options,     &shape, &fixture.rules,
      &fixture.results, &fixture.args,     &fixture.attend_args, &cache, &got,
      &merge,           &back.args,        &back.attend};
  return all[which];
}

/* Neither a result nor a gradient was written. */
static void expect_untouched(void) {
  baseline_expect_untouched();
  test_backward_expect_poison(&back);
}

static void every_size_of_every_struct(void **state) {
  enum { TAIL = 40 };
  (void)state;
  for (int which = CONFIG_; which <= LAST_SIZED; which++) {
    mha_error error;
    const size_t known = known_bytes[which];
    baseline_build(is_core((sized)which) ? CORE : LAYER);
    char *structure = test_pool_bytes(&fixture.pool, (known + TAIL + 7) / 8 * 8);
    memset(structure, 0, known + TAIL);
    memcpy(structure, right_struct((sized)which), known);
    for (size_t bytes = 0; bytes < known; bytes++) {
      memcpy(structure, &bytes, sizeof bytes);
      test_note("%s of %zu bytes", sized_names[which], bytes);
      baseline_fill_with_garbage(&error);
      baseline_expect_error(call_with((sized)which, structure, &error), MHA_ERROR_STRUCT_SIZE,
                            &error, sized_names[which]);
      expect_untouched();
    }
    for (size_t bytes = known + 1; bytes <= known + TAIL; bytes++) {
      memcpy(structure, &bytes, sizeof bytes);
      test_note("%s of %zu bytes", sized_names[which], bytes);
      structure[bytes - 1] = 1; /* something this version does not know */
      baseline_expect_error(call_with((sized)which, structure, &error), MHA_ERROR_STRUCT_SIZE,
                            &error, sized_names[which]);
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
  for (int which = CONFIG_; which <= LAST_SIZED; which++)
    for (size_t i = 0; i < COUNT(sizes); i++) {
      mha_error error;
      const size_t known = known_bytes[which];
      baseline_build(is_core((sized)which) ? CORE : LAYER);
      char *structure = test_pool_bytes(&fixture.pool, known);
      memcpy(structure, right_struct((sized)which), known);
      memcpy(structure, &sizes[i], sizeof sizes[i]);
      test_note("%s of %zu bytes", sized_names[which], sizes[i]);
      baseline_fill_with_garbage(&error);
      baseline_expect_error(call_with((sized)which, structure, &error), MHA_ERROR_STRUCT_SIZE,
                            &error, "MHA_INIT");
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

/* The four results, and how to make one lie elsewhere. */
static size_t list_outputs(baseline_region *r) {
  const test_fixture *f = &fixture;
  const baseline_region all[] = {
      {"output", f->output.data, (size_t)f->output.floats * sizeof(float)},
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
static void expect_overlap(size_t which, const baseline_region *output,
                           const baseline_region *other) {
  char *begin = other->data;
  const size_t last = (other->bytes - 1) / sizeof(float) * sizeof(float);
  char *places[] = {begin + last, begin + sizeof(float) - output->bytes};
  for (size_t i = 0; i < COUNT(places); i++) {
    test_note("%s laid over %s, place %zu", output->name, other->name, i);
    move_output(which, (float *)(void *)places[i]);
    baseline_expect_call_fails(MHA_ERROR_OVERLAP, output->name);
  }
  move_output(which, output->data);
}

static void outputs_overlap_nothing(void **state) {
  const baseline all[] = {LAYER_RULES, CORE_RULES, LAYER_PACKED, CORE_PACKED};
  (void)state;
  for (size_t base = 0; base < COUNT(all); base++) {
    baseline_region inputs[32], outputs[4];
    baseline_build(all[base]);
    const size_t n_inputs = baseline_list_inputs(inputs), n_outputs = list_outputs(outputs);
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
    baseline_build(LAYER_RULES);
    baseline_region outputs[4];
    const size_t n_outputs = list_outputs(outputs);
    const baseline_region layers = {"the layer's sinks", sinks, sizeof sinks};
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
    baseline_build(SELF);
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
  baseline_build(LAYER_RULES);
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
    baseline_fill_with_garbage(&error);
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
