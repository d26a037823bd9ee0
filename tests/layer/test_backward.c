/* The way back through a layer against the judge: random layers over the product of all options,
 * then sweeps of what a few random ones may miss. */
#include "backward_fixture.h"

#include <stdlib.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_back back; /* one at a time; too large for a stack */

static void random_layers(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 41);
  for (uint64_t seed = 1; seed <= (test_small() ? 100 : 1000); seed++) {
    const test_back_case c = test_back_draw(&random, seed, false);
    test_back_check(&c);
  }
}

/* Biases of everything, and all that prepares Q and K. */
static void every_norm_and_rope(void **state) {
  (void)state;
  for (int norm = MHA_NORM_NONE; norm <= MHA_NORM_FULL; norm++)
    for (int rope = MHA_ROPE_NONE; rope <= MHA_ROPE_INTERLEAVED; rope++)
      for (int variant = 0; variant < 16; variant++)
        test_back_check(&(test_back_case){.forward = {.seed = (uint64_t)variant,
                                                      .B = 2,
                                                      .Lq = 9,
                                                      .Lk = 13,
                                                      .H = 4,
                                                      .G = 2,
                                                      .d = 6,
                                                      .dv = 5,
                                                      .Eq = 10,
                                                      .source = (test_source)(variant % 3),
                                                      .biases = TEST_ALL,
                                                      .norm = (mha_norm)norm,
                                                      .norm_ones = variant & 1,
                                                      .rope = (mha_rope)rope,
                                                      .rotary = variant & 2 ? 4 : 6,
                                                      .rope_tables = variant & 4,
                                                      .positions_given = variant & 8,
                                                      .query_position = 3,
                                                      .packed = variant % 5 == 0,
                                                      .packed_tail = true,
                                                      .layout = (test_layout)(variant % 3)},
                                          .accumulate = variant % 4 == 3,
                                          .kept = variant & 1});
}

static void every_way_to_lay_weights(void **state) {
  (void)state;
  for (int out_in = 0; out_in < 2; out_in++)
    for (int borrow = 0; borrow < 2; borrow++)
      for (int layout = TEST_APART; layout <= TEST_IN_BLOCK; layout++)
        for (unsigned biases = 0; biases <= TEST_ALL; biases += 3)
          test_back_check(&(test_back_case){.forward = {.seed = biases,
                                                        .B = 2,
                                                        .Lq = 5,
                                                        .Lk = 7,
                                                        .H = 4,
                                                        .G = 2,
                                                        .d = 3,
                                                        .dv = 2,
                                                        .Eq = 10,
                                                        .Eo = 9,
                                                        .out_in = out_in,
                                                        .borrow = borrow,
                                                        .weight_layout = (test_weight_layout)layout,
                                                        .biases = biases},
                                            .accumulate = biases % 2});
}

/* H·d = G·d = G·dv = the widths, so that each step can be the identity. */
static void every_matrix_absent(void **state) {
  (void)state;
  for (unsigned absent = 0; absent <= TEST_ALL; absent++)
    for (int source = TEST_CROSS; source <= TEST_SELF; source++)
      for (int accumulate = 0; accumulate < 2; accumulate++)
        test_back_check(
            &(test_back_case){.forward = {.seed = absent,
                                          .B = 2,
                                          .Lq = 6,
                                          .Lk = 9,
                                          .H = 2,
                                          .d = 4,
                                          .out_in = absent % 2,
                                          .source = (test_source)source,
                                          .layout = absent % 2 ? TEST_PADDED : TEST_LENGTH_FIRST,
                                          .query_lengths = absent & 4,
                                          .key_lengths = absent & 8,
                                          .absent = absent,
                                          .norm = absent % 3 ? MHA_NORM_NONE : MHA_NORM_PER_HEAD,
                                          .biases = TEST_ALL & (absent * 7)},
                              .dy_layout = (test_layout)(absent % 3),
                              .accumulate = accumulate,
                              .kept = absent & 2});
}

/* Beyond the panels and chunks of rows of a matrix's gradient. */
static void wide_layers_and_many_rows(void **state) {
  const int64_t sizes[][5] = {/* rows, H, d, Eq, Eo */
                              {3, 10, 110, 40, 1100},
                              {20, 5, 110, 517, 60},
                              {600, 2, 8, 9, 5},
                              {1030, 1, 16, 33, 20}};
  (void)state;
  for (size_t i = 0; i < (test_small() ? 2 : COUNT(sizes)); i++)
    for (int variant = 0; variant < 4; variant++)
      test_back_check(&(test_back_case){.forward = {.seed = i,
                                                    .B = sizes[i][0] > 100 ? 1 : 2,
                                                    .Lq = sizes[i][0],
                                                    .Lk = 7,
                                                    .H = sizes[i][1],
                                                    .d = sizes[i][2],
                                                    .Eq = sizes[i][3],
                                                    .Eo = sizes[i][4],
                                                    .out_in = variant & 1,
                                                    .query_lengths = variant & 2,
                                                    .biases = TEST_ALL,
                                                    .threads = 2,
                                                    .layout = (test_layout)(variant % 3)},
                                        .accumulate = variant & 2,
                                        .kept = variant & 1});
}

