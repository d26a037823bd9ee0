/* Owns the mappings between guard pages: mapping them, keeping them for the next array. */
#define _DEFAULT_SOURCE 1 /* MAP_ANONYMOUS */
#include "fenced.h"
#include "support.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
  EXACT_PAGES = 64, /* up to here every number of pages is a class of its own */
  OCTAVES = 8,      /* beyond, eight classes from one power of two to the next */
  CLASSES = EXACT_PAGES + 8 * OCTAVES,
  SLOTS = 64, /* mappings of one class that are kept */
  UNMAP_EVERY = 31
};

/* Together. A mapping that no class takes, or that is one too many, is unmapped. */
#define KEPT_BYTES ((size_t)64 << 20)

/* Slots are exchanged one at a time, without a lock: a thread that forks or ends leaves nothing
 * behind that another waits for. */
static char *_Atomic kept[CLASSES][SLOTS];
static atomic_size_t kept_bytes;
static atomic_uint releases;

size_t test_page_bytes(void) {
  static _Atomic size_t bytes;
  if (bytes == 0)
    bytes = (size_t)sysconf(_SC_PAGESIZE);
  return bytes;
}

char *test_fenced_begin(test_fenced fenced) {
  return fenced.map + test_page_bytes();
}

char *test_fenced_end(test_fenced fenced) {
  return fenced.map + fenced.map_bytes - test_page_bytes();
}

static size_t round_up(size_t n, size_t unit) {
  return (n + unit - 1) / unit * unit;
}

/* Rounds the number of pages up to that of its class; the class, or CLASSES if there is none. */
static size_t class_of(size_t *pages) {
  size_t octave = 0;
  if (*pages <= EXACT_PAGES)
    return *pages - 1;
  while (*pages > (size_t)2 * EXACT_PAGES << octave)
    octave++;
  if (octave >= OCTAVES)
    return CLASSES;
  const size_t step = (size_t)EXACT_PAGES / 8 << octave;
  *pages = round_up(*pages, step);
  return EXACT_PAGES + 8 * octave + *pages / step - 9;
}

static test_fenced map_fenced(size_t pages) {
  const size_t page = test_page_bytes(), inner = pages * page;
  const test_fenced none = {NULL, 0};
  char *map = mmap(NULL, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED)
    return none;
  if (mprotect(map + page, inner, PROT_READ | PROT_WRITE)) {
    (void)munmap(map, inner + 2 * page);
    return none;
  }
  test_fill_poison((float *)(void *)(map + page), (int64_t)(inner / sizeof(float)));
  return (test_fenced){map, inner + 2 * page};
}

bool test_all_poison(const char *begin, const char *end) {
  float first;
  if (begin >= end)
    return true;
  memcpy(&first, begin, sizeof first);
  return test_is_poison(first) &&
         memcmp(begin, begin + sizeof first, (size_t)(end - begin) - sizeof first) == 0;
}

test_fenced test_fenced_take(size_t bytes) {
  const size_t page = test_page_bytes();
  size_t pages = round_up(bytes ? bytes : 1, page) / page;
  const size_t class = class_of(&pages);
  for (size_t slot = 0; class < CLASSES && slot < SLOTS; slot++) {
    if (!atomic_load_explicit(&kept[class][slot], memory_order_relaxed))
      continue;
    const test_fenced fenced = {atomic_exchange(&kept[class][slot], NULL), (pages + 2) * page};
    if (!fenced.map)
      continue;
    (void)atomic_fetch_sub(&kept_bytes, fenced.map_bytes);
    if (!test_all_poison(test_fenced_begin(fenced), test_fenced_end(fenced))) {
      (void)fprintf(stderr, "memory at %p was written after its release\n", (void *)fenced.map);
      abort();
    }
    return fenced;
  }
  return map_fenced(pages);
}

void test_fenced_unmap(test_fenced fenced) {
  if (munmap(fenced.map, fenced.map_bytes))
    abort();
}

void test_fenced_release(test_fenced fenced) {
  const size_t page = test_page_bytes(), inner = fenced.map_bytes - 2 * page;
  size_t pages = inner / page;
  const size_t class = class_of(&pages);
  const bool goes = atomic_fetch_add(&releases, 1) % UNMAP_EVERY == UNMAP_EVERY - 1;
  if (!goes && class < CLASSES && atomic_load(&kept_bytes) + fenced.map_bytes <= KEPT_BYTES) {
    test_fill_poison((float *)(void *)test_fenced_begin(fenced), (int64_t)(inner / sizeof(float)));
    (void)atomic_fetch_add(&kept_bytes, fenced.map_bytes);
    for (size_t slot = 0; slot < SLOTS; slot++) {
      char *empty = NULL;
      if (atomic_compare_exchange_strong(&kept[class][slot], &empty, fenced.map))
        return;
    }
    (void)atomic_fetch_sub(&kept_bytes, fenced.map_bytes);
  }
  test_fenced_unmap(fenced);
}
