/* Numbers that are not float32, held against the definitions of their formats in double precision:
 * what they widen to, what float32 numbers are rounded to, and the row kernels of every instruction
 * set that the machine has. Arrays end before guard pages. */
#include "support.h"

#include "engine/numbers.h"
#include "engine/stored_rows.h"

#include <fenv.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { ALL_HALVES = 65536, BLOCK = 32, MOST_KERNELS = 3 };

/* ---- The formats as they are defined --------------------------------------------------------- */

/* A sign, `exponent_bits` bits of exponent, the others fraction; subnormals, infinities, NaN. */
static double value_of_half(uint16_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int largest = (1 << exponent_bits) - 1, bias = largest / 2;
  const int exponent = bits >> fraction_bits & largest;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == largest)
    return fraction ? NAN : sign * INFINITY;
  if (exponent == 0)
    return sign * ldexp((double)fraction, 1 - bias - fraction_bits);
  return sign * ldexp((double)(fraction + (1 << fraction_bits)), exponent - bias - fraction_bits);
}

static int exponent_bits(int32_t element) {
  return element == MHA_BF16 ? 8 : 5;
}

static uint16_t half_at(const unsigned char *at) {
  uint16_t bits;
  memcpy(&bits, at, sizeof bits);
  return bits;
}

static bool has_blocks(int32_t element) {
  return element == MHA_Q8_0 || element == MHA_Q4_0;
}

/* Number k of a block. */
static double value_in_block(int32_t element, const unsigned char *block, int k) {
  const double scale = value_of_half(half_at(block), 5);
  if (element == MHA_Q8_0)
    return scale * (double)(block[2 + k] < 128 ? block[2 + k] : block[2 + k] - 256);
  return scale * (double)((k < 16 ? block[2 + k] & 15 : block[2 + k - 16] >> 4) - 8);
}

/* Number `index` of an array. */
static double value_at(int32_t element, const unsigned char *data, int64_t index) {
  if (!has_blocks(element))
    return value_of_half(half_at(data + 2 * index), exponent_bits(element));
  return value_in_block(element, data + index / BLOCK * (element == MHA_Q8_0 ? 34 : 18),
                        (int)(index % BLOCK));
}

/* A double that float32 holds, with its sign; any NaN is as good as another. */
static void expect_exactly(const char *what, int64_t index, float got, double expected) {
  if (isnan(expected) ? isnan(got) : (double)got == expected && !signbit(got) == !signbit(expected))
    return;
  test_failed("%s %lld: got %a, expected %a", what, (long long)index, (double)got, expected);
}

/* ---- The kernels that there are -------------------------------------------------------------- */

static const mha_row_kernels *all_kernels[MOST_KERNELS];
static int n_kernels;

static int find_kernels(void **state) {
  const mha_row_kernels *found[] = {mha_rows_plain(), mha_rows_avx2(), mha_rows_avx512()};
  (void)state;
  for (size_t k = 0; k < COUNT(found); k++)
    if (found[k])
      all_kernels[n_kernels++] = found[k];
  return 0;
}

static void the_best_of_them_is_chosen(void **state) {
  (void)state;
  assert_non_null(mha_rows_plain());
  assert_ptr_equal(mha_rows_best(), all_kernels[n_kernels - 1]);
  for (int a = 0; a < n_kernels; a++)
    for (int b = 0; b < a; b++)
      assert_string_not_equal(all_kernels[a]->name, all_kernels[b]->name);
}

/* ---- Widening -------------------------------------------------------------------------------- */

/* All patterns, `piece` at a time. */
static void widen_all_halves(int32_t element, const mha_row_kernels *kernels, int64_t piece,
                             float *y) {
  uint16_t *all = test_allocate(ALL_HALVES, sizeof *all);
  for (int k = 0; k < ALL_HALVES; k++)
    all[k] = (uint16_t)k;
  for (int64_t first = 0; first < ALL_HALVES; first += piece)
    kernels->widen(y + first, (const unsigned char *)(all + first), element,
                   piece < ALL_HALVES - first ? piece : ALL_HALVES - first);
  free(all);
}

/* Whole steps, and the numbers behind the last one. */
static void every_half_widens_exactly(void **state) {
  const int64_t pieces[] = {ALL_HALVES, 31, 1};
  float *y = test_allocate(ALL_HALVES, sizeof *y);
  (void)state;
  for (int which = 0; which < n_kernels; which++)
    for (int32_t element = MHA_F16; element <= MHA_BF16; element++)
      for (size_t piece = 0; piece < COUNT(pieces); piece++) {
        test_note("%s, %d at a time", all_kernels[which]->name, (int)pieces[piece]);
        widen_all_halves(element, all_kernels[which], pieces[piece], y);
        for (int k = 0; k < ALL_HALVES; k++)
          expect_exactly(mha_element_name(element), k, y[k],
                         value_of_half((uint16_t)k, exponent_bits(element)));
      }
  free(y);
}

/* A block for every pattern of the scale; together they hold every q many times. */
static unsigned char *blocks_of_all_scales(int32_t element) {
  const size_t bytes = element == MHA_Q8_0 ? 34 : 18;
  unsigned char *blocks = test_allocate(ALL_HALVES, bytes);
  test_random random;
  test_random_seed(&random, 8);
  for (size_t k = 0; k < ALL_HALVES; k++) {
    const uint16_t scale = (uint16_t)k;
    memcpy(blocks + k * bytes, &scale, sizeof scale);
    for (size_t at = 2; at < bytes; at++)
      blocks[k * bytes + at] = (unsigned char)(test_random_bits(&random) >> 24);
  }
  return blocks;
}

