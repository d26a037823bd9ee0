/* Owns the checks that every call makes of its arguments before it writes anything. */
#include "arguments.h"

#include "element.h"
#include "error.h"
#include "memory.h"

#include <math.h>
#include <string.h>

void mha_struct_init(void *structure, size_t bytes) {
  if (!structure || bytes < sizeof bytes)
    return;
  memset(structure, 0, bytes);
  memcpy(structure, &bytes, sizeof bytes);
}

static bool is_zero(const unsigned char *bytes, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (bytes[i] != 0)
      return false;
  return true;
}

mha_status mha_read_struct(void *known, size_t known_bytes, size_t first_release_bytes,
                           const void *given, const char *name, mha_error *error) {
  const mha_status status = mha_require(given, name, error);
  if (status)
    return status;
  size_t bytes = 0;
  memcpy(&bytes, given, sizeof bytes);
  if (bytes < first_release_bytes || bytes > MHA_MAX_STRUCT_BYTES)
    return mha_fail(error, MHA_ERROR_STRUCT_SIZE,
                    "%s.struct_size is %zu; rule: between %zu and %d, as MHA_INIT(&%s) sets it "
                    "before any member is set",
                    name, bytes, first_release_bytes, MHA_MAX_STRUCT_BYTES, name);
  if (bytes > known_bytes &&
      !is_zero((const unsigned char *)given + known_bytes, bytes - known_bytes))
    return mha_fail(error, MHA_ERROR_STRUCT_SIZE,
                    "%s.struct_size is %zu and members beyond byte %zu are set; rule: what this "
                    "version does not know must be zero",
                    name, bytes, known_bytes);
  memset(known, 0, known_bytes);
  memcpy(known, given, bytes < known_bytes ? bytes : known_bytes);
  return MHA_OK;
}

void mha_write_struct(void *given, const void *known, size_t known_bytes) {
  size_t bytes = 0;
  memcpy(&bytes, given, sizeof bytes);
  memcpy((unsigned char *)given + sizeof bytes, (const unsigned char *)known + sizeof bytes,
         (bytes < known_bytes ? bytes : known_bytes) - sizeof bytes);
}

mha_status mha_require(const void *pointer, const char *name, mha_error *error) {
  return pointer ? MHA_OK
                 : mha_fail(error, MHA_ERROR_NULL, "%s is NULL; rule: it must be given", name);
}

mha_status mha_require_at_least(int64_t value, int64_t lowest, const char *name, mha_error *error) {
  return value >= lowest ? MHA_OK
                         : mha_fail(error, MHA_ERROR_SIZE, "%s is %lld; rule: at least %lld", name,
                                    (long long)value, (long long)lowest);
}

mha_status mha_require_finite(float value, const char *name, mha_error *error) {
  return isfinite(value) ? MHA_OK
                         : mha_fail(error, MHA_ERROR_VALUE, "%s is %g; rule: it must be finite",
                                    name, (double)value);
}

mha_status mha_require_flags(uint32_t flags, uint32_t allowed, const char *name, mha_error *error) {
  return (flags & ~allowed) == 0
             ? MHA_OK
             : mha_fail(error, MHA_ERROR_VALUE, "%s is 0x%x; rule: only bits of 0x%x", name,
                        (unsigned)flags, (unsigned)allowed);
}

mha_status mha_require_reserved(int32_t value, const char *name, mha_error *error) {
  return value == 0 ? MHA_OK
                    : mha_fail(error, MHA_ERROR_VALUE, "%s is %d; rule: 0", name, (int)value);
}

mha_status mha_require_element(int32_t element, const char *array, const char *member,
                               mha_error *error) {
  return element == MHA_F32 ? MHA_OK
                            : mha_fail(error, MHA_ERROR_UNSUPPORTED, "%s%s is %d; rule: MHA_F32",
                                       array, member, (int)element);
}

mha_status mha_require_kv_element(int32_t element, const char *array, const char *member,
                                  mha_status status, mha_error *error) {
  if (mha_element_is_known(element) && element != MHA_Q4_0)
    return MHA_OK;
  return mha_fail(error, status, "%s%s is %d; rule: MHA_F32, MHA_F16, MHA_BF16 or MHA_Q8_0", array,
                  member, (int)element);
}

