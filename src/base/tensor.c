/* Owns the reading of [batch][length][heads][size] tensors: strides, extents, addresses. */
#include "tensor.h"

#include "element.h"
#include "error.h"
#include "memory.h"

mha_status mha_tensor_make_dense(mha_tensor_shape *s, const char *name, mha_error *error) {
  s->head_stride = s->size;
  if (mha_multiply(s->heads, s->size, &s->row_stride) &&
      mha_multiply(s->length, s->row_stride, &s->batch_stride))
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_OVERFLOW,
                  "%s has %lld rows of %lld heads of %lld; rule: the product must not overflow",
                  name, (long long)s->length, (long long)s->heads, (long long)s->size);
}

/* What a stride that nobody steps by says is nothing: NumPy, for one, may say 0. A row stride goes
 * to BLAS even then, as a leading dimension. */
static void ignore_unused_strides(mha_tensor_shape *s) {
  if (s->batch <= 1)
    s->batch_stride = 0;
  if (s->length <= 1)
    s->row_stride = s->size;
  if (s->heads <= 1)
    s->head_stride = s->size;
}

mha_status mha_tensor_resolve_strides(mha_tensor_shape *s, const char *name, mha_error *error) {
  ignore_unused_strides(s);
  if (s->row_stride < s->size || s->head_stride < 0 || s->batch_stride < 0)
    return mha_fail(error, MHA_ERROR_STRIDE,
                    "%s has batch, row and head strides %lld, %lld, %lld; rule: none is negative "
                    "and the row stride at least the size, %lld",
                    name, (long long)s->batch_stride, (long long)s->row_stride,
                    (long long)s->head_stride, (long long)s->size);
  if (s->row_stride > MHA_BLAS_MAX || s->size > MHA_BLAS_MAX)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s has row stride %lld and size %lld; rule: at most %lld, the BLAS's integer",
                    name, (long long)s->row_stride, (long long)s->size, (long long)MHA_BLAS_MAX);
  return MHA_OK;
}

mha_status mha_tensor_add_range(mha_address_ranges *ranges, const mha_tensor_shape *s,
                                const char *name, const void *data, int32_t element, bool is_output,
                                mha_error *error) {
  int64_t batches = 0;
  int64_t rows = 0;
  int64_t heads = 0;
  int64_t elements = 0;
  if (s->batch == 0 || s->length == 0)
    return MHA_OK;
  if (!mha_multiply(s->batch - 1, s->batch_stride, &batches) ||
      !mha_multiply(s->length - 1, s->row_stride, &rows) ||
      !mha_multiply(s->heads - 1, s->head_stride, &heads) || !mha_add(batches, rows, &elements) ||
      !mha_add(elements, heads, &elements) || !mha_add(elements, s->size, &elements))
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s has batch, row and head strides %lld, %lld, %lld; rule: its extent must "
                    "not overflow",
                    name, (long long)s->batch_stride, (long long)s->row_stride,
                    (long long)s->head_stride);
  const int64_t block = mha_element_block(element);
  return mha_ranges_add(ranges, name, data, elements / block, mha_element_bytes(element, block),
                        is_output, error);
}

/* Blocks are not cut, whatever is stepped by. */
static mha_status check_blocks(const mha_tensor_shape *s, int32_t element, const char *name,
                               mha_error *error) {
  const int64_t block = mha_element_block(element);
  if (s->size % block != 0)
    return mha_fail(error, MHA_ERROR_SIZE, "%s.size is %lld; rule: whole blocks of %s, %lld", name,
                    (long long)s->size, mha_element_name(element), (long long)block);
  if (s->batch_stride % block != 0 || s->row_stride % block != 0 || s->head_stride % block != 0)
    return mha_fail(error, MHA_ERROR_STRIDE,
                    "%s has batch, row and head strides %lld, %lld, %lld; rule: whole blocks of "
                    "%s, %lld",
                    name, (long long)s->batch_stride, (long long)s->row_stride,
                    (long long)s->head_stride, mha_element_name(element), (long long)block);
  return MHA_OK;
}

