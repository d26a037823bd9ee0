/* Element types where they do not belong, and rows, strides and leading dimensions that would cut a
 * block: each is its own status, names what is wrong, and nothing is written. */
#include "baseline.h"

#include <inttypes.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const int32_t no_types[] = {-1, MHA_Q4_0 + 1, 255, INT32_MIN, INT32_MAX};

/* ---- Layers ---------------------------------------------------------------------------------- */

/* Widths that differ, each 96 or more but for one that is no whole block. */
typedef struct layer {
  int64_t Eq, Ek, Ev, Eo, d, dv;
  bool out_in;
  int32_t type; /* of the matrix that is wrong; the others are float32 */
  int which;
  mha_status status;
  const char *word;
} layer;

static void build_layer(const layer *l) {
  test_build(&fixture, &(test_case){.seed = 1,
                                    .Lq = 2,
                                    .Lk = 2,
                                    .H = 2,
                                    .d = l->d,
                                    .dv = l->dv,
                                    .Eq = l->Eq,
                                    .Ek = l->Ek,
                                    .Ev = l->Ev,
                                    .Eo = l->Eo,
                                    .out_in = l->out_in});
}

static int32_t *element_of(int which) {
  int32_t *all[] = {&fixture.matrices.query_element, &fixture.matrices.key_element,
                    &fixture.matrices.value_element, &fixture.matrices.output_element};
  return all[which];
}

static int64_t *ld_of(int which) {
  int64_t *all[] = {&fixture.matrices.query_ld, &fixture.matrices.key_ld,
                    &fixture.matrices.value_ld, &fixture.matrices.output_ld};
  return all[which];
}

static void rows_that_are_no_whole_blocks(void **state) {
  const layer layers[] = {
      /* IN_OUT: rows of H·d, G·d, G·dv, Eo */
      {64, 64, 64, 64, 40, 32, false, MHA_Q8_0, 0, MHA_ERROR_SIZE, "matrices.query"},
      {64, 64, 64, 64, 40, 32, false, MHA_Q4_0, 1, MHA_ERROR_SIZE, "matrices.key"},
      {64, 64, 64, 64, 32, 9, false, MHA_Q8_0, 2, MHA_ERROR_SIZE, "matrices.value"},
      {64, 64, 64, 33, 32, 32, false, MHA_Q4_0, 3, MHA_ERROR_SIZE, "matrices.output"},
      {64, 64, 64, 31, 32, 32, false, MHA_Q8_0, 3, MHA_ERROR_SIZE, "31"},
      /* OUT_IN: rows of Eq, Ek, Ev, H·dv */
      {48, 64, 64, 64, 32, 32, true, MHA_Q8_0, 0, MHA_ERROR_SIZE, "matrices.query"},
      {64, 65, 64, 64, 32, 32, true, MHA_Q4_0, 1, MHA_ERROR_SIZE, "matrices.key"},
      {64, 64, 1, 64, 32, 32, true, MHA_Q8_0, 2, MHA_ERROR_SIZE, "matrices.value"},
      {64, 64, 64, 64, 32, 8, true, MHA_Q4_0, 3, MHA_ERROR_SIZE, "matrices.output"},
      /* the other dimension need not be */
      {33, 33, 33, 64, 32, 32, false, MHA_Q8_0, 0, MHA_OK, ""},
      {64, 64, 64, 7, 5, 32, true, MHA_Q4_0, 3, MHA_OK, ""},
      {33, 31, 1, 3, 5, 7, true, MHA_F16, 1, MHA_OK, ""},
      {33, 31, 1, 3, 5, 7, false, MHA_BF16, 2, MHA_OK, ""},
  };
  (void)state;
  for (size_t k = 0; k < COUNT(layers); k++)
    for (int borrow = 0; borrow < 2; borrow++) {
      mha_weights *weights = NULL;
      build_layer(&layers[k]);
      test_note("layer %zu", k);
      fixture.matrices.ownership = borrow ? MHA_BORROW : MHA_COPY;
      *element_of(layers[k].which) = (int32_t)layers[k].type;
      if (layers[k].status)
        baseline_expect_create_fails(layers[k].status, layers[k].word);
      else
        test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK,
                    NULL);
      mha_weights_destroy(weights);
      test_release(&fixture);
    }
}

