/* The row kernels of a layer against double precision, at every length up to some vectors, between
 * guard pages. */
#include "support.h"

#include "engine/vector.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST = 70 };

/* Rows of one length, fenced on the side that the pool says, and what they began with. */
typedef struct rows {
  test_pool pool;
  float *a, *b, *c, *d;
  float was_a[2 * LONGEST], was_b[LONGEST];
} rows;

static void make(rows *r, int64_t n, bool at_front) {
  test_random random;
  memset(r, 0, sizeof *r);
  r->pool.at_front = at_front;
  test_random_seed(&random, (uint64_t)n + 3);
  r->a = test_pool_floats(&r->pool, 2 * n);
  r->b = test_pool_floats(&r->pool, n);
  r->c = test_pool_floats(&r->pool, n);
  r->d = test_pool_floats(&r->pool, n);
  test_fill_normal(&random, r->a, 2 * n, 1.0);
  test_fill_normal(&random, r->b, n, 1.0);
  test_fill_normal(&random, r->c, n, 1.0);
  test_fill_normal(&random, r->d, n, 1.0);
  if (n > 0) {
    memcpy(r->was_a, r->a, (size_t)(2 * n) * sizeof(float));
    memcpy(r->was_b, r->b, (size_t)n * sizeof(float));
  }
  test_note("n = %d, %s", (int)n, at_front ? "behind a guard page" : "before one");
}

/* Within two roundings of the largest term. */
static void near(double got, double expected, double size) {
  test_near("element", got, expected, 4e-7 * size + 1e-30);
}

static void sums(void **state) {
  (void)state;
  for (int side = 0; side < 2; side++)
    for (int64_t n = 0; n <= LONGEST; n++) {
      rows r;
      make(&r, n, side != 0);
      double gathered[LONGEST] = {0}, squares = 0;
      mha_vector_gather(gathered, r.b, 0.25, n);
      mha_vector_add(r.a, r.b, n);
      for (int64_t j = 0; j < n; j++) {
        near((double)r.a[j], (double)r.was_a[j] + (double)r.b[j], 8);
        assert_true(gathered[j] == 0.25 * (double)r.b[j]);
        squares += (double)r.b[j] * (double)r.b[j];
      }
      test_near("squares", mha_vector_squares(r.b, n), squares, 1e-13 * squares);
      memcpy(r.a, r.was_a, (size_t)n * sizeof(float));
      mha_vector_add_scaled(r.a, r.b, -1.5F, n);
      for (int64_t j = 0; j < n; j++)
        near((double)r.a[j], (double)r.was_a[j] - 1.5 * (double)r.b[j], 12);
      for (int64_t j = n; j < 2 * n; j++) /* not touched */
        assert_true(test_equal_bits(r.a[j], r.was_a[j]));
      test_pool_free(&r.pool);
    }
}

static void weighing(void **state) {
  (void)state;
  for (int64_t n = 0; n <= LONGEST; n++) {
    rows r;
    make(&r, n, n % 2 != 0);
    mha_vector_weigh(r.b, r.c, 3.0F, n);
    for (int64_t j = 0; j < n; j++)
      near((double)r.b[j], 3.0 * (double)r.was_b[j] * (double)r.c[j], 30);
    test_pool_free(&r.pool);
  }
}

static void turns(void **state) {
  (void)state;
  for (int side = 0; side < 2; side++)
    for (int64_t n = 0; n <= LONGEST; n++) {
      rows r;
      make(&r, n, side != 0);
      mha_vector_turn_neighbours(r.a, r.c, r.d, n);
      for (int64_t p = 0; p < n; p++) {
        const double x = (double)r.was_a[2 * p], y = (double)r.was_a[2 * p + 1];
        near((double)r.a[2 * p], x * (double)r.c[p] - y * (double)r.d[p], 20);
        near((double)r.a[2 * p + 1], y * (double)r.c[p] + x * (double)r.d[p], 20);
      }
      memcpy(r.a, r.was_a, (size_t)(2 * n) * sizeof(float));
      mha_vector_turn_halves(r.a, r.b, r.c, r.d, n);
      for (int64_t p = 0; p < n; p++) {
        const double x = (double)r.was_a[p], y = (double)r.was_b[p];
        near((double)r.a[p], x * (double)r.c[p] - y * (double)r.d[p], 20);
        near((double)r.b[p], y * (double)r.c[p] + x * (double)r.d[p], 20);
      }
      test_pool_free(&r.pool);
    }
}

static void large_squares_do_not_overflow(void **state) {
  const float x[] = {3e38F, -3e38F, 1e-30F};
  (void)state;
  test_near("sum", mha_vector_squares(x, 3) / 1.8e77, 1.0, 1e-6);
}

static void nan_and_infinities_stay(void **state) {
  float y[20];
  float x[20] = {0};
  (void)state;
  for (int at = 0; at < 20; at++) {
    memset(y, 0, sizeof y);
    x[at] = at % 2 ? NAN : INFINITY;
    mha_vector_add(y, x, 20);
    for (int j = 0; j < 20; j++)
      assert_true(j == at ? !isfinite(y[j]) : y[j] == 0.0F);
    assert_true(!isfinite(mha_vector_squares(x, 20)));
    x[at] = 0.0F;
  }
}

/* Every number at its place, and nothing beside the block. */
static void transposing(void **state) {
  enum { MOST = 70 };
  float x[MOST * MOST];
  float y[MOST * MOST];
  const int64_t sizes[] = {0, 1, 2, 7, 8, 15, 16, 17, 63, 64, 65};
  (void)state;
  for (int k = 0; k < MOST * MOST; k++)
    x[k] = (float)k;
  for (size_t r = 0; r < sizeof sizes / sizeof *sizes; r++)
    for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
      test_fill_poison(y, MOST * MOST);
      test_note("%d x %d", (int)sizes[r], (int)sizes[c]);
      mha_vector_transpose(y, MOST, x, MOST, sizes[r], sizes[c]);
      for (int64_t i = 0; i < MOST; i++)
        for (int64_t j = 0; j < MOST; j++) {
          const float got = y[j * MOST + i];
          assert_true(i < sizes[r] && j < sizes[c] ? got == x[i * MOST + j] : test_is_poison(got));
        }
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sums),
      cmocka_unit_test(weighing),
      cmocka_unit_test(turns),
      cmocka_unit_test(transposing),
      cmocka_unit_test(large_squares_do_not_overflow),
      cmocka_unit_test(nan_and_infinities_stay),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
