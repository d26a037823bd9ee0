/* Owns what calls do to a cache: which rows they bring, whether there is room for them and pages,
 * and what of it stays. */
#include "base/arithmetic.h"
#include "base/element.h"
#include "base/error.h"
#include "cache.h"

#include <string.h>

/* ---- what a call brings ---- */

static mha_status check_entries(mha_cache *cache, const mha_cache_call *call, mha_error *error) {
  if (!call->entries)
    return call->B <= cache->sizes.n_entries
               ? MHA_OK
               : mha_fail(error, MHA_ERROR_LENGTH,
                          "%s is %lld without %scache_entries; rule: at most the cache's %lld "
                          "entries",
                          call->batch, (long long)call->B, call->prefix,
                          (long long)cache->sizes.n_entries);
  if (call->append)
    cache->n_calls++;
  for (int64_t b = 0; b < call->B; b++) {
    const int64_t entry = call->entries[b];
    if (entry < 0 || entry >= cache->sizes.n_entries)
      return mha_fail(error, MHA_ERROR_LENGTH,
                      "%scache_entries[%lld] is %lld; rule: an entry of the cache, 0 to %lld",
                      call->prefix, (long long)b, (long long)entry,
                      (long long)(cache->sizes.n_entries - 1));
    if (call->append && cache->last_call[entry] == cache->n_calls)
      return mha_fail(error, MHA_ERROR_LENGTH,
                      "%scache_entries[%lld] is %lld a second time; rule: a call appends to an "
                      "entry once",
                      call->prefix, (long long)b, (long long)entry);
    if (call->append)
      cache->last_call[entry] = cache->n_calls;
  }
  return MHA_OK;
}

static mha_status check_room(const mha_cache *cache, const mha_cache_rows *cached, int64_t b,
                             mha_error *error) {
  const mha_cache_options *o = &cache->sizes;
  const int64_t n = mha_cache_rows_new(cached, b);
  const int64_t before = mha_cache_rows_before(cached, b);
  int64_t after = 0;
  if (o->window > 0 && n > o->capacity - o->window - o->rollback + 1)
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "batch entry %lld brings %lld tokens to a ring of %lld with window %lld and "
                    "rollback %lld; rule: at most capacity - window - rollback + 1",
                    (long long)b, (long long)n, (long long)o->capacity, (long long)o->window,
                    (long long)o->rollback);
  const int64_t most = o->window > 0 ? MHA_MOST_TOKENS : o->capacity;
  if (!mha_add(before, n, &after) || after > most)
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "batch entry %lld brings %lld tokens to an entry that has %lld; rule: at most "
                    "%lld together, %s",
                    (long long)b, (long long)n, (long long)before, (long long)most,
                    o->window > 0 ? "whatever a ring drops" : "the capacity");
  return MHA_OK;
}

/* What the caller says of batch entry b: how long it is by now, and what comes. */
static mha_status check_lengths(const mha_cache_call *call, const mha_cache_rows *cached, int64_t b,
                                mha_error *error) {
  if (call->expected_lengths && call->expected_lengths[b] != mha_cache_rows_before(cached, b))
    return mha_fail(
        error, MHA_ERROR_LENGTH,
        "%sexpected_lengths[%lld] is %lld, but entry %lld of the cache has %lld tokens; "
        "rule: they agree, mha_cache_reset starts an entry again",
        call->prefix, (long long)b, (long long)call->expected_lengths[b],
        (long long)mha_cache_rows_entry(cached, b), (long long)mha_cache_rows_before(cached, b));
  if (call->new_lengths && (call->new_lengths[b] < 0 || call->new_lengths[b] > call->rows))
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "%snew_lengths[%lld] is %lld; rule: between 0 and the %lld rows given",
                    call->prefix, (long long)b, (long long)call->new_lengths[b],
                    (long long)call->rows);
  return MHA_OK;
}

/* ---- pages ---- */

/* The slots that receive batch entry b's tokens, one after the other: `t` is the next token, from
 * before the call on. */
static bool next_slot(const mha_cache_rows *cached, int64_t b, int64_t *t, int64_t *slot) {
  if (*t >= mha_cache_rows_after(cached, b))
    return false;
  *slot = mha_cache_rows_slot(cached, *t);
  *t += mha_cache_rows_run(cached, *t);
  return true;
}

/* Pages that batch entry b takes: for slots without one, and for those that others have too. A ring
 * may come back to its first slot. */
static int64_t count_pages(const mha_cache *cache, const mha_cache_rows *cached, int64_t b) {
  const int64_t entry = mha_cache_rows_entry(cached, b);
  const int64_t before = mha_cache_rows_before(cached, b);
  int64_t t = before;
  int64_t slot = 0;
  int64_t wanted = 0;
  while (cache->pages.n > 0 && next_slot(cached, b, &t, &slot)) {
    const bool again = slot == mha_cache_rows_slot(cached, before) &&
                       t - before > mha_cache_rows_run(cached, before);
    wanted += !again && !mha_pages_is_own(&cache->pages, entry, slot);
  }
  return wanted;
}

static mha_status check_pages(const mha_cache *cache, const mha_cache_call *call,
                              const mha_cache_rows *cached, mha_error *error) {
  int64_t wanted = 0;
  for (int64_t b = 0; call->append && b < call->B; b++)
    wanted += count_pages(cache, cached, b);
  if (wanted <= cache->pages.n_free)
    return MHA_OK;
  return mha_fail(
      error, MHA_ERROR_LENGTH,
      "the call wants %lld pages of the cache and %lld are free; rule: at most the free "
      "ones, mha_cache_truncate and mha_cache_reset give pages back",
      (long long)wanted, (long long)cache->pages.n_free);
}