static void leading_dimensions_that_cut_blocks(void **state) {
  const layer whole = {64, 64, 64, 64, 32, 32, false, MHA_Q8_0, 0, MHA_OK, ""};
  const char *const words[] = {"matrices.query_ld", "matrices.key_ld", "matrices.value_ld",
                               "matrices.output_ld"};
  (void)state;
  for (int which = 0; which < 4; which++)
    for (int out_in = 0; out_in < 2; out_in++)
      for (int32_t type = MHA_F16; type <= MHA_Q4_0; type++)
        for (int64_t ld = 65; ld <= 95; ld += 15) {
          if (type < MHA_Q8_0)
            continue;
          layer l = whole;
          l.out_in = out_in;
          build_layer(&l);
          *element_of(which) = type;
          *ld_of(which) = ld;
          baseline_expect_create_fails(MHA_ERROR_STRIDE, words[which]);
          *ld_of(which) = 32; /* whole blocks, but less than a row */
          baseline_expect_create_fails(MHA_ERROR_STRIDE, words[which]);
          *ld_of(which) = -64;
          baseline_expect_create_fails(MHA_ERROR_STRIDE, words[which]);
          test_release(&fixture);
        }
}

/* Of an absent matrix too. */
static void types_that_are_none(void **state) {
  const char *const words[] = {"matrices.query_element", "matrices.key_element",
                               "matrices.value_element", "matrices.output_element"};
  (void)state;
  for (int which = 0; which < 4; which++)
    for (size_t k = 0; k < COUNT(no_types); k++)
      for (int absent = 0; absent < 2; absent++) {
        const layer l = {64, 64, 64, 64, 32, 32, false, MHA_F32, 0, MHA_OK, ""};
        build_layer(&l);
        if (absent)
          fixture.matrices.query = fixture.matrices.key = fixture.matrices.value =
              fixture.matrices.output = NULL;
        *element_of(which) = no_types[k];
        baseline_expect_create_fails(MHA_ERROR_UNSUPPORTED, words[which]);
        test_release(&fixture);
      }
}

/* ---- Caches ---------------------------------------------------------------------------------- */

typedef struct cache {
  int32_t type, reserved;
  int64_t d, dv;
  mha_status status;
  const char *word;
} cache;

static void caches_that_are_none(void **state) {
  const cache caches[] = {
      {MHA_Q4_0, 0, 32, 32, MHA_ERROR_UNSUPPORTED, "options.type"},
      {-1, 0, 32, 32, MHA_ERROR_UNSUPPORTED, "options.type"},
      {5, 0, 32, 32, MHA_ERROR_UNSUPPORTED, "options.type"},
      {INT32_MIN, 0, 32, 32, MHA_ERROR_UNSUPPORTED, "options.type"},
      {MHA_Q8_0, 0, 48, 32, MHA_ERROR_SIZE, "48"},
      {MHA_Q8_0, 0, 32, 48, MHA_ERROR_SIZE, "48"},
      {MHA_Q8_0, 0, 16, 0, MHA_ERROR_SIZE, "16"},
      {MHA_Q8_0, 0, 1, 32, MHA_ERROR_SIZE, "head sizes"},
      {MHA_F16, 1, 32, 32, MHA_ERROR_VALUE, "reserved"},
      {MHA_Q8_0, -1, 32, 32, MHA_ERROR_VALUE, "reserved"},
      {MHA_Q8_0, 0, 64, 32, MHA_OK, ""},
      {MHA_Q8_0, 0, 96, 0, MHA_OK, ""},
      {MHA_BF16, 0, 1, 3, MHA_OK, ""},
  };
  (void)state;
  for (size_t k = 0; k < COUNT(caches); k++) {
    test_allocator allocator;
    mha_cache_options o;
    mha_error error;
    int anything = 0;
    mha_cache *made = (mha_cache *)(void *)&anything;
    test_allocator_init(&allocator);
    MHA_INIT(&o);
    o.n_entries = o.capacity = 3;
    o.n_kv_heads = 2;
    o.head_size = caches[k].d;
    o.value_head_size = caches[k].dv;
    o.type = caches[k].type;
    o.reserved = caches[k].reserved;
    o.allocator = &allocator.mha;
    test_note("cache %zu", k);
    baseline_fill_with_garbage(&error);
    const mha_status status = mha_cache_create(&o, &made, &error);
    if (caches[k].status) {
      baseline_expect_error(status, caches[k].status, &error, caches[k].word);
      assert_null(made);
      assert_int_equal(allocator.calls, 0);
    } else {
      test_expect(status, MHA_OK, &error);
      mha_cache_destroy(made);
    }
    test_allocator_check(&allocator);
  }
}