mha_status mha_tensor_read_stored(const mha_tensor *given, const char *name, mha_tensor_shape *s,
                                  mha_address_ranges *ranges, mha_error *error) {
  mha_status status = mha_require(given, name, error);
  if (status)
    return status;
  const mha_tensor_shape shape = {given->batch,      given->length,       given->heads,
                                  given->size,       given->batch_stride, given->row_stride,
                                  given->head_stride};
  *s = shape;
  status = mha_require_kv_element(given->element, name, ".element", MHA_ERROR_UNSUPPORTED, error);
  if (!status && given->reserved != 0)
    status =
        mha_fail(error, MHA_ERROR_VALUE, "%s.reserved is %d; rule: 0", name, (int)given->reserved);
  if (status)
    return status;
  if (s->batch < 0 || s->length < 0 || s->heads < 1 || s->size < 1)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "%s is [%lld][%lld][%lld][%lld]; rule: batch and length at least 0, heads and "
                    "size at least 1",
                    name, (long long)s->batch, (long long)s->length, (long long)s->heads,
                    (long long)s->size);
  const bool dense = !s->batch_stride && !s->row_stride && !s->head_stride && !given->size_stride;
  if (!dense && s->size > 1 && given->size_stride != 1)
    return mha_fail(error, MHA_ERROR_STRIDE,
                    "%s has size stride %lld; rule: 1, since BLAS needs a contiguous dimension",
                    name, (long long)given->size_stride);
  if (dense)
    status = mha_tensor_make_dense(s, name, error);
  if (!status)
    status = mha_tensor_resolve_strides(s, name, error);
  if (!status)
    status = check_blocks(s, given->element, name, error);
  if (!status && !given->data && s->batch > 0 && s->length > 0)
    status = mha_fail(error, MHA_ERROR_NULL, "%s.data is NULL; rule: it must be given", name);
  if (!status)
    status = mha_tensor_add_range(ranges, s, name, given->data, given->element, false, error);
  return status;
}

mha_status mha_tensor_read(const mha_tensor *given, const char *name, mha_tensor_shape *shape,
                           mha_address_ranges *ranges, mha_error *error) {
  mha_status status = mha_require(given, name, error);
  if (!status)
    status = mha_require_element(given->element, name, ".element", error);
  return status ? status : mha_tensor_read_stored(given, name, shape, ranges, error);
}

/* ---- outputs ---- */

/* Sorted by stride, each dimension of an output must step over all that the ones inside cover. */
bool mha_tensor_overlaps_itself(const mha_tensor_shape *s) {
  int64_t stride[3] = {s->batch_stride, s->row_stride, s->head_stride};
  int64_t count[3] = {s->batch, s->length, s->heads};
  for (int pass = 0; pass < 2; pass++)
    for (int k = 0; k < 2; k++)
      if (stride[k] < stride[k + 1]) {
        const int64_t a = stride[k];
        const int64_t n = count[k];
        stride[k] = stride[k + 1];
        count[k] = count[k + 1];
        stride[k + 1] = a;
        count[k + 1] = n;
      }
  int64_t covered = s->size;
  if (s->batch == 0 || s->length == 0)
    return false;
  for (int k = 2; k >= 0; k--) {
    if (count[k] > 1 && stride[k] < covered)
      return true;
    covered += (count[k] - 1) * stride[k];
  }
  return false;
}

/* Rows whose extents are known: strides of 0, and that there are any. */
static mha_status read_known(const float *data, const char *name, mha_tensor_shape *s,
                             mha_error *error) {
  mha_status status = MHA_OK;
  if (!s->batch_stride && !s->row_stride && !s->head_stride)
    status = mha_tensor_make_dense(s, name, error);
  if (!status)
    status = mha_tensor_resolve_strides(s, name, error);
  if (!status && s->batch > 0 && s->length > 0)
    status = mha_require(data, name, error);
  return status;
}

mha_status mha_tensor_read_rows(const float *data, const char *name, mha_tensor_shape *s,
                                mha_address_ranges *ranges, mha_error *error) {
  const mha_status status = read_known(data, name, s, error);
  return status ? status : mha_tensor_add_range(ranges, s, name, data, MHA_F32, false, error);
}

mha_status mha_tensor_read_output(const float *data, const char *name, mha_tensor_shape *s,
                                  mha_address_ranges *ranges, mha_error *error) {
  mha_status status = read_known(data, name, s, error);
  if (!status)
    status = mha_tensor_add_range(ranges, s, name, data, MHA_F32, true, error);
  if (!status && mha_tensor_overlaps_itself(s))
    status = mha_fail(error, MHA_ERROR_OVERLAP,
                      "%s has batch, row and head strides %lld, %lld, %lld; rule: no two "
                      "elements of an output share an address",
                      name, (long long)s->batch_stride, (long long)s->row_stride,
                      (long long)s->head_stride);
  return status;
}
