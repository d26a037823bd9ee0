/* Owns the reading of mha_shape. */
#include "shape.h"

#include "base/arguments.h"
#include "base/error.h"
#include "layer/project.h"

mha_status mha_shape_read(const mha_weights *weights, const mha_shape *given, mha_call_size *size,
                          mha_error *error) {
  mha_shape shape;
  mha_status status = mha_read_struct(&shape, sizeof shape, MHA_FIRST_SHAPE, given, "shape", error);
  if (!status)
    status = mha_require_at_least(shape.batch, 0, "shape.batch", error);
  if (!status)
    status = mha_require_at_least(shape.query_length, 0, "shape.query_length", error);
  if (!status)
    status = mha_require_at_least(shape.key_length, 0, "shape.key_length", error);
  if (!status && !weights)
    status = mha_require_at_least(shape.n_heads, 1, "shape.n_heads", error);
  if (!status && !weights)
    status = mha_require_at_least(shape.value_head_size, 1, "shape.value_head_size", error);
  if (!status && !weights)
    status = mha_require_at_least(shape.n_kv_heads, 0, "shape.n_kv_heads", error);
  if (!status && !weights)
    status = mha_require_at_least(shape.head_size, 0, "shape.head_size", error);
  if (!status && (shape.backward < MHA_BACKWARD_NONE || shape.backward > MHA_BACKWARD_ALONE))
    status =
        mha_fail(error, MHA_ERROR_VALUE, "shape.backward is %d; rule: a value of mha_backward_use",
                 (int)shape.backward);
  if (!status)
    status =
        mha_require_kv_element(shape.cache_type, "shape", ".cache_type", MHA_ERROR_VALUE, error);
  if (!status && !weights && shape.n_kv_heads && shape.n_heads % shape.n_kv_heads != 0)
    status = mha_fail(error, MHA_ERROR_HEADS,
                      "shape.n_heads is %lld, shape.n_kv_heads %lld; rule: a multiple of it",
                      (long long)shape.n_heads, (long long)shape.n_kv_heads);
  if (!status && shape.backward && shape.cached)
    status = mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "shape.backward is %d and shape.cached set; rule: there is no way back "
                      "through a cache",
                      (int)shape.backward);
  if (status)
    return status;
  const mha_call_size nothing = {.key_rows = 0};
  *size = nothing;
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
  /* a call may bring more rows of its own than queries */
  size->key_rows = !shape.cached ? s->span : s->stored ? s->Lq : mha_gathered_rows(s->B, INT64_MAX);
  size->new_rows = shape.cached ? s->Lq : s->span;
  size->cached = shape.cached != 0;
  size->backward = shape.backward;
  return MHA_OK;
}
