/* Kernels and packed matrices against sums in double precision, over every number of rows and the
 * borders of vectors and blocks, with each operand ending at an inaccessible page. */
#include "support.h"

#include "engine/kernels.h"
#include "engine/packed.h"

#include <math.h>
#include <string.h>

static test_allocator allocator;
static mha_kernels *kernels;
static test_pool pool;
static test_random numbers;

static void skip_without_kernels(void) {
  if (mha_kernels_missing())
    skip();
}

static void open_kernels(void) {
  skip_without_kernels();
  test_allocator_init(&allocator);
  kernels = mha_kernels_create(&allocator.mha);
  assert_non_null(kernels);
  test_random_seed(&numbers, 21);
}

static void close_kernels(void) {
  mha_kernels_destroy(kernels);
  test_allocator_check(&allocator);
}

/* ---- kernels ---- */

/* An array of `rows` rows, of which nothing lies behind the last number of the last. */
static float *matrix(int64_t rows, int64_t columns, int64_t stride) {
  float *m = test_pool_floats(&pool, rows > 0 ? (rows - 1) * stride + columns : 0);
  for (int64_t r = 0; r < rows; r++)
    test_fill_normal(&numbers, m + r * stride, columns, 1);
  return m;
}

static void judge(const mha_kernel_shape *s, int64_t rows, const float *a, const float *b,
                  const float *before, const float *c) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < s->columns; j++) {
      double sum = s->add ? (double)before[r * s->c_stride + j] : 0;
      double size = fabs(sum);
      for (int64_t k = 0; k < s->inner; k++) {
        const double term = (double)a[r * s->a_stride + k] * (double)b[k * s->b_stride + j];
        sum += term;
        size += fabs(term);
      }
      test_near("C", (double)c[r * s->c_stride + j], sum,
                size * (double)(s->inner + 2) * ldexp(1, -24));
    }
  for (int64_t r = 0; r + 1 < rows; r++) /* what lies between the rows is as it was */
    for (int64_t j = s->columns; j < s->c_stride; j++)
      assert_true(test_is_poison(c[r * s->c_stride + j]));
}

static void run_shape(const mha_kernel_shape *s, int64_t rows) {
  const float *a = matrix(rows, s->inner, s->a_stride);
  const float *b = matrix(s->inner, s->columns, s->b_stride);
  float *c = matrix(rows, s->columns, s->c_stride);
  const size_t bytes = (size_t)((rows - 1) * s->c_stride + s->columns) * sizeof *c;
  float *before = test_pool_floats(&pool, (int64_t)(bytes / sizeof *c));
  memcpy(before, c, bytes);
  test_note("%d x %d x %d, strides %d %d %d, add %d", (int)rows, (int)s->inner, (int)s->columns,
            (int)s->a_stride, (int)s->b_stride, (int)s->c_stride, s->add);
  mha_kernel_run(mha_kernels_find(kernels, s), rows, a, b, c);
  judge(s, rows, a, b, before, c);
  test_pool_free(&pool);
}

static void every_shape_is_the_product(void **state) {
  (void)state;
  const int64_t columns[] = {1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 128};
  const int64_t inner[] = {1, 2, 3, 4, 8, 17, 64, 128, 300};
  int n = 0;
  open_kernels();
  for (size_t c = 0; c < sizeof columns / sizeof *columns; c++)
    for (size_t k = 0; k < sizeof inner / sizeof *inner; k++, n++) {
      if (test_small() && n % 5 != 0)
        continue;
      const int64_t gap = n % 3;
      const mha_kernel_shape shape = {columns[c],       inner[k],         inner[k] + gap,
                                      columns[c] + gap, columns[c] + gap, n % 2 == 0};
      assert_true(mha_kernel_is_possible(&shape));
      assert_null(mha_kernels_find(kernels, &shape));
      assert_int_equal(mha_kernels_prepare(kernels, &shape, 1), MHA_OK);
      for (int64_t rows = 1; rows <= 2 * MHA_KERNEL_ROWS + 1; rows += 1 + n % 4)
        run_shape(&shape, rows);
    }
  close_kernels();
}