mha_status mha_require_page_tokens(int64_t tokens, const char *name, mha_error *error) {
  enum { LEAST = 16 };
  if (tokens == 0 || (tokens >= LEAST && (tokens & (tokens - 1)) == 0))
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_VALUE, "%s is %lld; rule: 0 or a power of two, at least %d",
                  name, (long long)tokens, LEAST);
}

mha_status mha_require_meant(uint32_t flags, int64_t size, const char *size_name, const void *given,
                             const char *given_name, mha_error *error) {
  if (size != 0 || !given || flags & MHA_ALLOW_EMPTY)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_SIZE,
                  "%s is 0 although %s is given; rule: set it, or MHA_ALLOW_EMPTY in args.flags "
                  "where a call without any is meant",
                  size_name, given_name);
}

/* ---- strides ---- */

/* Elements from the first to behind the last; false if that overflows. */
static bool extent(const mha_rows_shape *shape, int64_t *elements) {
  int64_t batches = 0;
  int64_t rows = 0;
  if (shape->batch == 0 || shape->length == 0) {
    *elements = 0;
    return true;
  }
  return mha_multiply(shape->batch - 1, shape->batch_stride, &batches) &&
         mha_multiply(shape->length - 1, shape->row_stride, &rows) &&
         mha_add(batches, rows, elements) && mha_add(*elements, shape->width, elements);
}

/* Two strides keep elements apart if the longer steps over all that the shorter covers. */
static bool self_overlaps(const mha_rows_shape *shape) {
  const bool rows_inside = shape->batch_stride >= shape->row_stride;
  const int64_t inner = rows_inside ? shape->row_stride : shape->batch_stride;
  const int64_t inner_count = rows_inside ? shape->length : shape->batch;
  const int64_t outer = rows_inside ? shape->batch_stride : shape->row_stride;
  const int64_t outer_count = rows_inside ? shape->batch : shape->length;
  int64_t covered = 0;
  if (shape->batch == 0 || shape->length == 0)
    return false;
  if (inner_count > 1 && inner < shape->width)
    return true;
  return outer_count > 1 &&
         (!mha_multiply(inner_count - 1, inner, &covered) || outer - covered < shape->width);
}

mha_status mha_require_sinks(const float *sinks, int64_t n, const char *name, mha_error *error) {
  for (int64_t h = 0; sinks && h < n; h++)
    if (isnan(sinks[h]) || sinks[h] == INFINITY)
      return mha_fail(error, MHA_ERROR_VALUE, "%s[%lld] is %g; rule: finite, or -inf for no sink",
                      name, (long long)h, (double)sinks[h]);
  return MHA_OK;
}

mha_status mha_resolve_strides(mha_rows_shape *shape, bool is_output, const char *name,
                               mha_error *error) {
  /* a stride that nobody steps by need not be one; where it could be, the next one follows from it
   */
  const bool unused =
      shape->length <= 1 && (shape->row_stride < shape->width || shape->row_stride > MHA_BLAS_MAX);
  if (shape->row_stride == 0 || unused)
    shape->row_stride = shape->width;
  if (shape->batch <= 1)
    shape->batch_stride = 0;
  if (shape->row_stride < shape->width || shape->batch_stride < 0)
    return mha_fail(error, MHA_ERROR_STRIDE,
                    "%s has batch stride %lld and row stride %lld; rule: the batch stride is not "
                    "negative and the row stride at least the width, %lld",
                    name, (long long)shape->batch_stride, (long long)shape->row_stride,
                    (long long)shape->width);
  if (shape->batch_stride == 0 &&
      !mha_multiply(shape->length, shape->row_stride, &shape->batch_stride))
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s has %lld rows of %lld elements; rule: the product must not overflow", name,
                    (long long)shape->length, (long long)shape->row_stride);
  if (shape->row_stride > MHA_BLAS_MAX)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s has row stride %lld; rule: at most %lld, the BLAS's integer", name,
                    (long long)shape->row_stride, (long long)MHA_BLAS_MAX);
  if (is_output && self_overlaps(shape))
    return mha_fail(error, MHA_ERROR_OVERLAP,
                    "%s has batch stride %lld and row stride %lld; rule: no two elements of an "
                    "output share an address",
                    name, (long long)shape->batch_stride, (long long)shape->row_stride);
  return MHA_OK;
}

/* ---- overlap ---- */

