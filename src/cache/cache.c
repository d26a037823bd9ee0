/* Owns mha_cache: projected keys and values of past tokens, and the length of each entry. One block
 * of memory: the object, its lengths, the numbers. */
#include "cache.h"

#include "base/element.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/tensor.h"

#include <string.h>

/* ---- creation ---- */

/* Offsets of the arrays behind the object. */
typedef struct cache_layout {
  mha_layout layout;
  size_t lengths, highest, last_call, keys, values;
} cache_layout;

static size_t add_numbers(mha_layout *layout, const mha_cache_options *o, int64_t size) {
  int64_t row_bytes = 0;
  layout->overflow |= !mha_element_extent(o->type, size, &row_bytes) ||
                      !mha_multiply(o->n_kv_heads, row_bytes, &row_bytes);
  return mha_layout_add(layout, 1, o->n_entries, o->capacity, row_bytes);
}

static cache_layout lay_out(const mha_cache_options *o) {
  cache_layout at = {.layout = {0}};
  (void)mha_layout_add(&at.layout, sizeof(mha_cache), 1, 1, 1);
  at.lengths = mha_layout_add(&at.layout, sizeof(int64_t), o->n_entries, 1, 1);
  at.highest = mha_layout_add(&at.layout, sizeof(int64_t), o->n_entries, 1, 1);
  at.last_call = mha_layout_add(&at.layout, sizeof(int64_t), o->n_entries, 1, 1);
  at.keys = add_numbers(&at.layout, o, o->head_size);
  at.values = add_numbers(&at.layout, o, o->value_head_size);
  return at;
}

static void place(mha_cache *cache, char *base, const cache_layout *at) {
  const size_t bytes = (size_t)cache->sizes.n_entries * sizeof *cache->lengths;
  cache->lengths = (void *)(base + at->lengths);
  cache->highest = (void *)(base + at->highest);
  cache->last_call = (void *)(base + at->last_call);
  cache->keys = (void *)(base + at->keys);
  cache->values = (void *)(base + at->values);
  memset(cache->lengths, 0, bytes);
  memset(cache->highest, 0, bytes);
  memset(cache->last_call, 0, bytes);
}

mha_status mha_cache_make(const mha_cache_options *o, mha_cache **cache, mha_error *error) {
  const cache_layout at = lay_out(o);
  if (at.layout.overflow)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "options has %lld entries of %lld tokens; rule: the cache fits the address "
                    "space",
                    (long long)o->n_entries, (long long)o->capacity);
  const mha_allocator allocator = mha_memory_allocator(o->allocator);
  char *memory = mha_memory_allocate(&allocator, at.layout.bytes);
  if (!memory)
    return mha_fail(error, MHA_ERROR_MEMORY, "the cache needs %zu bytes; rule: they must be there",
                    at.layout.bytes);
  mha_cache *created = (void *)memory;
  memset(created, 0, sizeof *created);
  created->sizes = *o;
  created->sizes.allocator = NULL;
  created->allocator = allocator;
  created->bytes = at.layout.bytes;
  atomic_init(&created->users, 0);
  place(created, memory, &at);
  *cache = created;
  return mha_succeed(error);
}

void mha_cache_destroy(mha_cache *cache) {
  if (!cache)
    return;
  const mha_allocator allocator = cache->allocator;
  mha_memory_release(&allocator, cache, cache->bytes);
}

/* ---- readers, or one that changes it ---- */

mha_status mha_cache_enter(mha_cache *cache, bool change, mha_error *error) {
  int users = atomic_load(&cache->users);
  do {
    if (users < 0 || (change && users > 0))
      return mha_fail(error, MHA_ERROR_BUSY,
                      "cache is inside another call; rule: any number of readers, or one caller "
                      "that changes it");
  } while (!atomic_compare_exchange_weak(&cache->users, &users, change ? -1 : users + 1));
  return MHA_OK;
}

void mha_cache_leave(mha_cache *cache, bool change) {
  if (change)
    atomic_store(&cache->users, 0);
  else
    (void)atomic_fetch_sub(&cache->users, 1);
}

static mha_status check_entry(const mha_cache *cache, int64_t entry, const char *name,
                              mha_error *error) {
  if (entry >= 0 && entry < cache->sizes.n_entries)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_LENGTH, "%s is %lld; rule: an entry of the cache, 0 to %lld",
                  name, (long long)entry, (long long)(cache->sizes.n_entries - 1));
}