/* Head sizes that a layer brings are checked like others. */
static void a_cache_for_a_layer_of_other_heads(void **state) {
  mha_weights *weights = NULL;
  mha_cache *made = NULL;
  mha_cache_options o;
  mha_error error;
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 1, .H = 2, .d = 48, .source = TEST_SELF});
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK, NULL);
  MHA_INIT(&o);
  o.n_entries = o.capacity = 3;
  o.weights = weights;
  o.type = MHA_Q8_0;
  baseline_expect_error(mha_cache_create(&o, &made, &error), MHA_ERROR_SIZE, &error, "48");
  assert_null(made);
  o.type = MHA_F16;
  test_expect(mha_cache_create(&o, &made, &error), MHA_OK, &error);
  mha_cache_destroy(made);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* ---- The core -------------------------------------------------------------------------------- */

static void build_core(int32_t k_type, int32_t v_type) {
  test_build(&fixture, &(test_case){.seed = 2,
                                    .core = true,
                                    .B = 2,
                                    .Lq = 3,
                                    .Lk = 5,
                                    .H = 4,
                                    .G = 2,
                                    .d = 32,
                                    .layout = TEST_PADDED,
                                    .k_type = k_type,
                                    .v_type = v_type,
                                    .want = TEST_WANT_ALL});
  test_poison_results(&fixture);
}

/* Queries are float32. */
static void queries_of_other_types(void **state) {
  (void)state;
  for (int32_t type = MHA_F16; type <= MHA_Q4_0; type++) {
    build_core(MHA_F16, MHA_F16);
    fixture.q.element = type;
    baseline_expect_call_fails(MHA_ERROR_UNSUPPORTED, "q.element");
    test_release(&fixture);
  }
  for (size_t k = 0; k < COUNT(no_types); k++) {
    build_core(MHA_F32, MHA_F32);
    fixture.q.element = no_types[k];
    baseline_expect_call_fails(MHA_ERROR_UNSUPPORTED, "q.element");
    test_release(&fixture);
  }
}

static void keys_and_values_of_no_type(void **state) {
  (void)state;
  for (size_t k = 0; k <= COUNT(no_types); k++)
    for (int values = 0; values < 2; values++) {
      build_core(MHA_F32, MHA_F32);
      *(values ? &fixture.v.element : &fixture.k.element) =
          k < COUNT(no_types) ? no_types[k] : MHA_Q4_0;
      baseline_expect_call_fails(MHA_ERROR_UNSUPPORTED, values ? "v.element" : "k.element");
      test_release(&fixture);
    }
}

static void strides_that_cut_blocks(void **state) {
  (void)state;
  for (int values = 0; values < 2; values++)
    for (int which = 0; which < 3; which++)
      for (int64_t by = 1; by < 32; by += 15) {
        build_core(MHA_Q8_0, MHA_Q8_0);
        mha_tensor *t = values ? &fixture.v : &fixture.k;
        *(which == 0 ? &t->batch_stride : which == 1 ? &t->row_stride : &t->head_stride) += by;
        baseline_expect_call_fails(MHA_ERROR_STRIDE, values ? "v has" : "k has");
        test_release(&fixture);
      }
}

/* Sizes that are no whole blocks, dense or not. */
static void heads_that_are_no_whole_blocks(void **state) {
  (void)state;
  for (int values = 0; values < 2; values++)
    for (int dense = 0; dense < 2; dense++) {
      test_build(&fixture, &(test_case){.seed = 2,
                                        .core = true,
                                        .Lq = 3,
                                        .Lk = 5,
                                        .H = 2,
                                        .d = values ? 32 : 48,
                                        .dv = values ? 48 : 32,
                                        .layout = dense ? TEST_DENSE : TEST_PADDED,
                                        .want = TEST_WANT_ALL});
      test_poison_results(&fixture);
      *(values ? &fixture.v.element : &fixture.k.element) = MHA_Q8_0;
      baseline_expect_call_fails(MHA_ERROR_SIZE, values ? "v.size" : "k.size");
      test_release(&fixture);
    }
}

/* The ranges of what is stored are those of its bytes: an output right behind them overlaps
 * nothing, one on their last byte does. */