static void every_block_widens_exactly(void **state) {
  const int64_t n = (int64_t)ALL_HALVES * BLOCK;
  float *y = test_allocate((size_t)n, sizeof *y);
  (void)state;
  for (int32_t element = MHA_Q8_0; element <= MHA_Q4_0; element++) {
    unsigned char *blocks = blocks_of_all_scales(element);
    for (int which = 0; which < n_kernels; which++) {
      test_note("%s", all_kernels[which]->name);
      all_kernels[which]->widen(y, blocks, element, n);
      for (int64_t k = 0; k < n; k++)
        expect_exactly(mha_element_name(element), k, y[k], value_at(element, blocks, k));
    }
    free(blocks);
  }
  free(y);
}

/* Finite numbers of moderate size, as they are stored. */
static void fill_stored(test_random *random, int32_t element, unsigned char *data, size_t bytes) {
  const size_t step = element == MHA_Q8_0 ? 34 : element == MHA_Q4_0 ? 18 : 2;
  for (size_t at = 0; at < bytes; at++)
    data[at] = (unsigned char)(test_random_bits(random) >> 24);
  for (size_t at = 0; at < bytes; at += step) {
    const uint64_t bits = test_random_bits(random);
    const uint64_t exponent = element == MHA_BF16 ? 120 + bits % 12 : 9 + bits % 9;
    const int fraction_bits = element == MHA_BF16 ? 7 : 10;
    const uint16_t half = (uint16_t)((bits >> 16 & 0x8000) | exponent << fraction_bits |
                                     (bits >> 32 & ((UINT64_C(1) << fraction_bits) - 1)));
    memcpy(data + at, &half, sizeof half);
  }
}

/* Between the fences, or `shift` bytes away from one of them, whose bytes stay poison. */
typedef struct placed {
  unsigned char *numbers;
  float *floats;
  test_pool pool;
} placed;

static placed place(int32_t element, int64_t n, int shift, bool at_front) {
  placed p = {.pool = {.at_front = at_front}};
  const size_t bytes = mha_element_bytes(element, n);
  p.numbers = test_pool_bytes(&p.pool, bytes + (size_t)shift);
  p.floats = test_pool_floats(&p.pool, n + shift % 16);
  if (at_front) {
    p.numbers += shift;
    p.floats += shift % 16;
  }
  return p;
}

static void try_widening(const mha_row_kernels *kernels, int32_t element, int64_t n, int shift,
                         test_random *random) {
  placed p = place(element, n, shift, n % 2 != 0);
  fill_stored(random, element, p.numbers, mha_element_bytes(element, n));
  kernels->widen(p.floats, p.numbers, element, n);
  for (int64_t k = 0; k < n; k++)
    expect_exactly(mha_element_name(element), k, p.floats[k], value_at(element, p.numbers, k));
  for (int64_t k = 1; k <= shift % 16; k++)
    assert_true(test_is_poison(n % 2 ? p.floats[-k] : p.floats[n - 1 + k]));
  test_pool_free(&p.pool);
}

static void every_length_and_alignment(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 9);
  for (int which = 0; which < n_kernels; which++)
    for (int32_t element = MHA_F16; element <= MHA_Q4_0; element++)
      for (int64_t n = 1; n <= 100; n++)
        for (int shift = 0; shift < 64; shift += test_small() ? 13 : 1)
          if (!has_blocks(element) || n % BLOCK == 0) {
            test_note("%s: %s, n %d, shift %d", all_kernels[which]->name, mha_element_name(element),
                      (int)n, shift);
            try_widening(all_kernels[which], element, n, shift, &random);
          }
}

/* ---- The caller's floating-point environment ------------------------------------------------- */

/* Subnormal results become 0, subnormal operands count as 0; the control register as it was. */
static unsigned flush_subnormals(void) {
#ifdef __SSE__
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040U);
  return before;
#else
  return 0;
#endif
}

static void flush_no_more(unsigned before) {
#ifdef __SSE__
  _mm_setcsr(before);
#else
  (void)before;
#endif
}

/* Bits of BF16's subnormals are those of float32's, so both are compared by bits; with F16 no
 * subnormal float32 is left, and a block's scale is F16. */
static void widening_although_subnormals_are_flushed(void **state) {
  float *y = test_allocate(ALL_HALVES, sizeof *y);
  float *expected = test_allocate(ALL_HALVES, sizeof *expected);
  (void)state;
  for (int which = 0; which < n_kernels; which++)
    for (int32_t element = MHA_F16; element <= MHA_BF16; element++)
      for (int64_t piece = 31; piece <= ALL_HALVES; piece += ALL_HALVES - 31) {
        test_note("%s %s", all_kernels[which]->name, mha_element_name(element));
        widen_all_halves(element, all_kernels[which], piece, expected);
        const unsigned before = flush_subnormals();
        widen_all_halves(element, all_kernels[which], piece, y);
        flush_no_more(before);
        assert_memory_equal(y, expected, ALL_HALVES * sizeof *y);
      }
  free(y);
  free(expected);
}

static void blocks_although_subnormals_are_flushed(void **state) {
  const int64_t n = (int64_t)ALL_HALVES * BLOCK;
  float *y = test_allocate((size_t)n, sizeof *y);
  (void)state;
  for (int32_t element = MHA_Q8_0; element <= MHA_Q4_0; element++) {
    unsigned char *blocks = blocks_of_all_scales(element);
    for (int which = 0; which < n_kernels; which++) {
      test_note("%s", all_kernels[which]->name);
      const unsigned before = flush_subnormals();
      all_kernels[which]->widen(y, blocks, element, n);
      flush_no_more(before);
      for (int64_t k = 0; k < n; k++)
        expect_exactly(mha_element_name(element), k, y[k], value_at(element, blocks, k));
    }
    free(blocks);
  }
  free(y);
}