/* Enters to work on one entry. */
static mha_status enter_entry(mha_cache *cache, int64_t entry, const char *name, bool change,
                              mha_error *error) {
  mha_status status = mha_require(cache, "cache", error);
  if (!status)
    status = check_entry(cache, entry, name, error);
  return status ? status : mha_cache_enter(cache, change, error);
}

/* ---- entries ---- */

mha_status mha_cache_length(const mha_cache *cache, int64_t entry, int64_t *length,
                            mha_error *error) {
  mha_cache *entered = (mha_cache *)(uintptr_t)cache; /* only the count of readers changes */
  mha_status status = mha_require(length, "length", error);
  if (!status)
    status = enter_entry(entered, entry, "entry", false, error);
  if (status)
    return status;
  *length = cache->lengths[entry];
  mha_cache_leave(entered, false);
  return mha_succeed(error);
}

static mha_status check_truncation(const mha_cache *cache, int64_t entry, int64_t length,
                                   mha_error *error) {
  const mha_cache_options *o = &cache->sizes;
  const int64_t lowest = o->window > 0 ? mha_max(cache->highest[entry] - o->rollback, 0) : 0;
  if (length >= lowest && length <= cache->lengths[entry])
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_LENGTH,
                  "length is %lld for an entry of %lld tokens; rule: between %lld and that%s",
                  (long long)length, (long long)cache->lengths[entry], (long long)lowest,
                  o->window > 0 ? ", the rollback of a ring" : "");
}

mha_status mha_cache_truncate(mha_cache *cache, int64_t entry, int64_t length, mha_error *error) {
  mha_status status = enter_entry(cache, entry, "entry", true, error);
  if (status)
    return status;
  status = check_truncation(cache, entry, length, error);
  if (!status)
    cache->lengths[entry] = length;
  mha_cache_leave(cache, true);
  return status ? status : mha_succeed(error);
}

mha_status mha_cache_reset(mha_cache *cache, int64_t entry, mha_error *error) {
  const mha_status status = enter_entry(cache, entry, "entry", true, error);
  if (status)
    return status;
  cache->lengths[entry] = 0;
  cache->highest[entry] = 0;
  mha_cache_leave(cache, true);
  return mha_succeed(error);
}

/* Copies the first `rows` rows, of G heads of `size`, of one entry to another. */
static void copy_rows(const mha_cache_options *o, void *numbers, int64_t size, int64_t from,
                      int64_t to, int64_t rows) {
  const size_t row_bytes = mha_element_bytes(o->type, o->n_kv_heads * size);
  const size_t entry_bytes = (size_t)o->capacity * row_bytes;
  char *base = numbers;
  memcpy(base + (size_t)to * entry_bytes, base + (size_t)from * entry_bytes,
         (size_t)rows * row_bytes);
}

mha_status mha_cache_copy_entry(mha_cache *cache, int64_t from, int64_t to, mha_error *error) {
  mha_status status = enter_entry(cache, from, "from", true, error);
  if (status)
    return status;
  status = check_entry(cache, to, "to", error);
  if (!status && from != to) {
    const mha_cache_options *o = &cache->sizes;
    /* in a ring the rows behind a truncated length still hold older tokens */
    const int64_t rows =
        o->window > 0 ? mha_min(cache->highest[from], o->capacity) : cache->lengths[from];
    copy_rows(o, cache->keys, o->head_size, from, to, rows);
    copy_rows(o, cache->values, o->value_head_size, from, to, rows);
    cache->lengths[to] = cache->lengths[from];
    cache->highest[to] = cache->highest[from];
  }
  mha_cache_leave(cache, true);
  return status ? status : mha_succeed(error);
}

static mha_tensor show(const mha_cache_options *o, const void *numbers, int64_t size) {
  const mha_tensor tensor = {numbers,
                             o->n_entries,
                             o->capacity,
                             o->n_kv_heads,
                             size,
                             o->capacity * o->n_kv_heads * size,
                             o->n_kv_heads * size,
                             size,
                             1,
                             o->type,
                             0};
  return tensor;
}

mha_status mha_cache_view(const mha_cache *cache, mha_tensor *k, mha_tensor *v, mha_error *error) {
  mha_status status = mha_require(cache, "cache", error);
  if (!status)
    status = mha_require(k, "k", error);
  if (!status)
    status = mha_require(v, "v", error);
  if (status)
    return status;
  *k = show(&cache->sizes, cache->keys, cache->sizes.head_size);
  *v = show(&cache->sizes, cache->values, cache->sizes.value_head_size);
  return mha_succeed(error);
}
