/* The way back through the core alone against the judge. */
#include "backward_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_back back; /* one at a time; too large for a stack */

static void random_calls(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 43);
  for (uint64_t seed = 1; seed <= (test_small() ? 100 : 2000); seed++) {
    const test_back_case c = test_back_draw(&random, seed, true);
    test_back_check(&c);
  }
}

static void every_layout(void **state) {
  (void)state;
  for (int layout = TEST_DENSE; layout <= TEST_HEAD_FIRST; layout++)
    for (int64_t H = 1; H <= 4; H++)
      for (int64_t G = 1; G <= H; G++)
        for (int64_t B = 1; H % G == 0 && B <= 3; B++)
          test_back_check(&(test_back_case){.forward = {.seed = (uint64_t)(100 * H + 10 * G + B),
                                                        .core = true,
                                                        .B = B,
                                                        .Lq = 9,
                                                        .Lk = 14,
                                                        .H = H,
                                                        .G = G,
                                                        .d = 5,
                                                        .dv = 3,
                                                        .layout = (test_layout)layout,
                                                        .at_front = B == 2},
                                            .dy_layout = (test_layout)((layout + H) % 4),
                                            .accumulate = B == 3,
                                            .kept = H % 2});
}

static void every_size(void **state) {
  const int64_t lengths[] = {1, 7, 16, 65, 129, 257, 600};
  const int64_t sizes[] = {1, 8, 33, 64};
  const size_t n = test_small() ? 3 : COUNT(lengths);
  (void)state;
  for (size_t i = 0; i < n; i++)
    for (size_t j = 0; j < n; j++)
      for (size_t s = 0; s < (test_small() ? 2 : COUNT(sizes)); s++)
        test_back_check(
            &(test_back_case){.forward = {.seed = 100 * i + 10 * j + s,
                                          .core = true,
                                          .Lq = lengths[i],
                                          .Lk = lengths[j],
                                          .H = 1 + (int64_t)(s % 2),
                                          .G = 1,
                                          .d = sizes[s],
                                          .dv = sizes[COUNT(sizes) - 1 - s],
                                          .causal = s == 2,
                                          .threads = 2,
                                          .layout = s % 2 ? TEST_DENSE : TEST_HEAD_FIRST},
                              .kept = s > 1});
}

/* Every extent that a bias may have, over the borders of tiles. */
static void every_bias(void **state) {
  (void)state;
  for (unsigned extents = 0; extents <= TEST_FULL; extents++)
    for (int strides = 0; strides < 2; strides++)
      for (int accumulate = 0; accumulate < 2; accumulate++)
        for (int64_t L = 9; L <= (test_small() ? 9 : 150); L += 141)
          test_back_check(&(test_back_case){.forward = {.seed = extents,
                                                        .core = true,
                                                        .B = 2,
                                                        .Lq = L,
                                                        .Lk = 2 * L,
                                                        .H = 4,
                                                        .G = 2,
                                                        .d = 5,
                                                        .causal = true,
                                                        .alignment = MHA_ALIGN_BOTTOM_RIGHT,
                                                        .key_lengths = true,
                                                        .has_bias = true,
                                                        .bias_hides = true,
                                                        .bias_extents = extents,
                                                        .mask_strides = strides,
                                                        .dropout = strides ? 0.2F : 0.0F,
                                                        .threads = 2},
                                            .accumulate = accumulate,
                                            .kept = accumulate});
}

static void stored_keys_and_values(void **state) {
  const int32_t types[] = {MHA_F32, MHA_F16, MHA_BF16, MHA_Q8_0};
  (void)state;
  for (size_t k = 0; k < COUNT(types); k++)
    for (size_t v = 0; v < COUNT(types); v++)
      for (int layout = TEST_DENSE; layout <= TEST_HEAD_FIRST; layout++)
        test_back_check(&(test_back_case){.forward = {.seed = 10 * k + v,
                                                      .core = true,
                                                      .B = 2,
                                                      .Lq = 20,
                                                      .Lk = 70,
                                                      .H = 2,
                                                      .G = 1,
                                                      .d = 32,
                                                      .dv = 64,
                                                      .layout = (test_layout)layout,
                                                      .k_type = types[k],
                                                      .v_type = types[v],
                                                      .odd_addresses = layout % 2},
                                          .accumulate = k == v,
                                          .kept = layout % 2});
}

static void sinks_of_any_size(void **state) {
  const float sinks[] = {-INFINITY, -1e30F, -200.0F, 0.0F, 20.0F, 95.0F, 200.0F, 1e30F};
  (void)state;
  for (size_t i = 0; i < COUNT(sinks); i++)
    for (int kept = 0; kept < 2; kept++) {
      test_back_build(
          &back,
          &(test_back_case){
              .forward = {.seed = i, .core = true, .Lq = 4, .Lk = 5, .H = 2, .d = 3, .sinks = true},
              .kept = kept});
      back.f.sinks[1] = sinks[i];
      if (kept)
        test_back_forward(&back);
      test_back_run(&back);
      test_back_judge(&back);
      test_back_release(&back);
    }
}

/* Offsets and windows far beyond any length neither overflow nor wrap: a query sees all keys, as
 * without them, or none. */
