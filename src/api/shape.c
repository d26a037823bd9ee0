/* Owns the reading of mha_shape. */
#include "shape.h"

#include "base/arguments.h"
#include "base/error.h"
#include "layer/project.h"

static mha_status check(const mha_shape *s, const mha_weights *weights, mha_error *error) {
  mha_status status = mha_require_at_least(s->batch, 0, "shape.batch", error);
  if (!status)
    status = mha_require_at_least(s->query_length, 0, "shape.query_length", error);
  if (!status)
    status = mha_require_at_least(s->key_length, 0, "shape.key_length", error);
  if (!status && !weights)
    status = mha_require_at_least(s->n_heads, 1, "shape.n_heads", error);
  if (!status && !weights)
    status = mha_require_at_least(s->value_head_size, 1, "shape.value_head_size", error);
  if (!status && !weights)
    status = mha_require_at_least(s->n_kv_heads, 0, "shape.n_kv_heads", error);
  if (!status && !weights)
    status = mha_require_at_least(s->head_size, 0, "shape.head_size", error);
  if (!status)
    status = mha_require_page_tokens(s->cache_page_tokens, "shape.cache_page_tokens", error);
  if (!status && (s->backward < MHA_BACKWARD_NONE || s->backward > MHA_BACKWARD_ALONE))
    status = mha_fail(error, MHA_ERROR_VALUE,
                      "shape.backward is %d; rule: a value of mha_backward_use", (int)s->backward);
  if (!status)
    status = mha_require_kv_element(s->cache_type, "shape", ".cache_type", MHA_ERROR_VALUE, error);
  if (!status && !weights && s->n_kv_heads && s->n_heads % s->n_kv_heads != 0)
    status = mha_fail(error, MHA_ERROR_HEADS,
                      "shape.n_heads is %lld, shape.n_kv_heads %lld; rule: a multiple of it",
                      (long long)s->n_heads, (long long)s->n_kv_heads);
  if (!status && s->backward && s->cached)
    status = mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "shape.backward is %d and shape.cached set; rule: there is no way back "
                      "through a cache",
                      (int)s->backward);
  return status;
}

/* Rows of each entry that need scratch before they go to a cache. A call may bring more rows of its
 * own than queries. */
static int64_t cached_rows(const mha_cut_sizes *s, int64_t page_tokens) {
  if (s->stored || s->packed)
    return s->Lq;
  return mha_max(mha_gathered_rows(s->B, INT64_MAX), mha_paged_rows(page_tokens, s->Lq));
}

mha_status mha_shape_read(const mha_weights *weights, const mha_shape *given,
                          mha_shape_asked *asked, mha_error *error) {
  mha_shape shape;
  mha_status status = mha_read_struct(&shape, sizeof shape, MHA_FIRST_SHAPE, given, "shape", error);
  if (!status)
    status = check(&shape, weights, error);
  if (status)
    return status;
  *asked = (mha_shape_asked){.cached = shape.cached != 0, .backward = shape.backward};
  mha_call_size *size = &asked->size;
  const mha_size_names names = {"shape.batch", "shape.query_length", "shape.key_length"};
  mha_cut_sizes *s = &size->core;
  size->names = names;
  s->B = shape.batch;
  s->Lq = shape.query_length;
  s->span = shape.key_length ? shape.key_length : shape.query_length;
  s->H = weights ? weights->config.n_heads : shape.n_heads;
  s->dv = weights ? weights->config.value_head_size : shape.value_head_size;
  s->G = weights ? weights->config.n_kv_heads : shape.n_kv_heads ? shape.n_kv_heads : s->H;
  s->d = weights ? weights->config.head_size : shape.head_size ? shape.head_size : s->dv;
  s->packed = shape.packed != 0;
  s->windowed = true; /* the more parts */
  s->stored = (shape.cached || !weights) && shape.cache_type != MHA_F32;
  s->cached = shape.cached != 0;
  s->paged = s->cached && shape.cache_page_tokens > 0;
  size->key_rows = s->cached ? cached_rows(s, shape.cache_page_tokens) : s->span;
  size->new_rows = shape.cached ? s->Lq : s->span;
  return MHA_OK;
}
