/* Owns the memory that the library is lent, and what may happen to it. */
#define _XOPEN_SOURCE 700

#include "memory.h"

#include "../fuzz.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FUZZ_HAS_ASAN
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define FUZZ_HAS_ASAN
#endif
#ifdef FUZZ_HAS_ASAN
#include <sanitizer/asan_interface.h>
#endif

enum { FILL = 0xA5, SHIFTS = 16 };

/* ---- lent arrays ---- */

void *fuzz_pool_take(fuzz_pool *pool, int64_t n, size_t element_bytes) {
  const size_t bytes = (size_t)n * element_bytes;
  const size_t shift = pool->shift / element_bytes * element_bytes % SHIFTS;
  fuzz_block *block = calloc(1, sizeof *block);
  FUZZ_CHECK(block && n >= 0);
  block->memory = malloc(bytes + shift + (bytes == 0));
  block->before = malloc(2 * bytes + 1);
  block->writable = calloc(bytes + 1, sizeof *block->writable);
  FUZZ_CHECK(block->memory && block->before && block->writable);
  block->data = (unsigned char *)block->memory + shift;
  block->after = block->before + bytes;
  block->bytes = bytes;
  memset(block->data, FILL, bytes);
  block->next = pool->first;
  pool->first = block;
  return block->data;
}

float *fuzz_pool_floats(fuzz_pool *pool, int64_t n) {
  return fuzz_pool_take(pool, n, sizeof(float));
}

int64_t *fuzz_pool_integers(fuzz_pool *pool, int64_t n) {
  return fuzz_pool_take(pool, n, sizeof(int64_t));
}

float *fuzz_pool_output(fuzz_pool *pool, int64_t n, int runs, bool complete) {
  float *data = fuzz_pool_floats(pool, n);
  pool->first->runs = runs;
  pool->first->complete = complete;
  return data;
}

void fuzz_pool_allow(fuzz_pool *pool, const void *begin, size_t bytes) {
  const uintptr_t at = (uintptr_t)begin;
  for (fuzz_block *b = pool->first; b && bytes > 0; b = b->next) {
    const uintptr_t data = (uintptr_t)b->data;
    if (at < data || at - data >= b->bytes)
      continue;
    FUZZ_CHECK(bytes <= b->bytes - (at - data));
    memset(b->writable + (at - data), true, bytes);
    return;
  }
  FUZZ_CHECK(bytes == 0);
}

void fuzz_pool_forbid(fuzz_pool *pool) {
  for (fuzz_block *b = pool->first; b; b = b->next)
    b->runs = FUZZ_NO_RUN;
}

void fuzz_pool_hide(fuzz_pool *pool, const void *begin, size_t bytes) {
  if (pool->n_hidden == FUZZ_MOST_HIDDEN)
    return;
  pool->hidden[pool->n_hidden].data = begin;
  pool->hidden[pool->n_hidden++].bytes = bytes;
}

void fuzz_pool_close(const fuzz_pool *pool) {
#ifdef FUZZ_HAS_ASAN
  for (int k = 0; k < pool->n_hidden; k++)
    ASAN_POISON_MEMORY_REGION(pool->hidden[k].data, pool->hidden[k].bytes);
#endif
  (void)pool;
}

void fuzz_pool_open(const fuzz_pool *pool) {
#ifdef FUZZ_HAS_ASAN
  for (int k = 0; k < pool->n_hidden; k++)
    ASAN_UNPOISON_MEMORY_REGION(pool->hidden[k].data, pool->hidden[k].bytes);
#endif
  (void)pool;
}

void fuzz_pool_remember(fuzz_pool *pool) {
  for (fuzz_block *b = pool->first; b; b = b->next)
    memcpy(b->before, b->data, b->bytes);
}

void fuzz_pool_rewind(fuzz_pool *pool) {
  for (fuzz_block *b = pool->first; b; b = b->next) {
    memcpy(b->after, b->data, b->bytes);
    memcpy(b->data, b->before, b->bytes);
  }
}

void fuzz_pool_check_untouched(const fuzz_pool *pool) {
  for (const fuzz_block *b = pool->first; b; b = b->next)
    FUZZ_CHECK(memcmp(b->data, b->before, b->bytes) == 0);
}

void fuzz_pool_check_written(const fuzz_pool *pool, int run) {
  static const unsigned char unwritten[] = {FILL, FILL, FILL, FILL};
  for (const fuzz_block *b = pool->first; b; b = b->next) {
    const bool may = (b->runs & run) != 0;
    for (size_t k = 0; k < b->bytes; k++)
      FUZZ_CHECK((may && b->writable[k]) || b->data[k] == b->before[k]);
    for (size_t k = 0; may && b->complete && k < b->bytes; k += sizeof unwritten)
      FUZZ_CHECK(!b->writable[k] || memcmp(b->data + k, unwritten, sizeof unwritten) != 0);
  }
}

void fuzz_pool_check_same(const fuzz_pool *pool) {
  for (const fuzz_block *b = pool->first; b; b = b->next)
    if (b->runs == FUZZ_BOTH_RUNS)
      FUZZ_CHECK(memcmp(b->data, b->after, b->bytes) == 0);
}

void fuzz_pool_free(fuzz_pool *pool) {
  while (pool->first) {
    fuzz_block *block = pool->first;
    pool->first = block->next;
    free(block->memory);
    free(block->before);
    free(block->writable);
    free(block);
  }
  pool->n_hidden = 0;
}

/* ---- an allocator ---- */

/* What no call of these sizes needs. */
enum { MOST_BYTES = 1 << 23, MOST_ALIGNMENT = 64 };

struct fuzz_allocation {
  fuzz_allocation *next;
  void *memory;
  size_t bytes;
  pthread_t thread;
};

static void *allocate(void *user, size_t bytes, size_t alignment) {
  fuzz_allocator *a = user;
  fuzz_allocation *one = NULL;
  FUZZ_CHECK(bytes > 0 && alignment > 0 && alignment <= MOST_ALIGNMENT);
  FUZZ_CHECK((alignment & (alignment - 1)) == 0);
  a->calls++;
  if (a->fail_in > 0 && --a->fail_in == 0)
    return NULL;
  if (bytes > MOST_BYTES)
    return NULL;
  one = calloc(1, sizeof *one);
  FUZZ_CHECK(one && posix_memalign(&one->memory, MOST_ALIGNMENT, bytes) == 0);
  one->bytes = bytes;
  one->thread = pthread_self();
  one->next = a->first;
  a->first = one;
  memset(one->memory, FILL, bytes);
  return one->memory;
}

static void release(void *user, void *memory, size_t bytes) {
  fuzz_allocator *a = user;
  fuzz_allocation **at = &a->first;
  while (*at && (*at)->memory != memory)
    at = &(*at)->next;
  fuzz_allocation *one = *at;
  FUZZ_CHECK(one && one->bytes == bytes && pthread_equal(one->thread, pthread_self()));
  *at = one->next;
  free(memory);
  free(one);
}

void fuzz_allocator_init(fuzz_allocator *allocator) {
  const fuzz_allocator begin = {.mha = {allocator, allocate, release}};
  *allocator = begin;
}

void fuzz_allocator_check(const fuzz_allocator *allocator) {
  FUZZ_CHECK(!allocator->first);
}
