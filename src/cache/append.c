/* Owns what calls do to a cache: which rows they bring, whether there is room, where they go. */
#include "base/arithmetic.h"
#include "base/error.h"
#include "base/tensor.h"
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
  if (!mha_add(before, n, &after) || (o->window == 0 && after > o->capacity))
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "batch entry %lld brings %lld tokens to an entry that has %lld; rule: at most "
                    "the capacity, %lld, together",
                    (long long)b, (long long)n, (long long)before, (long long)o->capacity);
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

mha_status mha_cache_describe(mha_cache *cache, const mha_cache_call *call, mha_cache_rows *cached,
                              mha_error *error) {
  const mha_cache_rows described = {.lengths = cache->lengths,
                                    .highest = cache->highest,
                                    .entries = call->entries,
                                    .new_lengths = call->new_lengths,
                                    .new_rows = call->rows,
                                    .append = call->append,
                                    .capacity = cache->sizes.capacity,
                                    .ring = cache->sizes.window > 0,
                                    .window = cache->sizes.window};
  *cached = described;
  mha_status status = check_entries(cache, call, error);
  for (int64_t b = 0; !status && b < call->B; b++) {
    status = check_lengths(call, cached, b, error);
    if (!status)
      status = check_room(cache, cached, b, error);
  }
  return status;
}

static void copy_in(float *numbers, const mha_cache_rows *cached, const float *data,
                    const mha_tensor_shape *s) {
  const int64_t width = s->heads * s->size;
  for (int64_t b = 0; b < s->batch; b++) {
    for (int64_t i = 0; i < mha_cache_rows_new(cached, b); i++) {
      float *to = numbers + mha_cache_rows_place(cached, b, i) * width;
      const float *from = data + b * s->batch_stride + i * s->row_stride;
      for (int64_t h = 0; h < s->heads; h++)
        memcpy(to + h * s->size, from + h * s->head_stride, (size_t)s->size * sizeof *to);
    }
  }
}

/* A call's dense rows as a tensor. */
static mha_tensor_shape dense_rows(int64_t B, int64_t rows, int64_t heads, int64_t size) {
  const mha_tensor_shape shape = {B, rows, heads, size, rows * heads * size, heads * size, size};
  return shape;
}

void mha_cache_store(mha_cache *cache, const mha_cache_rows *cached, int64_t B, const float *k,
                     const float *v) {
  const mha_cache_options *o = &cache->sizes;
  const mha_tensor_shape ks = dense_rows(B, cached->new_rows, o->n_kv_heads, o->head_size);
  const mha_tensor_shape vs = dense_rows(B, cached->new_rows, o->n_kv_heads, o->value_head_size);
  copy_in(cache->keys, cached, k, &ks);
  copy_in(cache->values, cached, v, &vs);
}

void mha_cache_commit(mha_cache *cache, const mha_cache_rows *cached, int64_t B) {
  for (int64_t b = 0; b < B; b++) {
    const int64_t entry = mha_cache_rows_entry(cached, b);
    cache->lengths[entry] = mha_cache_rows_after(cached, b);
    cache->highest[entry] = mha_max(cache->highest[entry], cache->lengths[entry]);
  }
}

/* ---- ready rows ---- */

static mha_status check_fit(const mha_cache *cache, const mha_tensor_shape *k,
                            const mha_tensor_shape *v, mha_error *error) {
  const mha_cache_options *o = &cache->sizes;
  if (k->batch != v->batch || k->length != v->length)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "v is %lld entries of %lld rows; rule: as k, %lld of %lld", (long long)v->batch,
                    (long long)v->length, (long long)k->batch, (long long)k->length);
  if (k->heads != o->n_kv_heads || k->size != o->head_size)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "k has %lld heads of size %lld; rule: the cache's G and d, %lld and %lld",
                    (long long)k->heads, (long long)k->size, (long long)o->n_kv_heads,
                    (long long)o->head_size);
  if (v->heads != o->n_kv_heads || v->size != o->value_head_size)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "v has %lld heads of size %lld; rule: the cache's G and dv, %lld and %lld",
                    (long long)v->heads, (long long)v->size, (long long)o->n_kv_heads,
                    (long long)o->value_head_size);
  return MHA_OK;
}

mha_status mha_cache_append(mha_cache *cache, const mha_tensor *k, const mha_tensor *v,
                            const int64_t *cache_entries, const int64_t *new_lengths,
                            mha_error *error) {
  mha_address_ranges ranges = {.n = 0};
  mha_tensor_shape ks = {0};
  mha_tensor_shape vs = {0};
  mha_cache_rows cached;
  mha_status status = mha_require(cache, "cache", error);
  if (!status)
    status = mha_tensor_read(k, "k", &ks, &ranges, error);
  if (!status)
    status = mha_tensor_read(v, "v", &vs, &ranges, error);
  if (!status)
    status = check_fit(cache, &ks, &vs, error);
  if (!status)
    status = mha_cache_ranges(cache, true, &ranges, error);
  if (!status)
    status = mha_ranges_check(&ranges, error);
  if (!status)
    status = mha_cache_enter(cache, true, error);
  if (status)
    return status;
  const mha_cache_call call = {.prefix = "",
                               .batch = "k.batch",
                               .B = ks.batch,
                               .rows = ks.length,
                               .append = true,
                               .entries = cache_entries,
                               .new_lengths = new_lengths};
  status = mha_cache_describe(cache, &call, &cached, error);
  if (!status) {
    copy_in(cache->keys, &cached, k->data, &ks);
    copy_in(cache->values, &cached, v->data, &vs);
    mha_cache_commit(cache, &cached, ks.batch);
  }
  mha_cache_leave(cache, true);
  return status ? status : mha_succeed(error);
}

mha_status mha_cache_ranges(const mha_cache *cache, bool change, mha_address_ranges *ranges,
                            mha_error *error) {
  const mha_cache_options *o = &cache->sizes;
  const int64_t rows = o->n_entries * o->capacity * o->n_kv_heads;
  mha_status status = mha_ranges_add(ranges, "the cache's keys", cache->keys, rows * o->head_size,
                                     sizeof(float), change, error);
  if (!status)
    status = mha_ranges_add(ranges, "the cache's values", cache->values, rows * o->value_head_size,
                            sizeof(float), change, error);
  return status;
}