/* A subnormal F16 in a product is not lost. */
static void products_although_subnormals_are_flushed(void **state) {
  (void)state;
  for (int which = 0; which < n_kernels; which++)
    for (int64_t columns = 20; columns <= 64; columns += 44) {
      uint16_t w[64];
      float x[64], y = 0.0F;
      for (int k = 0; k < 64; k++) {
        w[k] = 1; /* 2^-24 */
        x[k] = 1.0F;
      }
      const mha_rows_product p = {
          MHA_F16, (const unsigned char *)w, 128, 1, columns, 1.0F, x, 1, 64, &y, 1};
      const unsigned before = flush_subnormals();
      all_kernels[which]->dots(&p);
      flush_no_more(before);
      assert_true((double)y == ldexp((double)columns, -24));
    }
}

/* What is exact does not depend on a rounding mode. */
static void widening_in_every_rounding_mode(void **state) {
  const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  float *y = test_allocate(ALL_HALVES, sizeof *y);
  (void)state;
  for (size_t mode = 0; mode < COUNT(modes); mode++)
    for (int which = 0; which < n_kernels; which++)
      for (int32_t element = MHA_F16; element <= MHA_BF16; element++)
        for (int64_t piece = 31; piece <= ALL_HALVES; piece += ALL_HALVES - 31) {
          test_note("%s %s, mode %zu", all_kernels[which]->name, mha_element_name(element), mode);
          assert_int_equal(fesetround(modes[mode]), 0);
          widen_all_halves(element, all_kernels[which], piece, y);
          assert_int_equal(fesetround(FE_TONEAREST), 0);
          for (int k = 0; k < ALL_HALVES; k++)
            expect_exactly(mha_element_name(element), k, y[k],
                           value_of_half((uint16_t)k, exponent_bits(element)));
        }
  free(y);
}

/* ---- Rounding to 16 bits --------------------------------------------------------------------- */

/* x to the nearest number of a format, ties to even; what reaches half a unit beyond the largest
 * number is infinite. */
static double nearest_half(double x, int exponent_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, fraction_bits = 15 - exponent_bits;
  if (isnan(x) || isinf(x) || x == 0.0)
    return x;
  const int exponent = ilogb(x) < 1 - bias ? 1 - bias : ilogb(x);
  const double units = ldexp(fabs(x), fraction_bits - exponent), below = floor(units);
  const double over = units - below;
  const bool up = over > 0.5 || (over == 0.5 && fmod(below, 2.0) == 1.0);
  const double rounded = ldexp(up ? below + 1.0 : below, exponent - fraction_bits);
  return copysign(rounded >= ldexp(1.0, bias + 1) ? INFINITY : rounded, x);
}

static float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Rounds many numbers at once and looks at each. */
static void expect_rounded(int32_t element, const float *x, int64_t n) {
  uint16_t *y = test_allocate((size_t)n, sizeof *y);
  mha_numbers_round(y, element, x, n);
  for (int64_t k = 0; k < n; k++) {
    const double got = value_of_half(y[k], exponent_bits(element));
    const double expected = nearest_half((double)x[k], exponent_bits(element));
    if (isnan(expected) ? !isnan(got) : got != expected || !signbit(got) != !signbit(expected))
      test_failed("%s of %a: got %04x, which is %a, expected %a", mha_element_name(element),
                  (double)x[k], (unsigned)y[k], got, expected);
  }
  free(y);
}

/* Every number of the format, what lies half way to the next, and the floats beside both. */
static void halves_to_nearest_even(void **state) {
  float *x = test_allocate((size_t)ALL_HALVES * 6, sizeof *x);
  (void)state;
  for (int32_t element = MHA_F16; element <= MHA_BF16; element++) {
    int64_t n = 0;
    for (int k = 0; k < ALL_HALVES; k++) {
      const double here = value_of_half((uint16_t)k, exponent_bits(element));
      double next = value_of_half((uint16_t)(k + 1), exponent_bits(element));
      if (!isfinite(here))
        continue;
      if (!isfinite(next)) /* where it would be if there were one more exponent */
        next = copysign(ldexp(1.0, element == MHA_BF16 ? 128 : 16), here);
      const double middle = here + (next - here) / 2;
      const float both[] = {(float)here, (float)middle};
      for (size_t which = 0; which < COUNT(both); which++) {
        assert_true((double)both[which] == (which ? middle : here));
        x[n++] = nextafterf(both[which], -INFINITY);
        x[n++] = both[which];
        x[n++] = nextafterf(both[which], INFINITY);
      }
    }
    expect_rounded(element, x, n);
  }
  free(x);
}

