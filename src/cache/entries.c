/* Owns what becomes of a cache's entries outside of calls: lengths, going back, starting again,
 * sharing; and where their tokens lie. */
#include "base/element.h"
#include "base/error.h"
#include "base/memory.h"
#include "cache.h"

#include <string.h>

mha_status mha_cache_require_entry(const mha_cache *cache, int64_t entry, const char *name,
                                   mha_error *error) {
  if (entry >= 0 && entry < cache->sizes.n_entries)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_LENGTH, "%s is %lld; rule: an entry of the cache, 0 to %lld",
                  name, (long long)entry, (long long)(cache->sizes.n_entries - 1));
}

static mha_status check_entry(const mha_cache *cache, int64_t entry, const char *name,
                              mha_error *error) {
  const mha_status status = mha_require(cache, "cache", error);
  return status ? status : mha_cache_require_entry(cache, entry, name, error);
}

/* Enters to change one entry. */
static mha_status enter_entry(mha_cache *cache, int64_t entry, const char *name, mha_error *error) {
  const mha_status status = check_entry(cache, entry, name, error);
  return status ? status : mha_cache_enter(cache, true, error);
}

/* Enters to tell something of one entry, which goes to `into`. */
static mha_status enter_to_tell(const mha_cache *cache, int64_t entry, const int64_t *into,
                                const char *name, mha_error *error) {
  mha_status status = mha_require(into, name, error);
  if (!status)
    status = check_entry(cache, entry, "entry", error);
  return status ? status : mha_cache_enter_to_read(cache, error);
}

/* ---- what an entry holds ---- */

mha_status mha_cache_length(const mha_cache *cache, int64_t entry, int64_t *length,
                            mha_error *error) {
  const mha_status status = enter_to_tell(cache, entry, length, "length", error);
  if (status)
    return status;
  *length = cache->lengths[entry];
  mha_cache_leave_read(cache);
  return mha_succeed(error);
}

/* Of a ring that went back behind what it has dropped, nothing. */
mha_cache_held mha_cache_hold(const mha_cache *cache, int64_t entry) {
  const mha_cache_rows rows = mha_cache_describe_rows(cache);
  const int64_t length = cache->lengths[entry];
  const mha_cache_held held = {mha_min(mha_cache_rows_first(&rows, entry), length), length};
  return held;
}

int64_t mha_cache_token(const mha_cache *cache, int64_t entry, int64_t token, const void **k,
                        const void **v) {
  const mha_cache_options *o = &cache->sizes;
  const mha_cache_rows rows = mha_cache_describe_rows(cache);
  const int64_t row = mha_cache_rows_at(&rows, entry, token) * o->n_kv_heads;
  *k = mha_element_at(cache->numbers.keys, o->type, row * o->head_size);
  *v = mha_element_at(cache->numbers.values, o->type, row * o->value_head_size);
  return mha_min(mha_cache_rows_run(&rows, token), cache->lengths[entry] - token);
}

mha_status mha_cache_row(const mha_cache *cache, int64_t entry, int64_t token, int64_t *row,
                         mha_error *error) {
  mha_status status = enter_to_tell(cache, entry, row, "row", error);
  if (status)
    return status;
  const mha_cache_rows rows = mha_cache_describe_rows(cache);
  const mha_cache_held held = mha_cache_hold(cache, entry);
  if (token >= held.first && token < held.length)
    *row = mha_cache_rows_at(&rows, entry, token);
  else
    status =
        mha_fail(error, MHA_ERROR_LENGTH,
                 "token is %lld; rule: one that the entry holds, %lld of them from %lld on",
                 (long long)token, (long long)(held.length - held.first), (long long)held.first);
  mha_cache_leave_read(cache);
  return status ? status : mha_succeed(error);
}

/* ---- going back ---- */

