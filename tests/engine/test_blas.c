/* The one interface of all products against plain loops: every pair of orientations, odd sizes, few
 * rows, strides wider than the rows, and what must not be read; and what the library says of its
 * BLAS. */
#define _GNU_SOURCE 1 /* RTLD_DEFAULT */
#include "support.h"

#include "base/arithmetic.h"
#include "engine/blas.h"
#include "engine/blas_threads.h"
#include "engine/products.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct product_case {
  int64_t m, n, k;
  bool a_transposed, b_transposed;
  float alpha, beta;
} product_case;

static double element(mha_view v, int64_t r, int64_t c) {
  return (double)v.data[r * v.row_stride + c * v.column_stride];
}

/* A matrix [rows][columns] stored either way, its stored rows `gap` elements longer than needed,
 * NaN in the gaps. */
static mha_view make_view(test_pool *pool, test_random *random, int64_t rows, int64_t columns,
                          bool transposed, int64_t gap) {
  const int64_t stored_rows = transposed ? columns : rows;
  const int64_t stored_columns = transposed ? rows : columns;
  const int64_t ld = stored_columns + gap;
  float *data = test_pool_floats(pool, (stored_rows - 1) * ld + stored_columns);
  for (int64_t r = 0; r < stored_rows; r++)
    test_fill_normal(random, data + r * ld, stored_columns, 1);
  const mha_view stored = mha_view_rows(data, stored_rows, stored_columns, ld);
  return transposed ? mha_view_transposed(stored) : stored;
}

static void check_product(test_random *random, const product_case *c) {
  test_pool pool = {0};
  const int64_t gap = test_random_range(random, 0, 3);
  const mha_view a = make_view(&pool, random, c->m, c->k, c->a_transposed, gap);
  const mha_view b = make_view(&pool, random, c->k, c->n, c->b_transposed, gap);
  const int64_t ld = c->n + gap;
  const int64_t size = (c->m - 1) * ld + c->n;
  float *got = test_pool_floats(&pool, size);
  float *before = test_pool_floats(&pool, size);
  for (int64_t r = 0; c->beta != 0.0f && r < c->m; r++) {
    test_fill_normal(random, got + r * ld, c->n, 1);
    for (int64_t j = 0; j < c->n; j++)
      before[r * ld + j] = got[r * ld + j];
  }
  test_note("m %d n %d k %d, transposed %d %d, alpha %g beta %g, gap %d", (int)c->m, (int)c->n,
            (int)c->k, c->a_transposed, c->b_transposed, (double)c->alpha, (double)c->beta,
            (int)gap);
  test_expect(mha_products_multiply(c->alpha, a, b, c->beta, got, ld), MHA_OK, NULL);
  for (int64_t i = 0; i < c->m; i++)
    for (int64_t j = 0; j < ld && i * ld + j < size; j++) {
      if (j >= c->n) {
        assert_true(test_is_poison(got[i * ld + j]));
        continue;
      }
      double sum = 0;
      double magnitude = 0;
      for (int64_t p = 0; p < c->k; p++) {
        sum += element(a, i, p) * element(b, p, j);
        magnitude += fabs(element(a, i, p) * element(b, p, j));
      }
      const double start = c->beta != 0.0f ? (double)c->beta * (double)before[i * ld + j] : 0;
      /* a sum of k products, each rounded, in any order: (k + 2)·u of the magnitudes at worst */
      test_near("element", (double)got[i * ld + j], (double)c->alpha * sum + start,
                ((double)c->k + 2) * ldexp(1, -24) *
                    (fabs((double)c->alpha) * magnitude + fabs(start)));
    }
  test_pool_free(&pool);
}

static void all_orientations_and_odd_sizes(void **state) {
  (void)state;
  const int64_t sizes[] = {1, 2, 3, 5, 8, 13, 17, 33};
  const size_t n = sizeof sizes / sizeof *sizes;
  test_random random;
  test_random_seed(&random, 21);
  for (size_t i = 0; i < n * n * n; i++)
    for (int t = 0; t < 4; t++) {
      const product_case c = {sizes[i % n], sizes[i / n % n],      sizes[i / n / n],   (t & 1) != 0,
                              (t & 2) != 0, t == 3 ? -0.5f : 1.0f, i % 2 ? 1.0f : 0.0f};
      check_product(&random, &c);
    }
}