static void any_float_to_a_half(void **state) {
  const uint32_t special[] = {
      0,          0x80000000, 1,          0x807fffff, 0x00800000, 0x7f800000,
      0xff800000, 0x7f7fffff, 0xff7fffff, 0x7f800001, 0xff800001, 0x7fbfffff,
      0x7fffffff, 0xffffffff, 0x7fc00000, 0x7f80ffff, 0x7f810000, 0xffbf0000,
      0x477fefff, 0x477ff000, 0x477ff001, 0xc77fefff, 0xc77ff000, 0x477fe000,
      0x7f7f7fff, 0x7f7f8000, 0x7f7f0000, 0x33000000, 0x33000001, 0x32ffffff,
      0x33800000, 0x33c00000, 0x387fffff, 0x38800000, 0x387fe000, 0x387ff000};
  enum { N = 1 << 18 };
  float *x = test_allocate(N, sizeof *x);
  test_random random;
  (void)state;
  test_random_seed(&random, 10);
  for (size_t k = 0; k < N; k++)
    x[k] = float_of_bits(k < COUNT(special) ? special[k] : (uint32_t)test_random_bits(&random));
  for (size_t k = N / 2; k < N; k++) /* F16's exponents and those beside them */
    x[k] = (float)ldexp(test_random_uniform(&random, -2.0, 2.0),
                        (int)test_random_range(&random, -27, 17));
  for (int32_t element = MHA_F16; element <= MHA_BF16; element++)
    expect_rounded(element, x, N);
  free(x);
}

/* To nearest, whatever the caller's mode, and of subnormals too where they are flushed. */
static void halves_in_any_environment(void **state) {
  const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  enum { N = 4096 };
  float x[N];
  uint16_t expected[N], got[N];
  test_random random;
  (void)state;
  test_random_seed(&random, 11);
  for (int k = 0; k < N; k++)
    x[k] = float_of_bits((uint32_t)test_random_bits(&random) & (k % 8 ? 0xffffffff : 0x807fffff));
  for (int32_t element = MHA_F16; element <= MHA_BF16; element++) {
    mha_numbers_round(expected, element, x, N);
    for (size_t mode = 0; mode < COUNT(modes); mode++) {
      assert_int_equal(fesetround(modes[mode]), 0);
      mha_numbers_round(got, element, x, N);
      assert_int_equal(fesetround(FE_TONEAREST), 0);
      assert_memory_equal(got, expected, sizeof got);
    }
    const unsigned before = flush_subnormals();
    mha_numbers_round(got, element, x, N);
    flush_no_more(before);
    assert_memory_equal(got, expected, sizeof got);
  }
}

/* ---- Rounding to blocks ---------------------------------------------------------------------- */

static double largest_magnitude(const float *x) {
  double largest = 0.0;
  for (int k = 0; k < BLOCK; k++)
    largest = fabs((double)x[k]) > largest ? fabs((double)x[k]) : largest;
  return largest;
}

/* Whole numbers, halves away from zero. */
static double whole(double x) {
  return copysign(floor(fabs(x) + 0.5), x);
}

static void expect_nan_block(int32_t element, const unsigned char *block) {
  assert_true(isnan(value_of_half(half_at(block), 5)));
  for (int k = 0; k < BLOCK; k++)
    assert_true(isnan(value_in_block(element, block, k)));
}

/* Scale max|x|/127 in F16, q = x/scale in float32, no further than ±127. */
static void expect_q8_0(const float *x) {
  unsigned char block[34];
  mha_numbers_round(block, MHA_Q8_0, x, BLOCK);
  const double scale = nearest_half(largest_magnitude(x) / 127.0, 5);
  if (isinf(scale)) {
    expect_nan_block(MHA_Q8_0, block);
    return;
  }
  assert_true(value_of_half(half_at(block), 5) == scale);
  for (int k = 0; k < BLOCK; k++) {
    /* the quotient of two floats, rounded to double first, rounds to the same float */
    const double q = scale > 0.0 ? whole((double)(float)((double)x[k] / scale)) : 0.0;
    const double bounded = q > 127.0 ? 127.0 : q < -127.0 ? -127.0 : q;
    const int got = block[2 + k] < 128 ? block[2 + k] : block[2 + k] - 256;
    if ((double)got != bounded)
      test_failed("Q8_0 of %a with scale %a: got %d, expected %g", (double)x[k], scale, got,
                  bounded);
  }
}

/* Scale -x/8 of the largest x in F16, q = x/scale + 8 within 0 to 15. */
static void expect_q4_0(const float *x) {
  unsigned char block[18];
  double extreme = 0.0;
  mha_numbers_round(block, MHA_Q4_0, x, BLOCK);
  for (int k = BLOCK - 1; k >= 0; k--)
    extreme = fabs((double)x[k]) >= fabs(extreme) ? (double)x[k] : extreme;
  const double scale = nearest_half(extreme / -8.0, 5);
  if (isinf(scale)) {
    expect_nan_block(MHA_Q4_0, block);
    return;
  }
  assert_true(value_of_half(half_at(block), 5) == scale);
  for (int k = 0; k < BLOCK; k++) {
    const double exact = scale != 0.0 ? (double)x[k] / scale + 8.0 : 8.0;
    const double low = exact < 0.0 ? 0.0 : exact > 15.0 ? 15.0 : exact;
    const double got = (double)(k < 16 ? block[2 + k] & 15 : block[2 + k - 16] >> 4);
    const double over = exact - floor(exact);
    const bool near_tie = over != 0.5 && fabs(over - 0.5) < 1e-6; /* float32 cannot tell */
    if (near_tie ? fabs(got - low) > 0.5 + 1e-6 : got != (whole(low) > 15.0 ? 15.0 : whole(low)))
      test_failed("Q4_0 of %a with scale %a: got %g of %g", (double)x[k], scale, got, exact);
  }
}

static void blocks_of_every_size(void **state) {
  float x[BLOCK];
  test_random random;
  (void)state;
  test_random_seed(&random, 12);
  for (int exponent = -140; exponent <= 30; exponent++)
    for (int round = 0; round < (exponent < -30 ? 4 : 100); round++) {
      test_note("2^%d, round %d", exponent, round);
      for (int k = 0; k < BLOCK; k++)
        x[k] = (float)ldexp(test_random_normal(&random), exponent);
      expect_q8_0(x);
      expect_q4_0(x);
    }
}

