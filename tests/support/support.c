/* Owns the tests' tools: random numbers, fenced memory, the failing allocator, comparisons. */
#define _DEFAULT_SOURCE 1 /* MAP_ANONYMOUS */
#include "support.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

/* ---- Failing with a story -------------------------------------------------------------------- */

static char note[1024];

void test_note(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(note, sizeof note, format, arguments);
  va_end(arguments);
}

void test_failed(const char *format, ...) {
  char message[1024];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  fail_msg("%s%s%s", message, note[0] ? "\n    while trying " : "", note);
}

void test_expect(mha_status status, mha_status expected, const mha_error *error) {
  if (status != expected)
    test_failed("got %s, expected %s; the message is \"%s\"", mha_status_name(status),
                mha_status_name(expected), error ? error->message : "(none asked for)");
  if (error && error->status != status)
    test_failed("returned %s but wrote %s", mha_status_name(status),
                mha_status_name(error->status));
  if (error && (error->message[0] == '\0') != (status == MHA_OK))
    test_failed("%s comes with the message \"%s\"", mha_status_name(status), error->message);
}

bool test_small(void) {
  return getenv("MHA_TEST_SMALL") != NULL;
}

void *test_allocate(size_t n, size_t element_bytes) {
  void *memory = calloc(n + 1, element_bytes);
  assert_non_null(memory);
  return memory;
}

void test_keep_memory(void) {
#ifdef __GLIBC__
  (void)mallopt(M_MMAP_THRESHOLD, 32 << 20); /* glibc takes no more */
  (void)mallopt(M_TRIM_THRESHOLD, INT_MAX);
#endif
}

/* ---- Random numbers -------------------------------------------------------------------------- */

void test_random_seed(test_random *random, uint64_t seed) {
  for (int i = 0; i < 4; i++) {
    seed += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t z = seed;
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    random->state[i] = z ^ (z >> 31);
  }
}

static uint64_t rotate_left(uint64_t x, int k) {
  return (x << k) | (x >> (64 - k));
}

uint64_t test_random_bits(test_random *random) {
  uint64_t *s = random->state;
  const uint64_t result = rotate_left(s[1] * 5, 7) * 9, t = s[1] << 17;
  s[2] ^= s[0];
  s[3] ^= s[1];
  s[1] ^= s[2];
  s[0] ^= s[3];
  s[2] ^= t;
  s[3] = rotate_left(s[3], 45);
  return result;
}

double test_random_uniform(test_random *random, double low, double high) {
  return low + (high - low) * (double)(test_random_bits(random) >> 11) * 0x1p-53;
}

/* Box and Muller's transform of two uniform numbers. */
/* Two at a time, by Box and Muller: log and sin cost much of what a test does. */
static void normal_pair(test_random *random, double pair[2]) {
  const double radius = sqrt(-2.0 * log(test_random_uniform(random, 1e-12, 1.0)));
  const double angle = 6.283185307179586 * test_random_uniform(random, 0.0, 1.0);
  const double sine = sin(angle);
  pair[0] = copysign(sqrt(fmax(0.0, 1.0 - sine * sine)),
                     fabs(angle - 3.141592653589793) - 1.5707963267948966) *
            radius;
  pair[1] = sine * radius;
}

double test_random_normal(test_random *random) {
  double pair[2];
  normal_pair(random, pair);
  return pair[0];
}

int64_t test_random_range(test_random *random, int64_t low, int64_t high) {
  return low + (int64_t)(test_random_bits(random) % (uint64_t)(high - low + 1));
}

void test_fill_normal(test_random *random, float *numbers, int64_t n, double factor) {
  double pair[2];
  for (int64_t i = 0; i < n; i++) {
    if (i % 2 == 0)
      normal_pair(random, pair);
    numbers[i] = (float)(factor * pair[i % 2]);
  }
}

/* ---- Poisoned memory between guard pages ----------------------------------------------------- */