/* What is not part of a product has no influence: columns beside a NaN, rows beside one. */
static void a_nan_stays_in_its_row_and_column(void **state) {
  (void)state;
  const mha_kernel_shape shape = {33, 5, 5, 33, 33, false};
  open_kernels();
  assert_int_equal(mha_kernels_prepare(kernels, &shape, 1), MHA_OK);
  float *a = matrix(4, 5, 5);
  float *b = matrix(5, 33, 33);
  float *c = matrix(4, 33, 33);
  a[2 * 5 + 1] = NAN;
  b[3 * 33 + 7] = NAN;
  mha_kernel_run(mha_kernels_find(kernels, &shape), 4, a, b, c);
  for (int r = 0; r < 4; r++)
    for (int j = 0; j < 33; j++)
      assert_true(isnan(c[r * 33 + j]) == (r == 2 || j == 7));
  test_pool_free(&pool);
  close_kernels();
}

static void no_rows_touch_nothing(void **state) {
  (void)state;
  const mha_kernel_shape shape = {16, 4, 4, 16, 16, true};
  open_kernels();
  assert_int_equal(mha_kernels_prepare(kernels, &shape, 1), MHA_OK);
  mha_kernel_run(mha_kernels_find(kernels, &shape), 0, NULL, NULL, NULL);
  close_kernels();
}

/* ---- the set ---- */

static void a_kernel_is_generated_once_and_stays(void **state) {
  (void)state;
  const mha_kernel_shape first = {16, 4, 4, 16, 16, true};
  const mha_kernel_shape twice[] = {first, {16, 4, 4, 16, 16, false}, first};
  open_kernels();
  assert_int_equal(mha_kernels_prepare(kernels, &first, 1), MHA_OK);
  const mha_kernel *found = mha_kernels_find(kernels, &first);
  const int64_t calls = allocator.calls;
  assert_int_equal(mha_kernels_prepare(kernels, &first, 1), MHA_OK);
  assert_int_equal(allocator.calls, calls);
  const void *mark = mha_kernels_mark(kernels);
  assert_int_equal(mha_kernels_prepare(kernels, twice, 3), MHA_OK);
  assert_ptr_equal(mha_kernels_find(kernels, &first), found);
  assert_non_null(mha_kernels_find(kernels, &twice[1]));
  mha_kernels_undo(kernels, mark);
  assert_null(mha_kernels_find(kernels, &twice[1]));
  assert_ptr_equal(mha_kernels_find(kernels, &first), found);
  close_kernels();
}

static void impossible_shapes(void **state) {
  (void)state;
  const int64_t huge = (int64_t)1 << 40;
  const mha_kernel_shape shapes[] = {{0, 4, 4, 16, 16, true},     {16, 0, 4, 16, 16, true},
                                     {16, 4, 3, 16, 16, true},    {16, 4, 4, 15, 16, true},
                                     {16, 4, 4, 16, 15, true},    {huge, 4, 4, huge, huge, true},
                                     {16, huge, huge, 16, 16, 1}, {16, 4, huge, 16, 16, true},
                                     {16, 4, 4, huge, 16, true},  {16, 4, 4, 16, huge, true}};
  for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++)
    assert_false(mha_kernel_is_possible(&shapes[k]));
}

/* The n-th allocation fails: no kernel is there, and afterwards it can be. */
static void without_memory_there_is_no_kernel(void **state) {
  (void)state;
  const mha_kernel_shape shape = {16, 4, 4, 16, 16, true};
  open_kernels();
  for (int64_t n = 1; n <= 2; n++) {
    const int64_t live = allocator.live;
    allocator.fail_at = allocator.calls + n;
    assert_int_equal(mha_kernels_prepare(kernels, &shape, 1), MHA_ERROR_MEMORY);
    assert_null(mha_kernels_find(kernels, &shape));
    assert_int_equal(allocator.live, live);
  }
  allocator.fail_at = 0;
  assert_int_equal(mha_kernels_prepare(kernels, &shape, 1), MHA_OK);
  close_kernels();
}