/* Exactly between two q: away from zero. The largest number fixes the scale at 2^exponent. */
static void blocks_with_ties(void **state) {
  float x[BLOCK];
  (void)state;
  for (int exponent = -24; exponent <= 15; exponent++)
    for (int first = -126; first <= 125; first++) {
      test_note("2^%d from %d on", exponent, first);
      for (int k = 0; k < BLOCK; k++) {
        const int q = first + k * 7 % 251;
        x[k] = (float)ldexp((q > 125 ? q - 251 : q) + 0.5, exponent);
      }
      x[first & 31] = (float)ldexp(first % 2 ? 127.0 : -127.0, exponent);
      expect_q8_0(x);
      for (int k = 0; k < BLOCK; k++)
        x[k] = (float)ldexp((first + k) % 8 + 0.5, exponent);
      x[first & 31] = (float)ldexp(first % 2 ? 8.0 : -8.0, exponent);
      expect_q4_0(x);
    }
}

static void blocks_of_nothing_and_next_to_nothing(void **state) {
  float x[BLOCK] = {0};
  unsigned char q8_0[34], q4_0[18];
  (void)state;
  for (int sign = 0; sign < 2; sign++) {
    for (int k = 0; k < BLOCK; k++)
      x[k] = sign ? -0.0F : 0.0F;
    mha_numbers_round(q8_0, MHA_Q8_0, x, BLOCK);
    mha_numbers_round(q4_0, MHA_Q4_0, x, BLOCK);
    for (int k = 0; k < BLOCK; k++) {
      assert_true(value_in_block(MHA_Q8_0, q8_0, k) == 0.0);
      assert_true(value_in_block(MHA_Q4_0, q4_0, k) == 0.0);
    }
  }
  for (int exponent = -149; exponent <= -10; exponent++) /* scales that are subnormal or vanish */
    for (int largest = 1; largest < 200; largest += 13) {
      for (int k = 0; k < BLOCK; k++)
        x[k] = (float)ldexp((double)(k - 16) / 17.0 * largest, exponent);
      x[3] = (float)ldexp((double)largest, exponent);
      expect_q8_0(x);
      expect_q4_0(x);
    }
}

static void blocks_that_are_not_finite(void **state) {
  const float wrong[] = {NAN, -NAN, INFINITY, -INFINITY};
  (void)state;
  for (int at = 0; at < BLOCK; at++)
    for (size_t which = 0; which < COUNT(wrong); which++) {
      float x[2 * BLOCK];
      unsigned char q8_0[2 * 34], q4_0[2 * 18];
      for (int k = 0; k < 2 * BLOCK; k++)
        x[k] = (float)k;
      x[at] = wrong[which];
      mha_numbers_round(q8_0, MHA_Q8_0, x, 2L * BLOCK);
      mha_numbers_round(q4_0, MHA_Q4_0, x, 2L * BLOCK);
      expect_nan_block(MHA_Q8_0, q8_0);
      expect_nan_block(MHA_Q4_0, q4_0);
      assert_true(value_in_block(MHA_Q8_0, q8_0 + 34, 31) > 60.0); /* the next one is its own */
      assert_true(value_in_block(MHA_Q4_0, q4_0 + 18, 31) > 60.0);
    }
}

/* The largest scale that is finite, and the next float above it. */
static void blocks_beyond_f16(void **state) {
  const double largest = 65520.0; /* half way to what does not fit */
  float x[BLOCK] = {0};
  (void)state;
  for (int sign = -1; sign <= 1; sign += 2)
    for (int step = -1; step <= 1; step++) {
      for (int k = 0; k < 2; k++) {
        const float edge = (float)(largest * (k ? 8.0 : 127.0));
        x[5] = (float)sign * (step < 0   ? nextafterf(edge, 0.0F)
                              : step > 0 ? nextafterf(edge, INFINITY)
                                         : edge);
        if (k)
          expect_q4_0(x);
        else
          expect_q8_0(x);
      }
      x[5] = (float)sign * 3e38F;
      expect_q8_0(x);
      expect_q4_0(x);
    }
}

/* No value is further from its number than half a step, where the scale did not have to round. */
static void blocks_lose_half_a_step(void **state) {
  float x[BLOCK], y[BLOCK];
  unsigned char block[34];
  test_random random;
  (void)state;
  test_random_seed(&random, 13);
  for (int round = 0; round < 2000; round++) {
    for (int k = 0; k < BLOCK; k++)
      x[k] = (float)test_random_uniform(&random, -1.0, 1.0);
    mha_numbers_round(block, MHA_Q8_0, x, BLOCK);
    mha_numbers_widen(y, block, MHA_Q8_0, BLOCK);
    /* the scale is off by 2^-11 of itself, which 127 steps magnify */
    const double step = largest_magnitude(x) / 127.0;
    for (int k = 0; k < BLOCK; k++)
      test_near("number", (double)y[k], (double)x[k], step * (0.5 + 127.0 / 2048.0));
    mha_numbers_round(block, MHA_Q4_0, x, BLOCK);
    mha_numbers_widen(y, block, MHA_Q4_0, BLOCK);
    for (int k = 0; k < BLOCK; k++) /* of the sign that the extreme has not, one step is missing */
      test_near("number", (double)y[k], (double)x[k], largest_magnitude(x) / 8.0 * 1.01);
  }
}

/* ---- Products with stored rows --------------------------------------------------------------- */

/* X, W and Y of a product, each with gaps that are poison, each at a fence. */
typedef struct product {
  test_pool pool;
  mha_rows_product p;
  int64_t w_ld, y_columns;
  float *before;
} product;