static void offsets_and_windows_without_end(void **state) {
  const struct {
    int causal;
    int64_t offset, left, right;
    bool seen;
  } rows[] = {
      {1, INT64_MAX, -1, -1, true},          {1, INT64_MIN, -1, -1, false},
      {0, 0, INT64_MAX, INT64_MAX, true},    {0, INT64_MAX, 0, -1, false},
      {0, INT64_MIN, -1, 0, false},          {1, INT64_C(1) << 40, INT64_C(1) << 41, 0, true},
      {0, -(INT64_C(1) << 40), 0, 0, false},
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    for (int each = 0; each < 2; each++) {
      test_back_build(&back, &(test_back_case){.forward = {.seed = i,
                                                           .core = true,
                                                           .Lq = 3,
                                                           .Lk = 5,
                                                           .H = 2,
                                                           .d = 2,
                                                           .sinks = true,
                                                           .window = true,
                                                           .left = -1,
                                                           .right = -1,
                                                           .alignment = MHA_ALIGN_OFFSET,
                                                           .offset_each = each}});
      test_note("offset or window %zu", i);
      test_back_run(&back);
      float *open = test_back_copy(&back), *at = open;
      back.f.rules.causal = rows[i].causal;
      back.f.rules.offset = back.f.offsets[0] = rows[i].offset;
      back.f.rules.window_left = rows[i].left;
      back.f.rules.window_right = rows[i].right;
      test_back_run(&back);
      for (int k = 0; k < TEST_GRADIENTS; at += back.gradients[k++].floats)
        for (int64_t n = 0; n < back.gradients[k].floats; n++)
          assert_true(test_equal_bits(back.gradients[k].data[n], rows[i].seen ? at[n] : 0.0F));
      free(open);
      test_back_release(&back);
    }
}

/* ---- Addresses ------------------------------------------------------------------------------- */

/* A tensor spread over entries or heads by strides of 0 has no gradient of its own; the others
 * have. */
static void broadcast_tensors_have_no_gradient(void **state) {
  enum { B = 3, LQ = 4, LK = 6, H = 2, D = 3 };
  (void)state;
  for (int axis = 0; axis < 2; axis++) {
    mha_error error;
    test_back_build(
        &back,
        &(test_back_case){
            .forward = {.seed = 8, .core = true, .B = B, .Lq = LQ, .Lk = LK, .H = H, .d = D}});
    for (int64_t b = 0; b < B; b++)
      for (int64_t j = 0; j < LK; j++)
        for (int64_t h = 0; h < H; h++)
          memcpy(test_at(&back.f.key, b, j, h, 0),
                 test_at(&back.f.key, axis == 0 ? 0 : b, j, axis == 1 ? 0 : h, 0),
                 D * sizeof(float));
    back.f.k.batch_stride = axis == 0 ? 0 : back.f.key.batch_stride;
    back.f.k.row_stride = back.f.key.row_stride;
    back.f.k.head_stride = axis == 1 ? 0 : back.f.key.head_stride;
    back.f.k.size_stride = 1;
    test_fill_poison(back.gradients[TEST_D_KEY].data, back.gradients[TEST_D_KEY].floats);
    test_fill_poison(back.gradients[TEST_D_QUERY].data, back.gradients[TEST_D_QUERY].floats);
    test_expect(test_back_call(&back, &error), MHA_ERROR_OVERLAP, &error);
    assert_true(test_is_poison(test_back_at(&back, TEST_D_KEY, 0, 0)));
    assert_true(test_is_poison(test_back_at(&back, TEST_D_QUERY, 0, 0)));
    back.wanted &= ~(1U << TEST_D_KEY);
    test_back_run(&back);
    test_back_judge(&back);
    test_back_release(&back);
  }
}

/* Gradients as parts of one [B][L][3][H][d] buffer, as q, k and v of one projection lie. */
static void packed_qkv(void **state) {
  enum { B = 2, L = 11, H = 3, D = 4, ROW = 3 * H * D };
  test_pool pool = {0};
  mha_error error;
  (void)state;
  test_back_build(
      &back,
      &(test_back_case){
          .forward = {
              .seed = 5, .core = true, .B = B, .Lq = L, .Lk = L, .H = H, .d = D, .causal = true}});
  float *block = test_pool_floats(&pool, (int64_t)B * L * ROW);
  float *gradients = test_pool_floats(&pool, (int64_t)B * L * ROW);
  const test_view *views[] = {&back.f.query, &back.f.key, &back.f.value};
  mha_tensor *tensors[] = {&back.f.q, &back.f.k, &back.f.v};
  for (int64_t w = 0; w < 3; w++) {
    test_gradient *g = &back.gradients[TEST_D_QUERY + w];
    for (int64_t row = 0; row < (int64_t)B * L * H; row++)
      g->row_at[row] = row / H * ROW + row % H * D;
    for (int64_t row = 0; row < (int64_t)B * L; row++)
      memcpy(block + (row * 3 + w) * H * D, test_at(views[w], row / L, row % L, 0, 0),
             H * D * sizeof(float));
    g->data = gradients + w * H * D;
    *tensors[w] =
        (mha_tensor){block + w * H * D, B, L, H, D, (int64_t)L * ROW, ROW, D, 1, MHA_F32, 0};
  }
  test_expect(test_back_call(&back, &error), MHA_OK, &error);
  test_back_judge(&back);
  test_back_release(&back);
  test_pool_free(&pool);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_layout),
      cmocka_unit_test(every_size),
      cmocka_unit_test(every_bias),
      cmocka_unit_test(stored_keys_and_values),
      cmocka_unit_test(sinks_of_any_size),
      cmocka_unit_test(offsets_and_windows_without_end),
      cmocka_unit_test(broadcast_tensors_have_no_gradient),
      cmocka_unit_test(packed_qkv),
      cmocka_unit_test(random_calls),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