float test_poison(void) {
  const uint32_t bits = TEST_POISON_BITS;
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

bool test_equal_bits(float a, float b) {
  return memcmp(&a, &b, sizeof a) == 0;
}

bool test_is_poison(float number) {
  return test_equal_bits(number, test_poison());
}

void test_fill_poison(float *numbers, int64_t n) {
  const uint32_t bits = TEST_POISON_BITS;
  for (int64_t i = 0; i < n; i++)
    memcpy(&numbers[i], &bits, sizeof bits);
}

static size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

static test_block *add_block(test_pool *pool, size_t bytes) {
  test_block *block = malloc(sizeof *block);
  assert_non_null(block);
  *block = (test_block){.fenced = test_fenced_take(bytes), .bytes = bytes, .next = pool->first};
  assert_non_null(block->fenced.map);
  block->array =
      pool->at_front ? test_fenced_begin(block->fenced) : test_fenced_end(block->fenced) - bytes;
  pool->first = block;
  return block;
}

float *test_pool_floats(test_pool *pool, int64_t n) {
  return (float *)(void *)add_block(pool, (size_t)n * sizeof(float))->array;
}

void *test_pool_bytes(test_pool *pool, size_t bytes) {
  char *memory = add_block(pool, bytes)->array;
  memset(memory, 0xa5, bytes);
  return memory;
}

float *test_pool_cut(test_pool *pool, int64_t n, int64_t readable) {
  const size_t page = test_page_bytes(), front = (size_t)readable * sizeof(float);
  const size_t back = round_up((size_t)(n - readable) * sizeof(float), page);
  test_block *block = add_block(pool, round_up(front ? front : 1, page) + back);
  char *cut = test_fenced_end(block->fenced) - back;
  if (back)
    assert_int_equal(mprotect(cut, back, PROT_NONE), 0);
  block->cut = true;
  return (float *)(void *)(cut - front);
}

static char *align_down(char *pointer, size_t alignment) {
  return pointer - ((uintptr_t)pointer & (alignment - 1));
}

/* What lies between an array and the farther fence must be poison still. */
static bool wrote_beside(const test_block *block) {
  char *end = block->array + block->bytes;
  return !test_all_poison(test_fenced_begin(block->fenced), align_down(block->array, 4)) ||
         !test_all_poison(align_down(end + 3, 4), test_fenced_end(block->fenced));
}

void test_pool_free(test_pool *pool) {
  bool broken = false;
  while (pool->first) {
    test_block *block = pool->first;
    pool->first = block->next;
    if (block->cut) {
      test_fenced_unmap(block->fenced);
    } else {
      broken = broken || wrote_beside(block);
      test_fenced_release(block->fenced);
    }
    free(block);
  }
  if (broken)
    test_failed("memory beside an array was written");
}

/* ---- An allocator that counts, fences and fails ---------------------------------------------- */

/* Lies on a page of its own before the block's first page. */
typedef struct block_header {
  test_fenced fenced;
  size_t bytes;
  struct block_header *self; /* NULL once released */
} block_header;

#define FENCE_BYTE 0x5a

static block_header *header_of(char *memory) {
  return (block_header *)(void *)(align_down(memory, test_page_bytes()) - test_page_bytes());
}

static void *allocator_allocate(void *user, size_t bytes, size_t alignment) {
  test_allocator *a = user;
  a->calls++;
  if (alignment == 0 || (alignment & (alignment - 1)) || alignment > 64)
    a->misused = true;
  if (a->calls == a->fail_at)
    return NULL;
  const test_fenced fenced = test_fenced_take(test_page_bytes() + bytes + 64);
  if (!fenced.map)
    return NULL;
  char *end = test_fenced_end(fenced), *memory = align_down(end - bytes, alignment);
  memset(memory + bytes, FENCE_BYTE, (size_t)(end - (memory + bytes)));
  block_header *header = header_of(memory);
  *header = (block_header){fenced, bytes, header};
  a->live++;
  a->live_bytes += bytes;
  if (a->n_ranges < TEST_MAX_RANGES)
    a->ranges[a->n_ranges++] = (test_range){memory, memory + bytes};
  return memory;
}

static void allocator_release(void *user, void *pointer, size_t bytes) {
  test_allocator *a = user;
  char *memory = pointer;
  block_header *header = header_of(memory);
  if (header->self != header || header->bytes != bytes) {
    a->misused = true;
    return;
  }
  const char *end = test_fenced_end(header->fenced);
  for (const char *fence = memory + bytes; fence < end; fence++)
    a->misused = a->misused || *fence != FENCE_BYTE;
  a->misused = a->misused || !test_all_poison((const char *)(header + 1), align_down(memory, 4));
  a->live--;
  a->live_bytes -= bytes;
  header->self = NULL;
  test_fenced_release(header->fenced);
}

void test_allocator_init(test_allocator *allocator) {
  memset(allocator, 0, sizeof *allocator);
  allocator->mha.user = allocator;
  allocator->mha.allocate = allocator_allocate;
  allocator->mha.release = allocator_release;
}

void test_allocator_check(const test_allocator *allocator) {
  if (allocator->live)
    test_failed("%" PRId64 " blocks with %zu bytes leaked", allocator->live, allocator->live_bytes);
  if (allocator->misused)
    test_failed("the allocator was misused, or memory was written beside a block");
}

/* ---- Comparing ------------------------------------------------------------------------------- */

static int64_t count(test_shape shape) {
  return shape.n[0] * shape.n[1] * shape.n[2] * shape.n[3];
}

static const char *position(test_shape shape, int64_t index) {
  static char text[128];
  int64_t at[4];
  for (int i = 3; i >= 0; i--) {
    at[i] = index % shape.n[i];
    index /= shape.n[i];
  }
  (void)snprintf(text, sizeof text,
                 "[%" PRId64 "][%" PRId64 "][%" PRId64 "][%" PRId64 "] of [%" PRId64 "][%" PRId64
                 "][%" PRId64 "][%" PRId64 "]",
                 at[0], at[1], at[2], at[3], shape.n[0], shape.n[1], shape.n[2], shape.n[3]);
  return text;
}

static bool within(double got, double expected, double bound) {
  if (isnan(expected))
    return isnan(got);
  if (isinf(expected))
    return isinf(got) && (got > 0) == (expected > 0);
  return fabs(got - expected) <= bound;
}

void test_compare(const char *what, test_shape shape, const float *got, const double *expected,
                  const double *bound) {
  for (int64_t i = 0; i < count(shape); i++)
    if (!within(got[i], expected[i], bound[i]))
      test_failed("%s%s: got %.9g, expected %.9g, off by %.3g, allowed %.3g%s", what,
                  position(shape, i), (double)got[i], expected[i],
                  fabs((double)got[i] - expected[i]), bound[i],
                  test_is_poison(got[i]) ? " (it was never written)" : "");
}

void test_same_bits(const char *what, test_shape shape, const float *got, const float *expected) {
  for (int64_t i = 0; i < count(shape); i++)
    if (!test_equal_bits(got[i], expected[i]))
      test_failed("%s%s: got %.9g (%a), expected the bits of %.9g (%a)", what, position(shape, i),
                  (double)got[i], (double)got[i], (double)expected[i], (double)expected[i]);
}

void test_near(const char *what, double got, double expected, double bound) {
  if (!within(got, expected, bound))
    test_failed("%s: got %.9g, expected %.9g, allowed %.3g", what, got, expected, bound);
}

/* ---- Files ----------------------------------------------------------------------------------- */

double *test_read_npy(const char *path, int64_t n) {
  unsigned char start[10];
  char header[1024] = "";
  FILE *file = fopen(path, "rb");
  if (!file)
    test_failed("cannot open %s", path);
  assert_int_equal(fread(start, 1, sizeof start, file), sizeof start);
  assert_memory_equal(start, "\x93NUMPY\x01\x00", 8);
  const size_t header_bytes = (size_t)start[8] + 256 * (size_t)start[9];
  assert_true(header_bytes < sizeof header);
  assert_int_equal(fread(header, 1, header_bytes, file), header_bytes);
  assert_non_null(strstr(header, "'<f8'"));
  assert_non_null(strstr(header, "'fortran_order': False"));
  double *numbers = malloc((size_t)n * sizeof *numbers);
  assert_non_null(numbers);
  assert_int_equal(fread(numbers, sizeof *numbers, (size_t)n, file), n);
  assert_int_equal(fgetc(file), EOF);
  assert_int_equal(fclose(file), 0);
  return numbers;
}