/* Several tiles of queries and keys, groups below and above the tasks that a call is cut into. */
static void long_sequences(void **state) {
  const int64_t sizes[][5] = {/* B, Lq, Lk, H, G */
                              {1, 300, 1100, 1, 1}, {1, 700, 530, 2, 1},  {1, 530, 530, 2, 2},
                              {3, 200, 150, 4, 2},  {1, 150, 1030, 8, 8}, {9, 70, 150, 2, 1}};
  (void)state;
  for (size_t i = 0; i < (test_small() ? 2 : COUNT(sizes)); i++)
    for (int variant = 0; variant < 4; variant++)
      test_back_check(&(test_back_case){.forward = {.seed = 10 * i + (uint64_t)variant,
                                                    .B = sizes[i][0],
                                                    .Lq = sizes[i][1],
                                                    .Lk = sizes[i][2],
                                                    .H = sizes[i][3],
                                                    .G = sizes[i][4],
                                                    .d = 16,
                                                    .Eq = 20,
                                                    .causal = variant & 1,
                                                    .alignment = MHA_ALIGN_BOTTOM_RIGHT,
                                                    .key_lengths = variant & 2,
                                                    .has_bias = variant == 3,
                                                    .bias_extents = TEST_FULL_ROWS,
                                                    .alibi = variant == 2,
                                                    .sinks = variant & 1,
                                                    .dropout = variant == 2 ? 0.25F : 0.0F,
                                                    .biases = TEST_Q | TEST_V | TEST_O,
                                                    .threads = 2},
                                        .kept = variant & 1});
}

/* ---- Nothing to do --------------------------------------------------------------------------- */

enum { NO_BATCH, NO_QUERIES, NO_KEYS, EMPTIES };

static const test_case emptied = {.B = 1,
                                  .Lq = 4,
                                  .Lk = 5,
                                  .H = 2,
                                  .d = 4,
                                  .Eq = 6,
                                  .biases = TEST_ALL,
                                  .norm = MHA_NORM_PER_HEAD,
                                  .alibi = true,
                                  .sinks = true};

static void check_emptied(int which, bool accumulate) {
  const unsigned inputs = 1U << TEST_D_QUERY | 1U << TEST_D_KEY | 1U << TEST_D_VALUE;
  test_back_case c = {.forward = emptied, .accumulate = accumulate};
  if (which == NO_QUERIES)
    c.forward.Lq = 0;
  if (which == NO_KEYS)
    c.forward.Lk = 0;
  test_back_build(&back, &c);
  test_note("empty %d accumulate %d", which, accumulate);
  back.f.args.flags = MHA_ALLOW_EMPTY;
  if (which == NO_BATCH) {
    back.f.args.batch = 0;
    back.wanted &= ~inputs; /* they have no rows then */
  }
  test_back_run(&back);
  for (int k = 0; k < TEST_GRADIENTS; k++) {
    const test_gradient *g = &back.gradients[k];
    const bool counts = !(which == NO_KEYS && k == TEST_D_BO); /* queries that see no key give bo */
    for (int64_t at = 0; (back.wanted & (1U << k)) && counts && at < g->floats; at++)
      if (!test_equal_bits(g->data[at], accumulate ? g->before[at] : 0.0F))
        test_failed("%s[%d] is %g", g->name, (int)at, (double)g->data[at]);
  }
  if (which != NO_BATCH)
    test_back_judge(&back);
  test_back_release(&back);
}

static void nothing_to_do(void **state) {
  (void)state;
  for (int which = 0; which < EMPTIES; which++)
    for (int accumulate = 0; accumulate < 2; accumulate++)
      check_emptied(which, accumulate);
}

