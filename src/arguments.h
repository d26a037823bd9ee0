/* Reading a caller's argument structs: sizes, strides, overlap. */
#ifndef MHA_SRC_ARGUMENTS_H
#define MHA_SRC_ARGUMENTS_H

#include "ieee.h"
#include "mha.h"

#include <stdbool.h>

/* Copies a caller's struct, whose first member is its size, into the zeroed `known` of
 * `known_bytes`. A size below that of the first release, or one beyond `known_bytes` whose tail is
 * not zero, is MHA_ERROR_STRUCT_SIZE; given NULL is MHA_ERROR_NULL. `name` goes into the message.
 */
mha_status mha_read_struct(void *known, size_t known_bytes, size_t first_release_bytes,
                           const void *given, const char *name, mha_error *error);

/* Fails with MHA_ERROR_NULL unless `pointer` is given. */
mha_status mha_require(const void *pointer, const char *name, mha_error *error);

/* Fails with MHA_ERROR_SIZE unless value >= lowest. */
mha_status mha_require_at_least(int64_t value, int64_t lowest, const char *name, mha_error *error);

/* Fails with MHA_ERROR_VALUE unless value is finite. */
mha_status mha_require_finite(float value, const char *name, mha_error *error);

/* Fails with MHA_ERROR_VALUE if flags has a bit that is not in allowed. */
mha_status mha_require_flags(uint32_t flags, uint32_t allowed, const char *name, mha_error *error);

/* Fails with MHA_ERROR_VALUE unless a reserved member is 0. */
mha_status mha_require_reserved(int32_t value, const char *name, mha_error *error);

/* Fails with MHA_ERROR_VALUE if one of the n sinks is NaN or +inf; NULL passes. */
mha_status mha_require_sinks(const float *sinks, int64_t n, const char *name, mha_error *error);

/* The strides of an array [B][L][width] whose innermost stride is 1. */
typedef struct mha_rows_shape {
  int64_t batch, length, width;
  int64_t batch_stride, row_stride;
} mha_rows_shape;

/* Replaces strides of 0 by the dense ones and checks that BLAS can take them; of an output also
 * that no two of its elements share an address. `name` as in "query". */
mha_status mha_resolve_strides(mha_rows_shape *shape, bool is_output, const char *name,
                               mha_error *error);

/* The arrays of one call by address range, to find outputs that overlap something. */
#define MHA_MAX_RANGES 48
typedef struct mha_address_range {
  const char *name;
  uintptr_t begin, end;
  bool is_output;
} mha_address_range;

typedef struct mha_address_ranges {
  int n;
  mha_address_range items[MHA_MAX_RANGES];
} mha_address_ranges;

/* Adds `elements` elements from data on; NULL data or no elements add nothing. Fails with
 * MHA_ERROR_OVERFLOW if the range leaves the address space. */
mha_status mha_ranges_add(mha_address_ranges *ranges, const char *name, const void *data,
                          int64_t elements, size_t element_bytes, bool is_output, mha_error *error);

/* Adds an array with two outer strides, from its first to its last element. */
mha_status mha_ranges_add_rows(mha_address_ranges *ranges, const char *name, const float *data,
                               const mha_rows_shape *shape, bool is_output, mha_error *error);

/* Fails with MHA_ERROR_OVERLAP if an output shares a byte with any other range. */
mha_status mha_ranges_check(const mha_address_ranges *ranges, mha_error *error);

#endif
