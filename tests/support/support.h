/* What every test needs: seeded random numbers, memory that is poisoned and fenced with guard
 * pages, an allocator that counts, fences and fails, and comparisons that say where and by how
 * much. */
#ifndef MHA_TESTS_SUPPORT_H
#define MHA_TESTS_SUPPORT_H

#include "fenced.h"
#include "mha.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* ---- Failing with a story -------------------------------------------------------------------- */

#if defined(__GNUC__)
#define TEST_PRINTF(format_index, first_argument)                                                  \
  __attribute__((format(printf, format_index, first_argument)))
#else
#define TEST_PRINTF(format_index, first_argument)
#endif

/* Remembers what is being tried (sizes, options, seed); printed by test_failed. */
void test_note(const char *format, ...) TEST_PRINTF(1, 2);
/* Prints the note and the message, and fails the running test. Main thread only. */
void test_failed(const char *format, ...) TEST_PRINTF(1, 2);

/* Fails unless `status` is `expected`; prints the library's message otherwise. */
void test_expect(mha_status status, mha_status expected, const mha_error *error);

/* True when MHA_TEST_SMALL is set: sweeps take a few sizes only, for slow machines (valgrind). */
bool test_small(void);

/* Zeroed memory for n elements, also for none; free it with free. Fails the test if there is none.
 */
void *test_allocate(size_t n, size_t element_bytes);

/* Tells malloc to give no memory back: arrays of megabytes come and go in every case of a sweep,
 * and new pages cost more than what is done with them. Nothing where malloc cannot be told. */
void test_keep_memory(void);

/* ---- Random numbers (splitmix64 seeds xoshiro256**) ------------------------------------------ */

typedef struct test_random {
  uint64_t state[4];
} test_random;

void test_random_seed(test_random *random, uint64_t seed);
uint64_t test_random_bits(test_random *random);
double test_random_uniform(test_random *random, double low, double high);
double test_random_normal(test_random *random);
int64_t test_random_range(test_random *random, int64_t low, int64_t high); /* both inclusive */

/* n normal numbers times `factor`. */
void test_fill_normal(test_random *random, float *numbers, int64_t n, double factor);

/* ---- Poisoned memory between guard pages ----------------------------------------------------- */

/* Memory is full of this NaN until somebody writes; outputs are checked for its bits. */
#define TEST_POISON_BITS UINT32_C(0x7fc5a5a5)
float test_poison(void);
bool test_is_poison(float number);
void test_fill_poison(float *numbers, int64_t n);

typedef struct test_block {
  test_fenced fenced;
  char *array; /* at one end of the mapping or the other */
  size_t bytes;
  bool cut; /* some of its pages are inaccessible */
  struct test_block *next;
} test_block;

/* Blocks that are freed together. Begin with {0}. */
typedef struct test_pool {
  test_block *first;
  bool at_front; /* blocks begin right behind a guard page instead of ending right before one */
} test_pool;

/* n poisoned floats; a step outside hits an inaccessible page (at the other side after less than
 * one page of poison, or an eighth of a large array's size). Never NULL, also for n = 0. */
float *test_pool_floats(test_pool *pool, int64_t n);
/* The same for bytes, 0xa5 each; aligned to 8 where `bytes` is a multiple of 8. */
void *test_pool_bytes(test_pool *pool, size_t bytes);
/* One poisoned array of `n` floats of which those from `readable` on lie in inaccessible pages. */
float *test_pool_cut(test_pool *pool, int64_t n, int64_t readable);
/* Fails the test if the poison beside an array was written. */
void test_pool_free(test_pool *pool);

/* ---- An allocator that counts, fences and fails ---------------------------------------------- */

#define TEST_MAX_RANGES 4096

typedef struct test_range {
  const char *begin, *end;
} test_range;

/* Begin with test_allocator_init. Blocks are poisoned and end at a guard page. */
typedef struct test_allocator {
  mha_allocator mha; /* pass this one */
  int64_t fail_at;   /* number of the allocation that fails, from 1; 0 = none */
  int64_t calls;     /* allocations asked for */
  int64_t live;      /* blocks not released */
  size_t live_bytes;
  bool
      misused; /* released with other bytes, twice, or never allocated; or written beside a block */
  int n_ranges; /* every block ever handed out, for those who ask where a pointer points */
  test_range ranges[TEST_MAX_RANGES];
} test_allocator;

void test_allocator_init(test_allocator *allocator);
/* Fails the test unless all is released and was used well. */
void test_allocator_check(const test_allocator *allocator);

/* ---- Comparing ------------------------------------------------------------------------------- */

/* Up to four dimensions, row-major, for saying where. Unused ones are 1. */
typedef struct test_shape {
  int64_t n[4];
} test_shape;

/* |got − expected| ≤ bound for each; NaN and infinities must be the same. */
void test_compare(const char *what, test_shape shape, const float *got, const double *expected,
                  const double *bound);
/* Equal bit by bit. */
void test_same_bits(const char *what, test_shape shape, const float *got, const float *expected);
bool test_equal_bits(float a, float b);
/* One number against one number. */
void test_near(const char *what, double got, double expected, double bound);

/* ---- Files ----------------------------------------------------------------------------------- */

/* Reads a version 1 .npy file of little-endian float64 in C order into malloc'd memory; fails the
 * test if it is anything else or does not hold n numbers. */
double *test_read_npy(const char *path, int64_t n);

#endif