/* ---- packed matrices ---- */

/* Y += X·W for a W that lies either way, in one or in several calls. */
static void run_packed(int64_t in, int64_t out, int64_t rows, bool by_rows) {
  mha_kernel_shape shapes[MHA_PACKED_SHAPES];
  mha_packed packed;
  int64_t floats = 0;
  test_note("packed: %d x %d x %d, by rows %d", (int)rows, (int)in, (int)out, by_rows);
  assert_true(mha_packed_floats(in, out, &floats));
  const float *w = by_rows ? matrix(in, out, out) : matrix(out, in, in);
  const mha_stored stored = {w, MHA_F32, in, out, by_rows ? out : 1, by_rows ? 1 : in};
  float *data = test_pool_floats(&pool, floats);
  const float *x = matrix(rows, in, in);
  float *y = matrix(rows, out, out);
  float *before = test_pool_floats(&pool, rows * out);
  memcpy(before, y, (size_t)(rows * out) * sizeof *y);
  mha_packed_fill(data, &stored);
  const int n = mha_packed_shapes(in, out, shapes);
  assert_true(n >= 1 && n <= MHA_PACKED_SHAPES);
  assert_int_equal(mha_kernels_prepare(kernels, shapes, n), MHA_OK);
  assert_true(mha_packed_find(kernels, data, in, out, &packed));
  for (int64_t first = 0; first < out; first += 2 * MHA_PACKED_COLUMNS) {
    const int64_t left = out - first;
    mha_packed_multiply(&packed, rows, x, first,
                        left < 2 * MHA_PACKED_COLUMNS ? left : 2 * MHA_PACKED_COLUMNS, y + first);
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < out; j++) {
      double sum = (double)before[r * out + j];
      double size = fabs(sum);
      for (int64_t k = 0; k < in; k++) {
        const double term =
            (double)x[r * in + k] * (double)w[k * stored.row_stride + j * stored.column_stride];
        sum += term;
        size += fabs(term);
      }
      test_near("Y", (double)y[r * out + j], sum, size * (double)(in + 2) * ldexp(1, -24));
    }
  test_pool_free(&pool);
}

static void packed_matrices_multiply(void **state) {
  (void)state;
  const int64_t sizes[][2] = {{1, 1},    {5, 63},  {7, 64},   {64, 65},   {33, 128},
                              {40, 200}, {3, 320}, {1025, 7}, {1300, 70}, {1024, 64}};
  open_kernels();
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
    for (int64_t rows = 1; rows <= 30; rows += test_small() ? 13 : 7)
      run_packed(sizes[k][0], sizes[k][1], rows, (int64_t)k % 2 == 0);
  close_kernels();
}

static void packed_sizes_are_checked(void **state) {
  (void)state;
  int64_t floats = 0;
  mha_kernel_shape shapes[MHA_PACKED_SHAPES];
  assert_false(mha_packed_floats(INT64_MAX, 2, &floats));
  assert_false(mha_packed_floats(2, INT64_MAX, &floats));
  assert_true(mha_packed_floats(3, 65, &floats));
  assert_int_equal(floats, 3 * 128);
  assert_int_equal(mha_packed_shapes((int64_t)1 << 40, 64, shapes), 0);
  assert_int_equal(mha_packed_shapes(64, (int64_t)1 << 40, shapes), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_shape_is_the_product),
      cmocka_unit_test(a_nan_stays_in_its_row_and_column),
      cmocka_unit_test(no_rows_touch_nothing),
      cmocka_unit_test(a_kernel_is_generated_once_and_stays),
      cmocka_unit_test(impossible_shapes),
      cmocka_unit_test(without_memory_there_is_no_kernel),
      cmocka_unit_test(packed_matrices_multiply),
      cmocka_unit_test(packed_sizes_are_checked),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