static void outputs_beside_and_over_stored_rows(void **state) {
  (void)state;
  for (int32_t type = MHA_F16; type <= MHA_Q8_0; type++)
    for (int values = 0; values < 2; values++)
      for (int over = 0; over < 2; over++) {
        mha_context *context = NULL;
        mha_error error;
        test_build(&fixture, &(test_case){.seed = 2,
                                          .core = true,
                                          .Lq = 3,
                                          .Lk = 4,
                                          .H = 2,
                                          .d = 32,
                                          .k_type = (int32_t)type,
                                          .v_type = (int32_t)type});
        test_view *v = values ? &fixture.value : &fixture.key;
        const size_t bytes = mha_element_bytes(type, v->floats);
        const size_t output_bytes = (size_t)fixture.output.floats * sizeof(float);
        unsigned char *block = test_pool_bytes(&fixture.pool, bytes + output_bytes);
        memcpy(block, v->stored, bytes);
        (values ? &fixture.v : &fixture.k)->data = block;
        fixture.attend_args.output = (float *)(void *)(block + bytes - (over ? 4 : 0));
        test_expect(mha_context_create(&fixture.options, &context, NULL), MHA_OK, NULL);
        assert_int_equal(bytes % sizeof(float), 0);
        test_expect(test_call(&fixture, context, NULL, &error), over ? MHA_ERROR_OVERLAP : MHA_OK,
                    &error);
        assert_memory_equal(block, v->stored, bytes);
        mha_context_destroy(context);
        test_release(&fixture);
      }
}

/* ---- Shapes ---------------------------------------------------------------------------------- */

static void shapes_of_no_type(void **state) {
  static const int64_t no_pages[] = {-16, 1, 8, 17, 48, INT64_MAX};
  (void)state;
  for (int with_layer = 0; with_layer < 2; with_layer++)
    for (size_t k = 0; k <= COUNT(no_types); k++) {
      mha_weights *weights = NULL;
      mha_context *context = NULL;
      mha_shape shape;
      mha_error error;
      size_t bytes = 42;
      baseline_build(LAYER);
      if (with_layer)
        test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK,
                    NULL);
      test_expect(mha_context_create(&fixture.options, &context, NULL), MHA_OK, NULL);
      MHA_INIT(&shape);
      shape.batch = shape.query_length = shape.n_heads = shape.value_head_size = 1;
      shape.cached = 1;
      shape.cache_type = k < COUNT(no_types) ? no_types[k] : MHA_Q4_0;
      baseline_expect_error(mha_workspace_bytes(context, weights, &shape, &bytes, &error),
                            MHA_ERROR_VALUE, &error, "shape.cache_type");
      assert_int_equal(bytes, 42);
      baseline_expect_error(mha_context_reserve(context, weights, &shape, &error), MHA_ERROR_VALUE,
                            &error, "shape.cache_type");
      shape.cache_type = MHA_F16;
      shape.backward = 3;
      baseline_expect_error(mha_workspace_bytes(context, weights, &shape, &bytes, &error),
                            MHA_ERROR_VALUE, &error, "shape.backward");
      shape.backward = MHA_BACKWARD_NONE;
      for (size_t p = 0; p < COUNT(no_pages); p++) {
        shape.cache_page_tokens = no_pages[p];
        baseline_expect_error(mha_workspace_bytes(context, weights, &shape, &bytes, &error),
                              MHA_ERROR_VALUE, &error, "shape.cache_page_tokens");
      }
      mha_context_destroy(context);
      mha_weights_destroy(weights);
      test_release(&fixture);
    }
}

/* ---- Masks and biases ------------------------------------------------------------------------ */

static void masks_and_biases_of_other_types(void **state) {
  (void)state;
  for (int32_t type = MHA_F16; type <= MHA_Q4_0; type++)
    for (int bias = 0; bias < 2; bias++) {
      baseline_build(CORE_RULES);
      *(bias ? &fixture.rules.bias.element : &fixture.rules.attend.element) = type;
      baseline_expect_call_fails(MHA_ERROR_UNSUPPORTED,
                                 bias ? "rules.bias.element" : "rules.attend.element");
      test_release(&fixture);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rows_that_are_no_whole_blocks),
      cmocka_unit_test(leading_dimensions_that_cut_blocks),
      cmocka_unit_test(types_that_are_none),
      cmocka_unit_test(caches_that_are_none),
      cmocka_unit_test(a_cache_for_a_layer_of_other_heads),
      cmocka_unit_test(queries_of_other_types),
      cmocka_unit_test(keys_and_values_of_no_type),
      cmocka_unit_test(strides_that_cut_blocks),
      cmocka_unit_test(heads_that_are_no_whole_blocks),
      cmocka_unit_test(outputs_beside_and_over_stored_rows),
      cmocka_unit_test(shapes_of_no_type),
      cmocka_unit_test(masks_and_biases_of_other_types),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