/* Large enough for the path of few rows, with sizes that are no multiple of its blocks. */
static void few_rows_of_a_large_matrix(void **state) {
  (void)state;
  test_random random;
  test_random_seed(&random, 22);
  for (int64_t m = 1; m <= 9; m++)
    for (int t = 0; t < 4; t++) {
      const product_case c = {m,    t < 2 ? 300 : 257,  263, false, t % 2 == 1,
                              1.0f, m % 2 ? 1.0f : 0.0f};
      check_product(&random, &c);
    }
}

static void beta_zero_never_reads_the_result(void **state) {
  (void)state;
  test_random random;
  test_random_seed(&random, 23);
  const int64_t sizes[] = {1, 3, 5, 6, 7, 9, 15, 19, 31, 33, 63, 65};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++) {
      const product_case c = {sizes[i], sizes[j], 7, false, (i + j) % 2 == 1, 1.0f, 0.0f};
      check_product(&random, &c); /* starts from NaN where beta is 0 */
    }
}

static void sizes_beyond_the_integer_are_refused(void **state) {
  (void)state;
  const float x = 1.0f;
  const mha_view one = mha_view_rows(&x, 1, 1, 1);
  const int64_t beyond = MHA_BLAS_MAX + 1;
  const mha_view views[] = {mha_view_rows(&x, beyond, 1, 1), mha_view_rows(&x, 1, beyond, beyond),
                            mha_view_rows(&x, 1, 1, beyond)};
  float result = 5.0f;
  for (int k = 0; k < 3; k++) {
    assert_int_equal(mha_products_multiply(1, views[k], one, 0, &result, 1), MHA_ERROR_OVERFLOW);
    assert_int_equal(mha_products_multiply(1, one, views[k], 0, &result, 1), MHA_ERROR_OVERFLOW);
  }
  assert_int_equal(mha_products_multiply(1, one, one, 0, &result, beyond), MHA_ERROR_OVERFLOW);
  assert_true(result == 5.0f);
}

static void the_guard_nests_and_restores(void **state) {
  (void)state;
  const int32_t before = mha_blas_thread_count();
  mha_blas_guard_enter();
  mha_blas_guard_enter();
  assert_int_equal(mha_blas_thread_count(), before); /* what it would use outside */
  mha_blas_guard_leave();
  mha_blas_guard_leave();
  assert_int_equal(mha_blas_thread_count(), before);
}

/* The vendor's own words where it has some: asked here past the library's references to them. */
static void the_vendor_is_named_with_its_version(void **state) {
  (void)state;
  char *(*version)(void) = NULL;
  *(void **)&version = dlsym(RTLD_DEFAULT, "openblas_get_config");
  const char *name = "";
  if (!version) {
    *(void **)&version = dlsym(RTLD_DEFAULT, "bli_info_get_version_str");
    name = "BLIS ";
  }
  char expected[256] = "CBLAS of unknown vendor";
  if (version)
    (void)snprintf(expected, sizeof expected, "%s%s", name, version());
  assert_string_equal(mha_blas_vendor(), expected);
  assert_ptr_equal(mha_blas_vendor(), mha_blas_vendor());
  assert_int_equal(strcmp(mha_blas_core(), "unknown") != 0, version != NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(all_orientations_and_odd_sizes),
      cmocka_unit_test(few_rows_of_a_large_matrix),
      cmocka_unit_test(beta_zero_never_reads_the_result),
      cmocka_unit_test(sizes_beyond_the_integer_are_refused),
      cmocka_unit_test(the_guard_nests_and_restores),
      cmocka_unit_test(the_vendor_is_named_with_its_version),
  };
  return cmocka_run_group_tests_name("blas", tests, NULL, NULL);
}
