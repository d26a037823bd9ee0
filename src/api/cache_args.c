/* Owns the part of a layer call's arguments that belongs to its cache: modes, entries, lengths. */
#include "cache_args.h"

#include "base/arithmetic.h"
#include "base/error.h"

mha_status mha_cache_args_check(const mha_forward_args *a, mha_error *error) {
  if (a->cache_mode < MHA_CACHE_APPEND_ATTEND || a->cache_mode > MHA_CACHE_ATTEND)
    return mha_fail(error, MHA_ERROR_VALUE,
                    "args.cache_mode is %d; rule: a value of mha_cache_mode", (int)a->cache_mode);
  if (!a->cache &&
      (a->cache_mode != 0 || a->cache_entries || a->new_lengths || a->expected_lengths))
    return mha_fail(error, MHA_ERROR_NULL,
                    "args.cache is NULL although args.%s is given; rule: it needs a cache",
                    a->cache_mode != 0 ? "cache_mode"
                    : a->cache_entries ? "cache_entries"
                    : a->new_lengths   ? "new_lengths"
                                       : "expected_lengths");
  if (a->cache_mode == MHA_CACHE_ATTEND && (a->key || a->value || a->key_length != 0))
    return mha_fail(
        error, MHA_ERROR_VALUE,
        "args.%s is given with MHA_CACHE_ATTEND; rule: the keys and values are the cache's",
        a->key     ? "key"
        : a->value ? "value"
                   : "key_length");
  return MHA_OK;
}

static mha_status check_fit(const mha_cache *cache, const mha_config *w, mha_error *error) {
  const mha_cache_options *o = &cache->sizes;
  if (o->n_kv_heads == w->n_kv_heads && o->head_size == w->head_size &&
      o->value_head_size == w->value_head_size)
    return MHA_OK;
  return mha_fail(
      error, MHA_ERROR_SIZE,
      "args.cache has G = %lld, d = %lld, dv = %lld; rule: as the layer, %lld, %lld, %lld",
      (long long)o->n_kv_heads, (long long)o->head_size, (long long)o->value_head_size,
      (long long)w->n_kv_heads, (long long)w->head_size, (long long)w->value_head_size);
}

static bool counts_all(const int64_t *lengths, int64_t B, int64_t rows) {
  for (int64_t b = 0; lengths && b < B; b++)
    if (lengths[b] != rows)
      return false;
  return true;
}

mha_status mha_cache_args_read(mha_forward_call *c, mha_error *error) {
  const mha_forward_args *a = &c->args;
  mha_visibility *v = &c->core.visibility;
  const mha_cache_call call = {.prefix = "args.",
                               .batch = "args.batch",
                               .B = a->batch,
                               .rows = c->append ? a->key_length : a->query_length,
                               .append = c->append,
                               .entries = a->cache_entries,
                               .new_lengths = a->new_lengths,
                               .expected_lengths = a->expected_lengths,
                               .starts = c->append ? v->key_starts : NULL};
  mha_status status = check_fit(a->cache, &c->weights->config, error);
  if (!status && v->query_starts && a->new_lengths)
    status =
        mha_fail(error, MHA_ERROR_UNSUPPORTED,
                 "args.new_lengths is given together with rules.query_starts; rule: packed rows "
                 "are tokens, all of them");
  if (!status)
    status = mha_cache_enter(a->cache, c->append, error);
  if (status)
    return status;
  c->in_cache = true;
  status = mha_cache_describe(a->cache, &call, &c->cached, error);
  if (!status)
    status = mha_cache_ranges(a->cache, c->append, &c->ranges, error);
  if (status)
    return status;
  /* no padding: the rows of all entries may then go through one product */
  if (call.rows >= a->query_length && counts_all(a->new_lengths, a->batch, call.rows))
    c->cached.new_lengths = NULL;
  v->cached = &c->cached;
  v->Lk = 0;
  for (int64_t b = 0; b < a->batch; b++)
    v->Lk = mha_max(v->Lk, mha_cache_rows_after(&c->cached, b));
  return MHA_OK;
}

void mha_cache_args_end(mha_forward_call *c, bool success) {
  if (!c->in_cache)
    return;
  if (success && c->append)
    mha_cache_commit(c->args.cache, &c->cached, c->args.batch);
  else if (c->append)
    mha_cache_cancel(c->args.cache);
  mha_cache_leave(c->args.cache, c->append);
}