/* Copies what a shared page holds: of a ring all of it, otherwise the rows before the call's. */
static void copy_page(const mha_cache *cache, int32_t from, int32_t to, int64_t rows) {
  const mha_cache_options *o = &cache->sizes;
  const mha_cache_numbers *n = &cache->numbers;
  const size_t k = mha_element_bytes(o->type, o->n_kv_heads * o->head_size);
  const size_t v = mha_element_bytes(o->type, o->n_kv_heads * o->value_head_size);
  const size_t here = (size_t)(from * n->page_rows);
  const size_t there = (size_t)(to * n->page_rows);
  memcpy((char *)n->keys + there * k, (const char *)n->keys + here * k, (size_t)rows * k);
  memcpy((char *)n->values + there * v, (const char *)n->values + here * v, (size_t)rows * v);
}

static void take_pages(mha_cache *cache, const mha_cache_rows *cached, int64_t b) {
  const int64_t entry = mha_cache_rows_entry(cached, b);
  const int64_t before = mha_cache_rows_before(cached, b);
  int64_t t = before;
  int64_t slot = 0;
  while (cache->pages.n > 0 && next_slot(cached, b, &t, &slot)) {
    if (mha_pages_is_own(&cache->pages, entry, slot))
      continue;
    const int32_t shared = mha_pages_take(&cache->pages, entry, slot);
    if (shared != MHA_NO_PAGE)
      copy_page(cache, shared, mha_pages_at(&cache->pages, entry, slot),
                cached->ring ? cached->page_rows : before - slot * cached->page_rows);
  }
}

/* ---- the call ---- */

static mha_status describe(mha_cache *cache, const mha_cache_call *call, mha_cache_rows *cached,
                           mha_error *error) {
  *cached = mha_cache_describe_rows(cache);
  cached->entries = call->entries;
  cached->new_lengths = call->new_lengths;
  cached->starts = call->starts;
  cached->new_rows = call->rows;
  cached->append = call->append;
  mha_status status = check_entries(cache, call, error);
  for (int64_t b = 0; !status && b < call->B; b++) {
    status = check_lengths(call, cached, b, error);
    if (!status)
      status = check_room(cache, cached, b, error);
  }
  return status ? status : check_pages(cache, call, cached, error);
}

mha_status mha_cache_describe(mha_cache *cache, const mha_cache_call *call, mha_cache_rows *cached,
                              mha_error *error) {
  const mha_status status = describe(cache, call, cached, error);
  for (int64_t b = 0; !status && call->append && b < call->B; b++)
    take_pages(cache, cached, b);
  return status;
}

void mha_cache_commit(mha_cache *cache, const mha_cache_rows *cached, int64_t B) {
  for (int64_t b = 0; b < B; b++) {
    const int64_t entry = mha_cache_rows_entry(cached, b);
    cache->lengths[entry] = mha_cache_rows_after(cached, b);
    cache->highest[entry] = mha_max(cache->highest[entry], cache->lengths[entry]);
  }
  mha_pages_keep(&cache->pages);
}

void mha_cache_cancel(mha_cache *cache) {
  mha_pages_undo(&cache->pages);
}

/* ---- what a call would take ---- */

static mha_status count(const mha_cache *cache, const mha_cache_call *call, int64_t *wanted,
                        mha_error *error) {
  mha_cache_rows cached = mha_cache_describe_rows(cache);
  cached.entries = call->entries;
  cached.new_lengths = call->new_lengths;
  cached.append = true;
  *wanted = 0;
  for (int64_t b = 0; b < call->B; b++) {
    mha_status status =
        mha_cache_require_entry(cache, mha_cache_rows_entry(&cached, b), call->batch, error);
    if (!status && call->new_lengths[b] < 0)
      status = mha_fail(error, MHA_ERROR_LENGTH, "new_lengths[%lld] is %lld; rule: at least 0",
                        (long long)b, (long long)call->new_lengths[b]);
    if (!status)
      status = check_room(cache, &cached, b, error);
    if (status)
      return status;
    *wanted += count_pages(cache, &cached, b);
  }
  return MHA_OK;
}

mha_status mha_cache_page_count(const mha_cache *cache, int64_t batch, const int64_t *cache_entries,
                                const int64_t *new_lengths, int64_t *wanted, int64_t *n_free,
                                mha_error *error) {
  const mha_cache_call call = {.batch = cache_entries ? "an entry of cache_entries" : "batch entry",
                               .B = batch,
                               .entries = cache_entries,
                               .new_lengths = new_lengths};
  int64_t needed = 0;
  mha_status status = mha_require(cache, "cache", error);
  if (!status)
    status = mha_require_at_least(batch, 0, "batch", error);
  if (!status && batch > 0)
    status = mha_require(new_lengths, "new_lengths", error);
  if (!status)
    status = mha_cache_enter_to_read(cache, error);
  if (status)
    return status;
  status = count(cache, &call, &needed, error);
  if (!status && wanted)
    *wanted = needed;
  if (!status && n_free)
    *n_free = cache->pages.n_free;
  mha_cache_leave_read(cache);
  return status ? status : mha_succeed(error);
}