/* Gradients of matrices in one block, as the matrices lie, side by side. */
static void gradients_in_one_block(void **state) {
  (void)state;
  for (int out_in = 0; out_in < 2; out_in++) {
    test_pool pool = {0};
    test_back_build(&back, &(test_back_case){.forward = {.seed = 3,
                                                         .Lq = 6,
                                                         .H = 4,
                                                         .G = 2,
                                                         .d = 3,
                                                         .Eq = 5,
                                                         .source = TEST_SELF,
                                                         .out_in = out_in,
                                                         .weight_layout = TEST_IN_BLOCK}});
    test_back_run(&back);
    float *apart = test_back_copy(&back);
    const int64_t E = back.f.c.Eq, out = back.f.wq.out + back.f.wk.out + back.f.wv.out;
    const test_matrix *all[] = {&back.f.wq, &back.f.wk, &back.f.wv};
    float *block = test_pool_floats(&pool, E * out);
    for (int64_t w = 0, first = 0; w < 3; first += all[w]->out, w++) {
      test_gradient *g = &back.gradients[TEST_D_WQ + w];
      g->data = block + (out_in ? first * E : first);
    }
    mha_error error;
    test_fill_poison(block, E * out);
    test_expect(test_back_call(&back, &error), MHA_OK, &error);
    test_back_same(&back, apart, NULL, NULL);
    free(apart);
    test_back_release(&back);
    test_pool_free(&pool);
  }
}

/* A layer that was converted has copies without gaps, as mha_weights_matrices shows. */
static void gradients_of_a_converted_layer(void **state) {
  (void)state;
  for (int out_in = 0; out_in < 2; out_in++) {
    mha_weights *converted = NULL;
    mha_matrices shown;
    mha_error error;
    test_back_build(&back, &(test_back_case){.forward = {.seed = 4,
                                                         .Lq = 6,
                                                         .H = 4,
                                                         .d = 3,
                                                         .Eq = 5,
                                                         .Eo = 7,
                                                         .out_in = out_in,
                                                         .borrow = true,
                                                         .weight_layout = TEST_GAPS}});
    test_back_run(&back);
    float *apart = test_back_copy(&back), *at = apart;
    test_expect(
        mha_weights_convert(back.weights, MHA_F32, &back.f.allocator.mha, &converted, &error),
        MHA_OK, &error);
    MHA_INIT(&shown);
    test_expect(mha_weights_matrices(converted, &shown, &error), MHA_OK, &error);
    mha_weights_destroy(back.weights);
    back.weights = converted;
    test_expect(test_back_call(&back, &error), MHA_OK, &error);
    for (int k = 0; k < TEST_GRADIENTS; k++) {
      const test_gradient *g = &back.gradients[k];
      const bool is_matrix = k >= TEST_D_WQ && k <= TEST_D_WO;
      for (int64_t r = 0; is_matrix && r < g->rows; r++)
        test_same_bits(g->name, (test_shape){{1, 1, 1, g->columns}}, g->data + r * g->columns,
                       at + g->row_at[r]);
      at += g->floats;
    }
    assert_int_equal(shown.query_ld, back.gradients[TEST_D_WQ].columns);
    free(apart);
    test_back_release(&back);
  }
}

/* A tape that was filled by a longer call, then by a shorter one, then by the longer one again. */
static void a_tape_is_filled_again(void **state) {
  const int64_t lengths[] = {20, 7, 20};
  (void)state;
  test_back_build(&back, &(test_back_case){.forward = {.seed = 6,
                                                       .Lq = 20,
                                                       .Lk = 15,
                                                       .H = 4,
                                                       .G = 2,
                                                       .d = 6,
                                                       .biases = TEST_ALL,
                                                       .norm = MHA_NORM_PER_HEAD,
                                                       .rope = MHA_ROPE_HALVES},
                                           .kept = true});
  for (size_t k = 0; k < COUNT(lengths); k++) {
    mha_tape *tape = back.tape;
    back.f.args.query_length = lengths[k];
    test_back_forward(&back);
    test_back_run(&back);
    float *first = test_back_copy(&back);
    back.tape = NULL;
    test_back_run(&back);
    test_back_same(&back, first, NULL, NULL);
    if (lengths[k] == 20)
      test_back_judge(&back);
    back.tape = tape;
    free(first);
  }
  test_back_release(&back);
}

static void large_heads(void **state) {
  const int64_t large[] = {96, 128, 200, 256};
  (void)state;
  for (size_t i = 0; i < (test_small() ? 1 : COUNT(large)); i++)
    test_back_check(&(test_back_case){.forward = {.seed = i,
                                                  .Lq = 40,
                                                  .H = 2,
                                                  .d = large[i],
                                                  .Eq = 100,
                                                  .source = TEST_SELF,
                                                  .rope = MHA_ROPE_INTERLEAVED,
                                                  .biases = TEST_ALL},
                                      .kept = i % 2});
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_norm_and_rope),    cmocka_unit_test(every_way_to_lay_weights),
      cmocka_unit_test(every_matrix_absent),    cmocka_unit_test(wide_layers_and_many_rows),
      cmocka_unit_test(long_sequences),         cmocka_unit_test(nothing_to_do),
      cmocka_unit_test(gradients_in_one_block), cmocka_unit_test(gradients_of_a_converted_layer),
      cmocka_unit_test(a_tape_is_filled_again), cmocka_unit_test(large_heads),
      cmocka_unit_test(random_layers),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
