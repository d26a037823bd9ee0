/* A cache with a plain model beside it: every token that counts, and which pages entries share.
 * Each operation is done to both, and what the cache shows of the entries is compared. */
#ifndef MHA_TESTS_CACHE_MODEL_H
#define MHA_TESTS_CACHE_MODEL_H

#include "support.h"

enum { MODEL_ENTRIES = 8, MODEL_TOKENS = 1024, MODEL_SLOTS = 64, MODEL_PAGES = 64 };

typedef struct model_plan {
  int64_t T, n_pages; /* 0 = no pages */
  int64_t capacity;   /* 0 with pages = all of them */
  int64_t window, rollback;
  int32_t type;
} model_plan;

typedef struct cache_model {
  mha_cache *cache;
  test_allocator allocator;
  int64_t T, n_pages, capacity, window, rollback; /* T without pages: the capacity */
  int32_t type;
  int64_t next; /* number of the next token */
  int64_t length[MODEL_ENTRIES], highest[MODEL_ENTRIES];
  int64_t dropped[MODEL_ENTRIES];                 /* tokens below are gone */
  int64_t token[MODEL_ENTRIES][MODEL_TOKENS];     /* by place: in a ring t mod capacity */
  int64_t page[MODEL_ENTRIES][MODEL_SLOTS];       /* number of a page in the model, or -1 */
  int64_t users[MODEL_PAGES], place[MODEL_PAGES]; /* of a page; where the cache has it, or -1 */
  int64_t n_refused;                              /* appends for want of pages */
} cache_model;

mha_cache_options model_options(const model_plan *plan);
void model_open(cache_model *m, const model_plan *plan);
/* Fails the test if memory is left. */
void model_close(cache_model *m);

/* Appends ready rows; the cache must refuse exactly what has no room. */
void model_append(cache_model *m, int64_t n, const int64_t *entries, const int64_t *counts);
void model_share(cache_model *m, int64_t from, int64_t to);
void model_truncate(cache_model *m, int64_t entry, int64_t length);
void model_reset(cache_model *m, int64_t entry);
void model_grow(cache_model *m, int64_t capacity);
/* Entry `e` of `from` was saved to a file: loads it into an entry. */
void model_load(cache_model *m, int64_t entry, const cache_model *from, int64_t e,
                const char *path);

/* The most tokens that a call may bring to an entry; the lowest length that it may go back to. */
int64_t model_largest_chunk(const cache_model *m);
int64_t model_lowest_length(const cache_model *m, int64_t entry);

/* Every entry, every page. */
void model_check(cache_model *m);

#endif
