/* Checked arithmetic at its borders, and the layout of arenas. */
#include "support.h"

#include "base/memory.h"

static void products_stop_at_the_border(void **state) {
  (void)state;
  int64_t r = 0;
  assert_true(mha_multiply(0, INT64_MAX, &r) && r == 0);
  assert_true(mha_multiply(INT64_MAX, 1, &r) && r == INT64_MAX);
  assert_true(mha_multiply(INT64_C(3037000499), INT64_C(3037000499), &r));
  assert_false(mha_multiply(INT64_C(3037000500), INT64_C(3037000500), &r));
  assert_false(mha_multiply(INT64_MAX / 2 + 1, 2, &r));
  assert_false(mha_multiply(-1, 1, &r));
  assert_false(mha_multiply(1, -1, &r));
}

static void sums_stop_at_the_border(void **state) {
  (void)state;
  int64_t r = 0;
  assert_true(mha_add(INT64_MAX - 1, 1, &r) && r == INT64_MAX);
  assert_false(mha_add(INT64_MAX, 1, &r));
  assert_false(mha_add(-1, 1, &r));
  assert_false(mha_add(1, -1, &r));
}

static void arrays_of_an_arena_do_not_meet(void **state) {
  (void)state;
  mha_layout layout = {0};
  size_t end = 0;
  for (int64_t n = 0; n < 70; n += 7) {
    const size_t offset = mha_layout_add(&layout, sizeof(float), n, 3, 1);
    assert_int_equal(offset % MHA_ALIGNMENT, 0);
    assert_true(offset >= end);
    end = offset + (size_t)n * 3 * sizeof(float);
    assert_true(layout.bytes >= end && layout.bytes < end + MHA_ALIGNMENT);
  }
  assert_false(layout.overflow);
}

static void an_arena_that_overflows_says_so_for_good(void **state) {
  (void)state;
  const int64_t sizes[][3] = {{INT64_MAX, 1, 1},
                              {INT64_C(1) << 31, INT64_C(1) << 31, 2},
                              {INT64_C(1) << 62, 4, 0},
                              {-1, 1, 1}};
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    mha_layout layout = {0};
    (void)mha_layout_add(&layout, sizeof(float), sizes[k][0], sizes[k][1], sizes[k][2]);
    assert_true(layout.overflow);
    (void)mha_layout_add(&layout, 1, 1, 1, 1);
    assert_true(layout.overflow);
  }
}

static void the_last_byte_counts(void **state) {
  (void)state;
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, 1, PTRDIFF_MAX - 2 * MHA_ALIGNMENT, 1, 1);
  assert_false(layout.overflow);
  (void)mha_layout_add(&layout, 1, 2 * MHA_ALIGNMENT, 1, 1);
  assert_true(layout.overflow);
}

static void memory_is_aligned_and_impossible_sizes_fail(void **state) {
  (void)state;
  const mha_allocator library = mha_memory_allocator(NULL);
  for (size_t bytes = 1; bytes < 300; bytes += 13) {
    char *memory = mha_memory_allocate(&library, bytes);
    assert_non_null(memory);
    assert_int_equal((uintptr_t)memory % MHA_ALIGNMENT, 0);
    memory[bytes - 1] = 1;
    mha_memory_release(&library, memory, bytes);
  }
  mha_memory_release(&library, NULL, 0);
  /* round_up must not wrap round to a small block */
  assert_null(mha_memory_allocate(&library, SIZE_MAX));
  assert_null(mha_memory_allocate(&library, SIZE_MAX - MHA_ALIGNMENT + 1));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(products_stop_at_the_border),
      cmocka_unit_test(sums_stop_at_the_border),
      cmocka_unit_test(arrays_of_an_arena_do_not_meet),
      cmocka_unit_test(an_arena_that_overflows_says_so_for_good),
      cmocka_unit_test(the_last_byte_counts),
      cmocka_unit_test(memory_is_aligned_and_impossible_sizes_fail),
  };
  return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}