mha_status mha_ranges_add(mha_address_ranges *ranges, const char *name, const void *data,
                          int64_t elements, size_t element_bytes, bool is_output,
                          mha_error *error) {
  int64_t bytes = 0;
  if (!data || elements == 0)
    return MHA_OK;
  const uintptr_t begin = (uintptr_t)data;
  if (!mha_multiply(elements, (int64_t)element_bytes, &bytes) ||
      (uint64_t)bytes > UINTPTR_MAX - begin)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s has %lld elements; rule: it must fit the address space", name,
                    (long long)elements);
  if (ranges->n == MHA_MAX_RANGES)
    return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                    "%s is array number %d of the call; rule: at most %d are told apart", name,
                    ranges->n + 1, MHA_MAX_RANGES);
  const mha_address_range range = {
      .name = name, .begin = begin, .end = begin + (uintptr_t)bytes, .is_output = is_output};
  ranges->items[ranges->n++] = range;
  return MHA_OK;
}

mha_status mha_ranges_add_rows(mha_address_ranges *ranges, const char *name, const float *data,
                               const mha_rows_shape *shape, bool is_output, mha_error *error) {
  int64_t elements = 0;
  if (!extent(shape, &elements))
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s has %lld entries of %lld rows, %lld and %lld elements apart; rule: the "
                    "extent must not overflow",
                    name, (long long)shape->batch, (long long)shape->length,
                    (long long)shape->batch_stride, (long long)shape->row_stride);
  return mha_ranges_add(ranges, name, data, elements, sizeof(float), is_output, error);
}

/* What the dimensions inside of step k cover, or 0 where those outside are no multiples of it: what
 * repeats with its period then covers more. */
static int64_t covered_within(const mha_step *steps, int n, int k, int64_t width) {
  int64_t covered = width;
  for (int j = 0; j < n; j++) {
    if (steps[j].count <= 1)
      continue;
    if (steps[j].stride < steps[k].stride)
      covered += (steps[j].count - 1) * steps[j].stride;
    else if (steps[j].stride % steps[k].stride != 0)
      return 0;
  }
  return covered;
}

void mha_ranges_have_steps(mha_address_ranges *ranges, const char *name, const mha_step *steps,
                           int n, int64_t width) {
  mha_address_range *last = ranges->n > 0 ? &ranges->items[ranges->n - 1] : NULL;
  if (!last || last->name != name)
    return;
  for (int k = 0; k < n; k++) {
    const bool counts = steps[k].count > 1 && steps[k].stride > 0;
    const int64_t covered = counts ? covered_within(steps, n, k, width) : 0;
    if (covered > 0 && covered < steps[k].stride) {
      last->gaps[k].period = (uintptr_t)steps[k].stride * sizeof(float);
      last->gaps[k].width = (uintptr_t)covered * sizeof(float);
    }
  }
}

/* Those of one end before those of the other begin, in every period. */
static bool are_apart(uintptr_t begin_a, uintptr_t width_a, uintptr_t begin_b, uintptr_t width_b,
                      uintptr_t period) {
  const bool a_first = begin_a <= begin_b;
  const uintptr_t shift = (a_first ? begin_b - begin_a : begin_a - begin_b) % period;
  return shift >= (a_first ? width_a : width_b) && (a_first ? width_b : width_a) <= period - shift;
}

static bool are_side_by_side(const mha_address_range *a, const mha_address_range *b) {
  for (int i = 0; i < MHA_MAX_STEPS; i++)
    for (int j = 0; j < MHA_MAX_STEPS; j++)
      if (a->gaps[i].period > 0 && a->gaps[i].period == b->gaps[j].period &&
          are_apart(a->begin, a->gaps[i].width, b->begin, b->gaps[j].width, a->gaps[i].period))
        return true;
  return false;
}

mha_status mha_ranges_check(const mha_address_ranges *ranges, mha_error *error) {
  for (int i = 0; i < ranges->n; i++)
    for (int j = 0; j < i; j++) {
      const mha_address_range *a = &ranges->items[i];
      const mha_address_range *b = &ranges->items[j];
      if ((a->is_output || b->is_output) && a->begin < b->end && b->begin < a->end &&
          !are_side_by_side(a, b))
        return mha_fail(error, MHA_ERROR_OVERLAP,
                        "%s overlaps %s; rule: an output overlaps no input and no other output",
                        a->is_output ? a->name : b->name, a->is_output ? b->name : a->name);
    }
  return MHA_OK;
}
