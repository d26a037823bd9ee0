/* Owns the reading of masks and biases: extents of 1, strides, where they lie. */
#include "masks.h"

#include "base/error.h"
#include "base/tensor.h"

static mha_status check_extent(int64_t given, int64_t full, const char *array, const char *member,
                               mha_error *error) {
  if (given == full || given == 1)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_SIZE, "%s.%s is %lld; rule: 1 or %lld", array, member,
                  (long long)given, (long long)full);
}

/* The common shape of mha_mask and mha_bias. */
typedef struct extents {
  int64_t batch, heads, rows, columns, batch_stride, head_stride, row_stride;
} extents;

/* What a stride stands for: 0 for the dense one; and where nobody steps by it, it need not be one,
 * but where it could be, the next one follows from it. */
static int64_t choose_stride(int64_t given, int64_t extent, int64_t dense) {
  const bool counts = extent > 1 ? given != 0 : given >= dense && given <= INT32_MAX;
  return counts ? given : dense;
}

/* A stride that is not given follows from the extents inside; one of an extent of 1 is 0. */
static mha_status resolve_broadcast(const mha_visibility *v, extents e, const char *name,
                                    mha_broadcast *out, mha_error *error) {
  mha_status status = check_extent(e.batch, v->B, name, "batch", error);
  if (!status)
    status = check_extent(e.heads, v->H, name, "heads", error);
  if (!status)
    status = check_extent(e.rows, v->Lq, name, "rows", error);
  if (status)
    return status;
  if (e.columns != v->Lk)
    return mha_fail(error, MHA_ERROR_SIZE, "%s.columns is %lld; rule: Lk, %lld", name,
                    (long long)e.columns, (long long)v->Lk);
  if ((e.row_stride < 0 && e.rows > 1) || (e.head_stride < 0 && e.heads > 1) ||
      (e.batch_stride < 0 && e.batch > 1))
    return mha_fail(error, MHA_ERROR_STRIDE,
                    "%s has batch, head and row strides %lld, %lld, %lld; rule: none is negative",
                    name, (long long)e.batch_stride, (long long)e.head_stride,
                    (long long)e.row_stride);
  const int64_t row = choose_stride(e.row_stride, e.rows, e.columns);
  int64_t head = 0;
  int64_t batch = 0;
  bool fits = mha_multiply(e.rows, row, &head) || (e.heads > 1 && e.head_stride != 0);
  head = choose_stride(e.head_stride, e.heads, head);
  fits = fits && (mha_multiply(e.heads, head, &batch) || (e.batch > 1 && e.batch_stride != 0));
  batch = choose_stride(e.batch_stride, e.batch, batch);
  if (!fits)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s has %lld heads of %lld rows of %lld; rule: the product must not overflow",
                    name, (long long)e.heads, (long long)e.rows, (long long)row);
  out->row_stride = e.rows > 1 ? row : 0;
  out->head_stride = e.heads > 1 ? head : 0;
  out->batch_stride = e.batch > 1 ? batch : 0;
  out->is_empty = e.batch == 0 || e.rows == 0;
  return MHA_OK;
}

static mha_status check_elements(const mha_mask *mask, const mha_bias *bias, mha_error *error) {
  if (mask->element != 0)
    return mha_fail(error, MHA_ERROR_UNSUPPORTED, "rules.attend.element is %d; rule: 0, bytes",
                    (int)mask->element);
  mha_status status = mha_require_element(bias->element, "rules.bias", ".element", error);
  if (!status)
    status = mha_require_reserved(mask->reserved, "rules.attend.reserved", error);
  return status ? status : mha_require_reserved(bias->reserved, "rules.bias.reserved", error);
}

mha_status mha_masks_read(const mha_mask *m, const mha_bias *a, mha_visibility *v,
                          mha_error *error) {
  const extents mask = {m->batch,        m->heads,       m->rows,      m->columns,
                        m->batch_stride, m->head_stride, m->row_stride};
  const extents bias = {a->batch,        a->heads,       a->rows,      a->columns,
                        a->batch_stride, a->head_stride, a->row_stride};
  v->attend = m->data;
  v->bias = a->data;
  mha_status status = check_elements(m, a, error);
  if (!status && v->attend)
    status = resolve_broadcast(v, mask, "rules.attend", &v->attend_strides, error);
  if (!status && v->bias)
    status = resolve_broadcast(v, bias, "rules.bias", &v->bias_strides, error);
  return status;
}

/* Elements of a broadcast array from its first to behind its last; -1 if that overflows. */
static int64_t broadcast_extent(const mha_visibility *v, const mha_broadcast *strides) {
  int64_t batches = 0;
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t sum = 0;
  if (strides->is_empty)
    return 0;
  const bool fits = mha_multiply(mha_max(v->B - 1, 0), strides->batch_stride, &batches) &&
                    mha_multiply(v->H - 1, strides->head_stride, &heads) &&
                    mha_multiply(mha_max(v->Lq - 1, 0), strides->row_stride, &rows) &&
                    mha_add(batches, heads, &sum) && mha_add(sum, rows, &sum) &&
                    mha_add(sum, v->Lk, &sum);
  return fits ? sum : -1;
}

/* The same of one that is read: not in a call without queries. */
static int64_t read_extent(const mha_visibility *v, const mha_broadcast *strides) {
  return v->B == 0 || v->Lq == 0 ? 0 : broadcast_extent(v, strides);
}

mha_status mha_masks_ranges(const mha_visibility *v, mha_address_ranges *ranges, mha_error *error) {
  const mha_status status = mha_ranges_add(ranges, "rules.attend", v->attend,
                                           read_extent(v, &v->attend_strides), 1, false, error);
  return status ? status
                : mha_ranges_add(ranges, "rules.bias", v->bias, read_extent(v, &v->bias_strides),
                                 sizeof(float), false, error);
}

/* A bias may step over its numbers more than once; its gradient cannot. */
mha_status mha_masks_add_bias_gradient(const mha_visibility *v, const char *name, const float *data,
                                       mha_address_ranges *ranges, mha_error *error) {
  const mha_broadcast *s = &v->bias_strides;
  const mha_tensor_shape shape = {s->batch_stride ? v->B : 1,
                                  s->row_stride ? v->Lq : 1,
                                  s->head_stride ? v->H : 1,
                                  v->Lk,
                                  s->batch_stride,
                                  s->row_stride,
                                  s->head_stride};
  const mha_status status =
      mha_ranges_add(ranges, name, data, broadcast_extent(v, s), sizeof(float), true, error);
  if (!status && data && mha_tensor_overlaps_itself(&shape))
    return mha_fail(error, MHA_ERROR_OVERLAP,
                    "%s has batch, head and row strides %lld, %lld, %lld; rule: no two elements of "
                    "a gradient share an address",
                    name, (long long)s->batch_stride, (long long)s->head_stride,
                    (long long)s->row_stride);
  return status;
}