static int64_t whole_blocks(int32_t element, int64_t n) {
  return has_blocks(element) ? (n + BLOCK - 1) / BLOCK * BLOCK : n;
}

static product make_product(int32_t element, int64_t rows, int64_t columns, int64_t x_rows,
                            bool dots, int64_t gap, uint64_t seed) {
  product m = {.pool = {.at_front = seed % 2 != 0}};
  test_random random;
  test_random_seed(&random, seed);
  const int64_t inner = dots ? columns : rows;
  m.y_columns = dots ? rows : columns;
  m.w_ld = columns + whole_blocks(element, gap);
  const size_t row_bytes = mha_element_bytes(element, columns);
  const int64_t ld_bytes = (int64_t)mha_element_bytes(element, m.w_ld);
  unsigned char *w = test_pool_bytes(&m.pool, (size_t)((rows - 1) * ld_bytes) + row_bytes);
  for (int64_t j = 0; j < rows; j++)
    fill_stored(&random, element, w + j * ld_bytes, row_bytes);
  float *x = test_pool_floats(&m.pool, (x_rows - 1) * (inner + gap) + inner);
  float *y = test_pool_floats(&m.pool, (x_rows - 1) * (m.y_columns + gap) + m.y_columns);
  m.before = test_pool_floats(&m.pool, x_rows * (m.y_columns + gap));
  for (int64_t r = 0; r < x_rows; r++) {
    test_fill_normal(&random, x + r * (inner + gap), inner, 1.0);
    test_fill_normal(&random, y + r * (m.y_columns + gap), m.y_columns, 1.0);
    memcpy(m.before + r * (m.y_columns + gap), y + r * (m.y_columns + gap),
           (size_t)m.y_columns * sizeof *y);
  }
  m.p = (mha_rows_product){
      element, w,      ld_bytes,    rows, columns,          seed % 3 ? 1.0F : -0.75F,
      x,       x_rows, inner + gap, y,    m.y_columns + gap};
  return m;
}

static void run_product(const mha_row_kernels *kernels, const mha_rows_product *p, bool dots) {
  if (dots)
    kernels->dots(p);
  else
    kernels->sums(p);
}

/* Each lane adds every 16th product of a dot, then the lanes and the last numbers are added up; in
 * a sum each stored row is one addition. */
static void judge_product(const product *m, bool dots) {
  const mha_rows_product *p = &m->p;
  const int64_t inner = dots ? p->columns : p->rows;
  const double steps = dots ? floor((double)p->columns / 16.0) + 40.0 : (double)p->rows + 3.0;
  for (int64_t r = 0; r < p->x_rows; r++)
    for (int64_t j = 0; j < m->y_columns; j++) {
      const double before = (double)m->before[r * p->y_stride + j];
      double sum = 0.0, size = 0.0;
      for (int64_t k = 0; k < inner; k++) {
        const int64_t row = dots ? j : k, column = dots ? k : j;
        const double term = (double)p->x[r * p->x_stride + k] *
                            value_at(p->element, p->w + row * p->w_row_bytes, column);
        sum += term;
        size += fabs(term);
      }
      test_near("Y", (double)p->y[r * p->y_stride + j], before + (double)p->alpha * sum,
                ldexp(1.0, -24) *
                    ((dots ? 1.0 : steps) * fabs(before) + steps * fabs((double)p->alpha) * size));
    }
}

static void check_gaps(const product *m) {
  const mha_rows_product *p = &m->p;
  for (int64_t r = 0; r + 1 < p->x_rows; r++)
    for (int64_t j = m->y_columns; j < p->y_stride; j++)
      assert_true(test_is_poison(p->y[r * p->y_stride + j]));
}

/* The judge alone costs rows·columns·x_rows, so long rows come in fewer combinations. */
static void try_products(bool dots, int64_t columns, int64_t rows, int64_t x_rows, int64_t gap) {
  for (int32_t element = MHA_F16; element <= MHA_Q4_0; element++)
    for (int which = 0; which < n_kernels; which++)
      if (!has_blocks(element) || columns % BLOCK == 0) {
        const uint64_t seed = (uint64_t)(columns + 7 * rows + 11 * x_rows + 13 * gap);
        product m = make_product(element, rows, columns, x_rows, dots, gap, seed);
        test_note("%s %s of %s: rows %d, columns %d, rows of X %d, gap %d",
                  all_kernels[which]->name, dots ? "dots" : "sums", mha_element_name(element),
                  (int)rows, (int)columns, (int)x_rows, (int)gap);
        run_product(all_kernels[which], &m.p, dots);
        judge_product(&m, dots);
        check_gaps(&m);
        test_pool_free(&m.pool);
      }
}

static const int64_t short_columns[] = {1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 96, 100};
static const int64_t long_columns[] = {480, 511,  512,  513,  543,  544,  576,
                                       640, 1023, 1024, 1025, 1056, 1088, 1152};

static void products_with_short_rows(void **state) {
  (void)state;
  for (int dots = 0; dots < 2; dots++)
    for (size_t k = 0; k < COUNT(short_columns); k++)
      for (int64_t rows = 1; rows <= (test_small() ? 5 : 19); rows += rows < 9 ? 1 : 7)
        for (int64_t x_rows = 1; x_rows <= 7; x_rows++)
          for (int64_t gap = 0; gap < 2; gap++)
            try_products(dots, short_columns[k], rows, x_rows, 3 * gap);
}