/* A ring goes back as far as its rollback, and while it holds the window of the next token. */
static int64_t lowest_length(const mha_cache *cache, int64_t entry) {
  const mha_cache_options *o = &cache->sizes;
  const int64_t dropped = cache->dropped[entry];
  if (o->window == 0)
    return 0;
  return mha_max(mha_max(cache->highest[entry] - o->rollback, 0),
                 dropped > 0 ? dropped + o->window - 1 : 0);
}

static mha_status check_truncation(const mha_cache *cache, int64_t entry, int64_t length,
                                   mha_error *error) {
  const int64_t lowest = lowest_length(cache, entry);
  if (length >= lowest && length <= cache->lengths[entry])
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_LENGTH,
                  "length is %lld for an entry of %lld tokens; rule: between %lld and that%s",
                  (long long)length, (long long)cache->lengths[entry], (long long)lowest,
                  cache->sizes.window > 0 ? ", the rollback of a ring" : "");
}

/* Pages behind the last token, where they hold none that a ring still needs. */
static void release_pages(mha_cache *cache, int64_t entry) {
  const mha_cache_options *o = &cache->sizes;
  if (cache->pages.n > 0 && (o->window == 0 || cache->highest[entry] <= o->capacity))
    mha_pages_release(&cache->pages, entry,
                      mha_divide_up(cache->lengths[entry], cache->numbers.page_rows));
}

mha_status mha_cache_truncate(mha_cache *cache, int64_t entry, int64_t length, mha_error *error) {
  mha_status status = enter_entry(cache, entry, "entry", error);
  if (status)
    return status;
  status = check_truncation(cache, entry, length, error);
  if (!status) {
    cache->lengths[entry] = length;
    release_pages(cache, entry);
  }
  mha_cache_leave(cache, true);
  return status ? status : mha_succeed(error);
}

static void forget(mha_cache *cache, int64_t entry) {
  cache->lengths[entry] = 0;
  cache->highest[entry] = 0;
  cache->dropped[entry] = 0;
  release_pages(cache, entry);
}

mha_status mha_cache_reset(mha_cache *cache, int64_t entry, mha_error *error) {
  const mha_status status = enter_entry(cache, entry, "entry", error);
  if (status)
    return status;
  forget(cache, entry);
  mha_cache_leave(cache, true);
  return mha_succeed(error);
}

/* ---- sharing ---- */

/* Copies the first `rows` rows, of G heads of `size`, of one entry to another. */
static void copy_rows(const mha_cache *cache, void *numbers, int64_t size, int64_t from, int64_t to,
                      int64_t rows) {
  const mha_cache_options *o = &cache->sizes;
  const size_t row_bytes = mha_element_bytes(o->type, o->n_kv_heads * size);
  const size_t entry_bytes = (size_t)o->capacity * row_bytes;
  char *base = numbers;
  memcpy(base + (size_t)to * entry_bytes, base + (size_t)from * entry_bytes,
         (size_t)rows * row_bytes);
}

static void copy_numbers(mha_cache *cache, int64_t from, int64_t to) {
  const mha_cache_options *o = &cache->sizes;
  /* in a ring the rows behind a truncated length still hold older tokens */
  const int64_t rows =
      o->window > 0 ? mha_min(cache->highest[from], o->capacity) : cache->lengths[from];
  copy_rows(cache, cache->numbers.keys, o->head_size, from, to, rows);
  copy_rows(cache, cache->numbers.values, o->value_head_size, from, to, rows);
}

mha_status mha_cache_copy_entry(mha_cache *cache, int64_t from, int64_t to, mha_error *error) {
  mha_status status = enter_entry(cache, from, "from", error);
  if (status)
    return status;
  status = mha_cache_require_entry(cache, to, "to", error);
  if (!status && from != to) {
    forget(cache, to);
    if (cache->pages.n > 0)
      mha_pages_share(&cache->pages, from, to);
    else
      copy_numbers(cache, from, to);
    cache->lengths[to] = cache->lengths[from];
    cache->highest[to] = cache->highest[from];
    cache->dropped[to] = cache->dropped[from];
  }
  mha_cache_leave(cache, true);
  return status ? status : mha_succeed(error);
}
