/* The random numbers of every instruction set that can be had, against the judge's, which give the
 * generator's published vectors; and that a row is the same however it is cut. */
#include "dropout.h"
#include "support.h"

#include "engine/philox.h"

#include <inttypes.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

typedef void words_function(const mha_philox *philox, uint64_t first, int64_t n, uint32_t *words);
typedef void factors_function(const mha_philox *philox, uint64_t first, int64_t n,
                              uint32_t threshold, float factor, float *factors);

/* The same source compiled again: without levels, and for each level. */
words_function test_philox_words_baseline, test_philox_words_v3, test_philox_words_v4;
factors_function test_philox_factors_baseline, test_philox_factors_v3, test_philox_factors_v4;

typedef struct level {
  const char *name;
  words_function *words;
  factors_function *factors;
} level;

static level levels[4] = {
    {"the loader's choice", mha_philox_words, mha_philox_factors},
    {"baseline", test_philox_words_baseline, test_philox_factors_baseline},
};
static size_t n_levels = 2;

static int find_levels(void **state) {
  (void)state;
#if MHA_TEST_LEVELS
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2"))
    levels[n_levels++] = (level){"x86-64-v3", test_philox_words_v3, test_philox_factors_v3};
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    levels[n_levels++] = (level){"x86-64-v4", test_philox_words_v4, test_philox_factors_v4};
#endif
  return 0;
}

/* Those of the authors, for ten rounds. */
static void the_judge_gives_the_published_vectors(void **state) {
  const struct {
    uint32_t counter[4], key[2], words[4];
  } known[] = {{{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
               {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
                {0xffffffff, 0xffffffff},
                {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
               {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                {0xa4093822, 0x299f31d0},
                {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  (void)state;
  for (size_t k = 0; k < COUNT(known); k++) {
    uint32_t words[4];
    test_philox(known[k].counter, known[k].key, words);
    assert_memory_equal(words, known[k].words, sizeof words);
  }
}

static uint32_t right_word(const mha_philox *philox, uint64_t e) {
  const uint32_t counter[4] = {(uint32_t)(e / 4), (uint32_t)(e / 4 >> 32), (uint32_t)philox->call,
                               (uint32_t)(philox->call >> 32)};
  const uint32_t key[2] = {(uint32_t)philox->seed, (uint32_t)(philox->seed >> 32)};
  uint32_t words[4];
  test_philox(counter, key, words);
  return words[e % 4];
}

/* n words and n factors from `first` on, and nothing behind them. */
static void expect_row(const level *l, const mha_philox *philox, uint64_t first, int64_t n) {
  enum { MOST = 300 };
  const uint32_t behind = 0x5eed5eed, threshold = 0x9abcdef0;
  uint32_t words[MOST + 1];
  float factors[MOST + 1];
  assert_true(n <= MOST);
  test_note("%s: seed %" PRIx64 ", call %" PRIx64 ", %" PRId64 " words from %" PRIx64, l->name,
            philox->seed, philox->call, n, first);
  words[n] = behind;
  factors[n] = 7.0F;
  l->words(philox, first, n, words);
  l->factors(philox, first, n, threshold, 2.5F, factors);
  for (int64_t k = 0; k < n; k++) {
    const uint32_t right = right_word(philox, first + (uint64_t)k);
    if (words[k] != right)
      test_failed("word %" PRId64 " is %" PRIx32 " instead of %" PRIx32, k, words[k], right);
    assert_true(test_equal_bits(factors[k], right < threshold ? 0.0F : 2.5F));
  }
  assert_int_equal(words[n], behind);
  assert_true(factors[n] == 7.0F);
}

static void rows_of_every_length_and_beginning(void **state) {
  const mha_philox philox = {UINT64_C(0x123456789abcdef0), UINT64_C(0xfedcba9876543210)};
  (void)state;
  for (size_t l = 0; l < n_levels; l++)
    for (uint64_t first = 0; first < 9; first++)
      for (int64_t n = 0; n <= 300; n += n < 140 ? 1 : 16)
        expect_row(&levels[l], &philox, 1000 + first, n);
}

/* Where the index of a block needs its second word, where it no longer fits a signed number, where
 * the index of a word comes round; seeds and calls that only one of their words tells apart. */
static void large_numbers(void **state) {
  const uint64_t firsts[] = {0,
                             (UINT64_C(1) << 34) - 130,
                             UINT64_C(5) << 34,
                             (UINT64_C(1) << 63) - 7,
                             UINT64_MAX - 200,
                             UINT64_MAX - 2};
  const uint64_t numbers[] = {0, 1, UINT64_C(1) << 32, UINT64_MAX};
  (void)state;
  for (size_t l = 0; l < n_levels; l++)
    for (size_t k = 0; k < COUNT(firsts); k++)
      for (size_t a = 0; a < COUNT(numbers); a++)
        for (size_t b = 0; b < COUNT(numbers); b++) {
          const mha_philox philox = {numbers[a], numbers[b]};
          expect_row(&levels[l], &philox, firsts[k], 270);
        }
}

/* What another level is chosen over, where the processor has both. */
static void pieces_by_avx2(void **state) {
  const uint64_t firsts[] = {
      0, 64, 1020, (UINT64_C(1) << 34) - 8, UINT64_MAX - 63, UINT64_MAX - 31};
  const mha_philox philox = {UINT64_C(0x123456789abcdef0), UINT64_C(0xfedcba9876543210)};
  mha_philox_maker *make = mha_philox_avx2();
  uint32_t words[MHA_PHILOX_PIECE + 1];
  (void)state;
  if (!make)
    skip();
  for (size_t k = 0; k < COUNT(firsts); k++) {
    const uint64_t first = firsts[k] / 4 * 4;
    words[MHA_PHILOX_PIECE] = 7;
    make(&philox, first, words);
    for (uint64_t e = 0; e < MHA_PHILOX_PIECE; e++)
      assert_int_equal(words[e], right_word(&philox, first + e));
    assert_int_equal(words[MHA_PHILOX_PIECE], 7);
  }
}

/* A word of exactly the threshold is kept, and 0 drops nothing. */
static void the_threshold_is_kept(void **state) {
  const mha_philox philox = {0, 0};
  const uint32_t word = 0x6627e8d5; /* the first of seed 0 and call 0 */
  const struct {
    uint32_t threshold;
    float factor;
  } known[] = {{0, 3.0F}, {word - 1, 3.0F}, {word, 3.0F}, {word + 1, 0.0F}, {UINT32_MAX, 0.0F}};
  (void)state;
  for (size_t l = 0; l < n_levels; l++)
    for (size_t k = 0; k < COUNT(known); k++) {
      float factor = 7.0F;
      levels[l].factors(&philox, 0, 1, known[k].threshold, 3.0F, &factor);
      test_note("%s, threshold %" PRIx32, levels[l].name, known[k].threshold);
      assert_true(test_equal_bits(factor, known[k].factor));
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_judge_gives_the_published_vectors),
      cmocka_unit_test(rows_of_every_length_and_beginning),
      cmocka_unit_test(large_numbers),
      cmocka_unit_test(pieces_by_avx2),
      cmocka_unit_test(the_threshold_is_kept),
  };
  return cmocka_run_group_tests(tests, find_levels, NULL);
}
