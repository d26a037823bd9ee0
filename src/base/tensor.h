/* Reading a caller's tensors [batch][length][heads][size]. */
#ifndef MHA_SRC_BASE_TENSOR_H
#define MHA_SRC_BASE_TENSOR_H

#include "arguments.h"

/* Extents and strides of [B][L][heads][size]; size has stride 1. */
typedef struct mha_tensor_shape {
  int64_t batch, length, heads, size;
  int64_t batch_stride, row_stride, head_stride;
} mha_tensor_shape;

/* Sets the strides of a dense tensor. `name` is for messages, here and below. */
mha_status mha_tensor_make_dense(mha_tensor_shape *shape, const char *name, mha_error *error);

/* Replaces the strides of extents of at most 1, which do not count; fails unless BLAS can take the
 * others. */
mha_status mha_tensor_resolve_strides(mha_tensor_shape *shape, const char *name, mha_error *error);

/* Adds the tensor, from its first to behind its last element, to the call's ranges. */
mha_status mha_tensor_add_range(mha_address_ranges *ranges, const mha_tensor_shape *shape,
                                const char *name, const void *data, int32_t element, bool is_output,
                                mha_error *error);

/* Checks an input tensor, of a type that keys and values may have, resolves its strides and adds it
 * to the ranges. */
mha_status mha_tensor_read_stored(const mha_tensor *given, const char *name,
                                  mha_tensor_shape *shape, mha_address_ranges *ranges,
                                  mha_error *error);

/* The same of one that has to be float32. */
mha_status mha_tensor_read(const mha_tensor *given, const char *name, mha_tensor_shape *shape,
                           mha_address_ranges *ranges, mha_error *error);

/* The same of float32 rows whose extents are known (all three strides 0 = dense). */
mha_status mha_tensor_read_rows(const float *data, const char *name, mha_tensor_shape *shape,
                                mha_address_ranges *ranges, mha_error *error);

/* Whether two elements of an array share an address. */
bool mha_tensor_overlaps_itself(const mha_tensor_shape *shape);

/* Resolves the strides of an output whose extents are known (all three 0 = dense), checks that no
 * two of its elements share an address, and adds it to the ranges. */
mha_status mha_tensor_read_output(const float *data, const char *name, mha_tensor_shape *shape,
                                  mha_address_ranges *ranges, mha_error *error);

#endif