static void products_with_long_rows(void **state) {
  (void)state;
  for (int dots = 0; dots < 2; dots++)
    for (size_t k = 0; k < (test_small() ? 4 : COUNT(long_columns)); k++)
      for (int64_t rows = 1; rows <= 9; rows += 4)
        for (int64_t x_rows = 1; x_rows <= 7; x_rows++)
          try_products(dots, long_columns[k], rows, x_rows, (rows + x_rows) % 3);
}

/* A number of the result comes about in the same way whatever else there is: rows of X alone (of
 * long dots two and three, since one alone is added up in another order) and, of dots, stored rows
 * alone; stored rows of sums in two calls. */
static void products_of_parts(const mha_row_kernels *kernels, int32_t element, bool dots,
                              int64_t columns) {
  enum { ROWS = 13, X_ROWS = 5 };
  product whole = make_product(element, ROWS, columns, X_ROWS, dots, 0, 77);
  product parts = make_product(element, ROWS, columns, X_ROWS, dots, 0, 77);
  const int64_t cut = 6;
  const int64_t step = dots && columns >= MHA_LONG_ROW ? 2 : 1;
  run_product(kernels, &whole.p, dots);
  for (int64_t r = 0; r + step <= X_ROWS; r += step)
    for (int half = 0; half < 2; half++) {
      mha_rows_product p = parts.p;
      p.x += r * p.x_stride;
      p.y += r * p.y_stride;
      p.x_rows = X_ROWS - r < 2 * step ? X_ROWS - r : step;
      p.w += half ? cut * p.w_row_bytes : 0;
      p.rows = half ? ROWS - cut : cut;
      p.x += half && !dots ? cut : 0;
      p.y += half && dots ? cut : 0;
      run_product(kernels, &p, dots);
    }
  test_same_bits("Y", (test_shape){{1, 1, X_ROWS, whole.y_columns}}, parts.p.y, whole.p.y);
  test_pool_free(&whole.pool);
  test_pool_free(&parts.pool);
}

static void the_same_bits_in_parts(void **state) {
  const int64_t columns[] = {20, 32, 64, 480, 500, 512, 600, 1056};
  (void)state;
  for (int which = 0; which < n_kernels; which++)
    for (int32_t element = MHA_F16; element <= MHA_Q4_0; element++)
      for (int dots = 0; dots < 2; dots++)
        for (size_t k = 0; k < COUNT(columns); k++)
          if (!has_blocks(element) || columns[k] % BLOCK == 0) {
            test_note("%s %s of %s, columns %d", all_kernels[which]->name, dots ? "dots" : "sums",
                      mha_element_name(element), (int)columns[k]);
            products_of_parts(all_kernels[which], element, dots, columns[k]);
          }
}

/* A block of one number: its scale, and all its bytes the same. */
static void fill_block(int32_t element, unsigned char *block, uint16_t scale, unsigned char byte) {
  memcpy(block, &scale, sizeof scale);
  memset(block + 2, byte, element == MHA_Q8_0 ? BLOCK : BLOCK / 2);
}

/* Neither q·x nor scale·x of a block need be within float32 where scale·q·x is. */
static void blocks_times_large_numbers(void **state) {
  enum { LONG = 18 * BLOCK };
  (void)state;
  for (int which = 0; which < n_kernels; which++)
    for (int32_t element = MHA_Q8_0; element <= MHA_Q4_0; element++)
      for (int64_t columns = BLOCK; columns <= LONG; columns += LONG - BLOCK) {
        const int64_t row_bytes = (int64_t)mha_element_bytes(element, columns);
        unsigned char w[LONG / BLOCK * 34];
        float x[LONG] = {[5] = 0x1p126F}, y[LONG] = {0.0F};
        mha_rows_product p = {element, w, row_bytes, 1, columns, 1.0F, x, 1, columns, y, columns};
        for (int64_t c = 0; c < columns; c += BLOCK) /* scale 2^-10, q = 127 or -8 */
          fill_block(element, w + mha_element_bytes(element, c), 0x1400,
                     element == MHA_Q8_0 ? 127 : 0);
        all_kernels[which]->dots(&p);
        assert_true(y[0] == 0x1p116F * (element == MHA_Q8_0 ? 127.0F : -8.0F));
        for (int64_t c = 0; c < columns; c += BLOCK) /* scale 65504, q = 0 */
          fill_block(element, w + mha_element_bytes(element, c), 0x7bff,
                     element == MHA_Q8_0 ? 0 : 0x88);
        x[0] = 0x1p116F;
        y[0] = 0.0F;
        all_kernels[which]->sums(&p);
        for (int64_t c = 0; c < columns; c++)
          assert_true(y[c] == 0.0F);
      }
}

/* A stored row with a NaN concerns its own column of dots, and that column of sums. */
static void nan_stays_where_it_is(void **state) {
  const int64_t columns = 64;
  (void)state;
  for (int which = 0; which < n_kernels; which++)
    for (int32_t element = MHA_F16; element <= MHA_Q4_0; element++)
      for (int dots = 0; dots < 2; dots++) {
        product m = make_product(element, 9, columns, 3, dots, 0, 5);
        const uint16_t nan = element == MHA_BF16 ? 0x7fc0 : 0x7e00;
        memcpy((unsigned char *)(uintptr_t)m.p.w + 4 * m.p.w_row_bytes, &nan, sizeof nan);
        run_product(all_kernels[which], &m.p, dots);
        for (int64_t r = 0; r < 3; r++)
          for (int64_t j = 0; j < m.y_columns; j++)
            assert_int_equal(isnan(m.p.y[r * m.p.y_stride + j]) != 0, dots ? j == 4
                                                                      : has_blocks(element)
                                                                          ? j < BLOCK
                                                                          : j == 0);
        test_pool_free(&m.pool);
      }
}

