/* Memory that is lent to the library: arrays of exactly their size, which know what may be written
 * into them; and an allocator that counts, refuses what is large, and fails when told to. */
#ifndef MHA_TESTS_FUZZ_MEMORY_H
#define MHA_TESTS_FUZZ_MEMORY_H

#include "mha.h"

#include <stdbool.h>

/* ---- lent arrays ---- */

/* Which of a call's two runs writes into an array. */
enum { FUZZ_NO_RUN = 0, FUZZ_FIRST_RUN = 1, FUZZ_SECOND_RUN = 2, FUZZ_BOTH_RUNS = 3 };

typedef struct fuzz_block {
  struct fuzz_block *next;
  void *memory;          /* what `data` lies in */
  unsigned char *data;   /* `bytes` bytes, up to the end of the memory */
  unsigned char *before; /* the bytes before the call */
  unsigned char *after;  /* and behind its first run */
  bool *writable;        /* each byte, by the runs that `runs` names */
  bool complete;         /* they are written, all of them */
  int runs;
  size_t bytes;
} fuzz_block;

enum { FUZZ_MOST_HIDDEN = 64 };

/* All that one call is given. Begin with {0}. */
typedef struct fuzz_pool {
  fuzz_block *first;
  size_t shift; /* 0..15: how far arrays lie behind a multiple of 16, as far as their type goes */
  int n_hidden;
  struct {
    const void *data;
    size_t bytes;
  } hidden[FUZZ_MOST_HIDDEN];
} fuzz_pool;

/* An input of n elements: every byte 0xa5, and not to be written by the library. Never NULL. */
void *fuzz_pool_take(fuzz_pool *pool, int64_t n, size_t element_bytes);
float *fuzz_pool_floats(fuzz_pool *pool, int64_t n);
int64_t *fuzz_pool_integers(fuzz_pool *pool, int64_t n);

/* An output of n floats, of which fuzz_pool_allow says which may be written. */
float *fuzz_pool_output(fuzz_pool *pool, int64_t n, int runs, bool complete);
void fuzz_pool_allow(fuzz_pool *pool, const void *begin, size_t bytes);
/* No run writes into the outputs that there are so far. */
void fuzz_pool_forbid(fuzz_pool *pool);

/* These bytes must not be read. Only the address sanitizer sees to it. */
void fuzz_pool_hide(fuzz_pool *pool, const void *begin, size_t bytes);
void fuzz_pool_close(const fuzz_pool *pool);
void fuzz_pool_open(const fuzz_pool *pool);

/* Before the first run; behind it, to run again; and what must hold then. */
void fuzz_pool_remember(fuzz_pool *pool);
void fuzz_pool_rewind(fuzz_pool *pool);
void fuzz_pool_check_untouched(const fuzz_pool *pool);
void fuzz_pool_check_written(const fuzz_pool *pool, int run);
void fuzz_pool_check_same(const fuzz_pool *pool);
void fuzz_pool_free(fuzz_pool *pool);

/* ---- an allocator ---- */

typedef struct fuzz_allocation fuzz_allocation;

/* Begin with fuzz_allocator_init. */
typedef struct fuzz_allocator {
  mha_allocator mha; /* pass this one */
  int64_t calls;
  int64_t fail_in; /* the how manyeth allocation from now on fails; 0 = none */
  fuzz_allocation *first;
} fuzz_allocator;

void fuzz_allocator_init(fuzz_allocator *allocator);
/* All has been released. */
void fuzz_allocator_check(const fuzz_allocator *allocator);

#endif
