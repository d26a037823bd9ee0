/* Reading a caller's argument structs: sizes, strides, overlap. */
#ifndef MHA_SRC_BASE_ARGUMENTS_H
#define MHA_SRC_BASE_ARGUMENTS_H

#include "ieee.h"
#include "mha.h"

#include <stdbool.h>

/* Bytes of each struct in the first release: what a caller built against it passes. They say behind
 * which member it ended, since its bytes differ between machines, and never change again, whatever
 * members join behind. docs/layouts.md has the numbers. */
#define MHA_ENDS_BEHIND(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))
enum {
  MHA_FIRST_CONFIG = MHA_ENDS_BEHIND(mha_config, allocator),
  MHA_FIRST_MATRICES = MHA_ENDS_BEHIND(mha_matrices, release_user),
  MHA_FIRST_FILE_OPTIONS = MHA_ENDS_BEHIND(mha_file_options, release_user),
  MHA_FIRST_TENSOR_INFO = MHA_ENDS_BEHIND(mha_tensor_info, bytes),
  MHA_FIRST_LAYER_INFO = MHA_ENDS_BEHIND(mha_layer_info, parts),
  MHA_FIRST_MODEL_INFO = MHA_ENDS_BEHIND(mha_model_info, rope),
  MHA_FIRST_CONTEXT_OPTIONS = MHA_ENDS_BEHIND(mha_context_options, reserved),
  MHA_FIRST_SHAPE = MHA_ENDS_BEHIND(mha_shape, cache_page_tokens),
  MHA_FIRST_RULES = MHA_ENDS_BEHIND(mha_rules, dropout_call),
  MHA_FIRST_RESULTS = MHA_ENDS_BEHIND(mha_results, log_sum_exp),
  MHA_FIRST_CACHE_OPTIONS = MHA_ENDS_BEHIND(mha_cache_options, n_pages),
  MHA_FIRST_FORWARD_ARGS = MHA_ENDS_BEHIND(mha_forward_args, tape),
  MHA_FIRST_ATTEND_ARGS = MHA_ENDS_BEHIND(mha_attend_args, results),
  MHA_FIRST_MERGE_ARGS = MHA_ENDS_BEHIND(mha_merge_args, log_sum_exp),
  MHA_FIRST_BACKWARD_ARGS = MHA_ENDS_BEHIND(mha_backward_args, tape),
  MHA_FIRST_ATTEND_BACKWARD_ARGS = MHA_ENDS_BEHIND(mha_attend_backward_args, d_sinks)
};

/* Copies a caller's struct, whose first member is its size, into the zeroed `known` of
 * `known_bytes`. A size below that of the first release or above MHA_MAX_STRUCT_BYTES, or one
 * beyond `known_bytes` whose tail is not zero, is MHA_ERROR_STRUCT_SIZE; given NULL is
 * MHA_ERROR_NULL. `name` goes into the message. */
mha_status mha_read_struct(void *known, size_t known_bytes, size_t first_release_bytes,
                           const void *given, const char *name, mha_error *error);

/* The way back: copies `known` into a caller's struct that mha_read_struct has accepted, as far as
 * its size goes; the size itself, and what this version does not know, stay as they are. */
void mha_write_struct(void *given, const void *known, size_t known_bytes);

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

/* Fails with MHA_ERROR_UNSUPPORTED unless the numbers of an array are stored as float32; its
 * element type is called "<array><member>". */
mha_status mha_require_element(int32_t element, const char *array, const char *member,
                               mha_error *error);

/* Fails with `status` unless keys and values may be stored as this mha_element. */
mha_status mha_require_kv_element(int32_t element, const char *array, const char *member,
                                  mha_status status, mha_error *error);

/* Fails with MHA_ERROR_VALUE unless pages of a cache may have so many tokens, or 0 for none. */
mha_status mha_require_page_tokens(int64_t tokens, const char *name, mha_error *error);

/* Fails with MHA_ERROR_SIZE if a size is 0 although `given`, an array that it is the size of and
 * that the call would use, is not NULL: a size that was forgotten, unless `flags` has
 * MHA_ALLOW_EMPTY. */
mha_status mha_require_meant(uint32_t flags, int64_t size, const char *size_name, const void *given,
                             const char *given_name, mha_error *error);

/* Fails with MHA_ERROR_VALUE if one of the n sinks is NaN or +inf; NULL passes. */
mha_status mha_require_sinks(const float *sinks, int64_t n, const char *name, mha_error *error);

/* The strides of an array [B][L][width] whose innermost stride is 1. */
typedef struct mha_rows_shape {
  int64_t batch, length, width;
  int64_t batch_stride, row_stride;
} mha_rows_shape;

/* Whether the rows of all entries are evenly spaced: one long run. */
static inline bool mha_rows_are_even(const mha_rows_shape *shape) {
  return shape->batch <= 1 || shape->batch_stride == shape->length * shape->row_stride;
}

/* Replaces strides of 0, and those that nobody steps by and that could be none, by the dense ones
 * and checks that BLAS can take them; of an output also that no two of its elements share an
 * address. `name` as in "query". */
mha_status mha_resolve_strides(mha_rows_shape *shape, bool is_output, const char *name,
                               mha_error *error);

/* The arrays of one call by address range, to find outputs that overlap something. */
enum { MHA_MAX_RANGES = 64, MHA_MAX_STEPS = 3 };
typedef struct mha_address_range {
  const char *name;
  uintptr_t begin, end;
  struct {
    uintptr_t period, width; /* bytes: only the first `width` of each `period` are meant; 0 = all */
  } gaps[MHA_MAX_STEPS];     /* the same gaps, seen from each dimension */
  bool is_output;
} mha_address_range;

typedef struct mha_address_ranges {
  int n;
  mha_address_range items[MHA_MAX_RANGES];
} mha_address_ranges;

/* Adds `elements` elements from data on; NULL data or no elements add nothing. Fails with
 * MHA_ERROR_OVERFLOW if the range leaves the address space, and with MHA_ERROR_UNSUPPORTED where
 * there is no room for it: a way back through a layer names some 50 arrays, so no caller can see
 * that.
 */
mha_status mha_ranges_add(mha_address_ranges *ranges, const char *name, const void *data,
                          int64_t elements, size_t element_bytes, bool is_output, mha_error *error);

/* Adds an array with two outer strides, from its first to its last element. */
mha_status mha_ranges_add_rows(mha_address_ranges *ranges, const char *name, const float *data,
                               const mha_rows_shape *shape, bool is_output, mha_error *error);

/* One of the outer dimensions of an array: its extent and the floats from one to the next. */
typedef struct mha_step {
  int64_t count, stride;
} mha_step;

/* The array of that name, if it was added last, has n outer dimensions, at most MHA_MAX_STEPS, in
 * any order, and `width` floats in a row within them. What lies between is not its own, so that two
 * such arrays may lie within one block, side by side, where they step alike. */
void mha_ranges_have_steps(mha_address_ranges *ranges, const char *name, const mha_step *steps,
                           int n, int64_t width);

/* Fails with MHA_ERROR_OVERLAP if an output shares a byte with any other range. */
mha_status mha_ranges_check(const mha_address_ranges *ranges, mha_error *error);

#endif
