/* The key/value cache as an object. */
#ifndef MHA_SRC_CACHE_CACHE_H
#define MHA_SRC_CACHE_CACHE_H

#include "base/arguments.h"
#include "cache_rows.h"
#include "mha.h"
#include "runtime/parallel.h"

#include <stdatomic.h>

struct mha_cache {
  mha_cache_options sizes; /* all filled in, allocator NULL */
  mha_allocator allocator;
  size_t bytes;       /* of this object with everything behind it */
  atomic_int users;   /* readers inside, or -1 = one that changes it */
  int64_t *lengths;   /* [n_entries] */
  int64_t *highest;   /* [n_entries] the longest since the last reset */
  int64_t *last_call; /* [n_entries] number of the last call that named the entry */
  int64_t n_calls;
  void *keys;   /* [n_entries][capacity][G·d] of sizes.type */
  void *values; /* [n_entries][capacity][G·dv] */
};

/* Makes a cache of sizes that are all filled in and checked. */
mha_status mha_cache_make(const mha_cache_options *sizes, mha_cache **cache, mha_error *error);

/* Enters a cache to change or to read it: MHA_ERROR_BUSY if somebody inside forbids that. The
 * caller leaves. */
mha_status mha_cache_enter(mha_cache *cache, bool change, mha_error *error);
void mha_cache_leave(mha_cache *cache, bool change);

/* What a call of B entries does. */
typedef struct mha_cache_call {
  const char *prefix, *batch; /* for messages: what stands before the arrays' names; B's name */
  int64_t B;
  int64_t rows; /* rows of each entry that new_lengths counts: of keys, or of queries if the
                   call attends only */
  bool append;
  const int64_t *entries, *new_lengths, *expected_lengths; /* [B] or NULL */
} mha_cache_call;

/* Checks a call's entries, lengths and room, and describes what it sees. The cache has been
 * entered, to change it if the call appends. */
mha_status mha_cache_describe(mha_cache *cache, const mha_cache_call *call, mha_cache_rows *cached,
                              mha_error *error);

/* Rounds a call's rows, [B][rows][G·d] and [B][rows][G·dv], into their places. */
mha_status mha_cache_store(mha_cache *cache, const mha_cache_rows *cached, int64_t B,
                           const float *k, const float *v, const mha_threads *threads);

/* The rows that the call brought count from now on. */
void mha_cache_commit(mha_cache *cache, const mha_cache_rows *cached, int64_t B);

/* Adds the cache's memory to a call's ranges; as outputs if the call changes it. */
mha_status mha_cache_ranges(const mha_cache *cache, bool change, mha_address_ranges *ranges,
                            mha_error *error);

#endif
