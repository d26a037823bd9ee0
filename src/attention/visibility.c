/* Owns the one predicate that says who may attend to whom. Lengths, causal and window are a range
 * of keys per query; what a range cannot say (mask, bias) is applied to rows of scores. */
#include "visibility.h"

#include "base/arithmetic.h"
#include "engine/softmax.h"

/* ---- ranges ---- */

int64_t mha_query_start(const mha_visibility *v, int64_t b) {
  return v->query_starts ? v->query_starts[b] : 0;
}

int64_t mha_key_start(const mha_visibility *v, int64_t b) {
  return v->key_starts ? v->key_starts[b] : 0;
}

int64_t mha_query_count(const mha_visibility *v, int64_t b) {
  if (v->query_starts)
    return v->query_starts[b + 1] - v->query_starts[b];
  if (v->cached && v->cached->new_lengths)
    return mha_min(v->cached->new_lengths[b], v->Lq);
  return v->query_lengths ? v->query_lengths[b] : v->Lq;
}

int64_t mha_key_count(const mha_visibility *v, int64_t b) {
  if (v->cached)
    return mha_cache_rows_after(v->cached, b);
  if (v->key_starts)
    return v->key_starts[b + 1] - v->key_starts[b];
  return v->key_lengths ? v->key_lengths[b] : v->Lk;
}

int64_t mha_own_key_offset(const mha_visibility *v, int64_t b) {
  if (v->cached && v->cached->append)
    return mha_cache_rows_before(v->cached, b);
  switch (v->alignment) {
  case MHA_ALIGN_BOTTOM_RIGHT:
    return mha_key_count(v, b) - mha_query_count(v, b);
  case MHA_ALIGN_OFFSET:
    return v->offsets ? v->offsets[b] : v->offset;
  default:
    return 0;
  }
}

mha_range mha_present_keys(const mha_visibility *v, int64_t b) {
  const mha_range keys = {v->cached ? mha_cache_rows_first(v->cached, b) : 0, mha_key_count(v, b)};
  return keys;
}

int64_t mha_key_span(const mha_visibility *v) {
  return v->cached && v->cached->ring ? mha_min(v->Lk, v->cached->capacity) : v->Lk;
}

/* a + b, or the border that it crosses: beyond every length either way. */
static int64_t saturating_add(int64_t a, int64_t b) {
  if (a > 0 && b > INT64_MAX - a)
    return INT64_MAX;
  if (a < 0 && b < INT64_MIN - a)
    return INT64_MIN;
  return a + b;
}

mha_range mha_visible_keys(const mha_visibility *v, int64_t b, int64_t i) {
  const int64_t count = mha_key_count(v, b);
  const mha_range none = {0, 0};
  mha_range keys = {0, count};
  if (i >= mha_query_count(v, b))
    return none;
  const int64_t off = mha_own_key_offset(v, b);
  /* i joins last: any offset and window, however large, then gives the exact range */
  if (v->left >= 0)
    keys.begin = mha_max(keys.begin, saturating_add(saturating_add(off, -v->left), i));
  if (v->right >= 0)
    keys.end = mha_min(keys.end, saturating_add(saturating_add(off, v->right), i + 1));
  if (v->causal)
    keys.end = mha_min(keys.end, saturating_add(off, i + 1));
  /* within the keys even where it is empty, so that callers can calculate with both ends */
  keys.begin = mha_min(keys.begin, count);
  keys.end = mha_max(keys.end, 0);
  return keys;
}

/* ---- rules that a range cannot say ---- */

static int64_t broadcast_row(const mha_broadcast *strides, int64_t b, int64_t h, int64_t i) {
  return b * strides->batch_stride + h * strides->head_stride + i * strides->row_stride;
}

void mha_visibility_apply(const mha_visibility *v, int64_t b, int64_t h, int64_t i, mha_range keys,
                          float *scores) {
  const int64_t n = keys.end - keys.begin;
  /* ALiBi first: a bias of -inf then hides its key whatever the sum was. */
  if (v->alibi_slopes)
    mha_row_add_alibi(scores, n, v->alibi_slopes[h],
                      (float)((double)(keys.begin - i) - (double)mha_own_key_offset(v, b)));
  if (v->bias)
    mha_row_add_bias(scores, v->bias + broadcast_row(&v->bias_strides, b, h, i) + keys.begin, n);
  if (v->attend)
    mha_row_hide(scores, v->attend + broadcast_row(&v->attend_strides, b, h, i) + keys.begin, n);
}
