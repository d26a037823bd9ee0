/* The key/value cache as an object. */
#ifndef MHA_SRC_CACHE_CACHE_H
#define MHA_SRC_CACHE_CACHE_H

#include "base/arguments.h"
#include "cache_rows.h"
#include "mha.h"
#include "pages.h"
#include "runtime/parallel.h"

#include <stdatomic.h>

/* Where keys and values lie: one block of memory, [pages][page_rows] rows. Without pages an entry
 * is one page. */
typedef struct mha_cache_numbers {
  int64_t pages, page_rows;
  int page_shift; /* with pages, page_rows is 2 to the power of it */
  char *memory;
  size_t bytes;
  void *keys;   /* [pages][page_rows][G·d] of the cache's type */
  void *values; /* [pages][page_rows][G·dv] */
} mha_cache_numbers;

/* Tokens that an entry may have seen, as mha.h promises: far from where a sum of such numbers and
 * of what lies in memory would leave int64_t. */
#define MHA_MOST_TOKENS (INT64_C(1) << 62)

struct mha_cache {
  mha_cache_options sizes; /* all filled in, allocator NULL */
  mha_allocator allocator;
  size_t bytes;       /* of this object with its lists */
  atomic_int users;   /* readers inside, or -1 = one that changes it */
  int64_t *lengths;   /* [n_entries] */
  int64_t *highest;   /* [n_entries] the longest since the last reset */
  int64_t *dropped;   /* [n_entries] tokens below are gone, whatever there is room for */
  int64_t *last_call; /* [n_entries] number of the last call that named the entry */
  int64_t n_calls;
  mha_pages pages; /* of options.n_pages; n = 0: none */
  mha_cache_numbers numbers;
};

/* Makes a cache of sizes that are all filled in and checked. */
mha_status mha_cache_make(const mha_cache_options *sizes, mha_cache **cache, mha_error *error);

/* Enters a cache to change or to read it: MHA_ERROR_BUSY if somebody inside forbids that. The
 * caller leaves. */
mha_status mha_cache_enter(mha_cache *cache, bool change, mha_error *error);
void mha_cache_leave(mha_cache *cache, bool change);

/* The same of a cache that is only read, whose count of readers alone changes. */
mha_status mha_cache_enter_to_read(const mha_cache *cache, mha_error *error);
void mha_cache_leave_read(const mha_cache *cache);

/* Its entries and rows, as no call sees them yet: each batch entry is the entry of its number. */
mha_cache_rows mha_cache_describe_rows(const mha_cache *cache);

/* What a call of B entries does. */
typedef struct mha_cache_call {
  const char *prefix, *batch; /* for messages: what stands before the arrays' names; B's name */
  int64_t B;
  int64_t rows; /* rows of each entry that new_lengths counts: of keys, or of queries if the
                   call attends only */
  bool append;
  const int64_t *entries, *new_lengths, *expected_lengths; /* [B] or NULL */
  const int64_t *starts; /* [B+1] where packed rows of each begin, or NULL */
} mha_cache_call;

/* Checks a call's entries, lengths and room, describes what it sees, and takes the pages that it
 * writes to. The cache has been entered, to change it if the call appends; unless this fails, the
 * call ends with mha_cache_commit or mha_cache_cancel. */
mha_status mha_cache_describe(mha_cache *cache, const mha_cache_call *call, mha_cache_rows *cached,
                              mha_error *error);

/* Rounds a call's rows, dense [B][rows][G·d] and [B][rows][G·dv] or packed, into their places. */
mha_status mha_cache_store(mha_cache *cache, const mha_cache_rows *cached, int64_t B,
                           const float *k, const float *v, const mha_threads *threads);

/* The rows that the call brought count from now on; or the cache is as it was. */
void mha_cache_commit(mha_cache *cache, const mha_cache_rows *cached, int64_t B);
void mha_cache_cancel(mha_cache *cache);

/* The tokens of an entry that are in memory: [first, length). */
typedef struct mha_cache_held {
  int64_t first, length;
} mha_cache_held;

/* What an entry holds. The cache has been entered. */
mha_cache_held mha_cache_hold(const mha_cache *cache, int64_t entry);

/* Where the keys and the values of a token that the entry holds begin, and how many tokens from it
 * on lie in rows that follow. The cache has been entered. */
int64_t mha_cache_token(const mha_cache *cache, int64_t entry, int64_t token, const void **k,
                        const void **v);

/* Makes an entry hold rows k and v [length - first][G][d or dv] of one type, F32 or the cache's,
 * and no others; the first ones are left out where a ring has no room for them. The entry exists
 * and the cache has been entered to change it. `name` is what the rows come from, for messages.
 * LENGTH and UNSUPPORTED; the cache is then as it was. */
mha_status mha_cache_replace(mha_cache *cache, int64_t entry, const mha_cache_held *held,
                             int32_t element, const void *k, const void *v, const char *name,
                             mha_error *error);

/* Fails with LENGTH unless the cache has such an entry; `name` is what the caller calls it. */
mha_status mha_cache_require_entry(const mha_cache *cache, int64_t entry, const char *name,
                                   mha_error *error);

/* Adds the cache's memory to a call's ranges; as outputs if the call changes it. */
mha_status mha_cache_ranges(const mha_cache *cache, bool change, mha_address_ranges *ranges,
                            mha_error *error);

#endif