/* ---- Views of stored matrices ---------------------------------------------------------------- */

static double stored_value(const mha_stored *w, int64_t r, int64_t c) {
  return value_at(w->element, w->data, r * w->row_stride + c * w->column_stride);
}

static void expect_view(const mha_view *got, const mha_stored *w, int64_t r0, int64_t c0) {
  for (int64_t r = 0; r < got->rows; r++)
    for (int64_t c = 0; c < got->columns; c++)
      expect_exactly("element", r * got->columns + c,
                     got->data[r * got->row_stride + c * got->column_stride],
                     stored_value(w, r0 + r, c0 + c));
}

/* A matrix of 96 × 128 numbers, its stored rows `ld` apart, and parts of it. */
static void try_views(int32_t element, int64_t ld, bool turned) {
  test_pool pool = {0};
  test_random random;
  test_random_seed(&random, 3);
  const size_t bytes = mha_element_bytes(element, 95 * ld) + mha_element_bytes(element, 128);
  unsigned char *data = test_pool_bytes(&pool, bytes);
  fill_stored(&random, element, data, bytes);
  mha_stored w = {data, element, 96, 128, ld, 1};
  if (turned)
    w = mha_stored_transposed(w);
  float *scratch = test_pool_floats(&pool, 96 * 128);
  const mha_view all = mha_numbers_fetch(&w, scratch);
  assert_int_equal(all.rows, turned ? 128 : 96);
  expect_view(&all, &w, 0, 0);
  for (int64_t first = 0; first <= 64; first += 32) {
    const mha_stored columns = mha_stored_columns(w, first, 32);
    const mha_stored part = mha_stored_row_block(columns, 96 - 32 - first, 32);
    float *room = test_pool_floats(&pool, 32 * 32);
    const mha_view view = mha_numbers_fetch(&part, room);
    assert_int_equal(view.rows, 32);
    assert_int_equal(view.columns, 32);
    expect_view(&view, &w, 96 - 32 - first, first);
  }
  test_pool_free(&pool);
}

static void views_of_stored_matrices(void **state) {
  (void)state;
  for (int32_t element = MHA_F16; element <= MHA_Q4_0; element++)
    for (int64_t gap = 0; gap <= 64; gap += 32)
      for (int turned = 0; turned < 2; turned++) {
        test_note("%s, gap %d, turned %d", mha_element_name(element), (int)gap, turned);
        try_views(element, 128 + gap, turned);
      }
}

/* Y = alpha·X·W + beta·Y; a beta of 0 does not read Y. */
static void products_with_stored_matrices(void **state) {
  const float betas[] = {0.0F, 1.0F, -0.5F};
  (void)state;
  for (int32_t element = MHA_F16; element <= MHA_Q4_0; element++)
    for (int turned = 0; turned < 2; turned++)
      for (size_t k = 0; k < COUNT(betas); k++)
        for (int64_t x_rows = 1; x_rows <= 3; x_rows++) {
          product m = make_product(element, 64, 96, x_rows, turned, 2, 4);
          mha_rows_product *p = &m.p;
          const mha_stored stored = {p->w, element, 64, 96, m.w_ld, 1};
          const mha_stored w = turned ? mha_stored_transposed(stored) : stored;
          test_note("%s, turned %d, beta %g", mha_element_name(element), turned, (double)betas[k]);
          for (int64_t r = 0; r < x_rows; r++)
            for (int64_t j = 0; j < m.y_columns; j++) {
              m.before[r * p->y_stride + j] *= betas[k];
              if (betas[k] == 0.0F)
                p->y[r * p->y_stride + j] = NAN;
            }
          assert_int_equal(mha_numbers_multiply(&mha_engine_blas, p->alpha,
                                                mha_view_rows(p->x, x_rows, w.rows, p->x_stride),
                                                &w, betas[k], p->y, p->y_stride),
                           MHA_OK);
          judge_product(&m, turned);
          check_gaps(&m);
          test_pool_free(&m.pool);
        }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_best_of_them_is_chosen),
      cmocka_unit_test(every_half_widens_exactly),
      cmocka_unit_test(every_block_widens_exactly),
      cmocka_unit_test(every_length_and_alignment),
      cmocka_unit_test(widening_although_subnormals_are_flushed),
      cmocka_unit_test(blocks_although_subnormals_are_flushed),
      cmocka_unit_test(products_although_subnormals_are_flushed),
      cmocka_unit_test(widening_in_every_rounding_mode),
      cmocka_unit_test(halves_to_nearest_even),
      cmocka_unit_test(any_float_to_a_half),
      cmocka_unit_test(halves_in_any_environment),
      cmocka_unit_test(blocks_of_every_size),
      cmocka_unit_test(blocks_with_ties),
      cmocka_unit_test(blocks_of_nothing_and_next_to_nothing),
      cmocka_unit_test(blocks_that_are_not_finite),
      cmocka_unit_test(blocks_beyond_f16),
      cmocka_unit_test(blocks_lose_half_a_step),
      cmocka_unit_test(products_with_short_rows),
      cmocka_unit_test(products_with_long_rows),
      cmocka_unit_test(the_same_bits_in_parts),
      cmocka_unit_test(blocks_times_large_numbers),
      cmocka_unit_test(nan_stays_where_it_is),
      cmocka_unit_test(views_of_stored_matrices),
      cmocka_unit_test(products_with_stored_matrices),
  };
  return cmocka_run_group_tests(tests, find_kernels, NULL);
}
