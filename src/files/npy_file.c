/* Owns whole .npy files: reading one into memory, writing one. */
#define _XOPEN_SOURCE 700

#include "base/error.h"
#include "base/memory.h"
#include "kind.h"
#include "mapping.h"
#include "npy.h"
#include "path.h"
#include "text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- Reading a file -------------------------------------------------------------------------- */

/* One file on its way into memory. */
typedef struct reading {
  const char *path;
  int file;
  unsigned char *buffer; /* the beginning of the file, later the numbers piece by piece */
  size_t buffer_bytes;
  mha_npy_header header;
} reading;

static mha_status read_header(reading *r, int64_t file_bytes, mha_npy_kind kind, mha_error *error) {
  const size_t most = MHA_NPY_HEADER_LIMIT + 12;
  const size_t n = file_bytes < (int64_t)most ? (size_t)file_bytes : most;
  mha_status status = mha_read_at(r->path, r->file, 0, r->buffer, n, error);
  if (!status)
    status = mha_npy_parse(r->path, r->buffer, n, file_bytes, &r->header, error);
  return status ? status : mha_npy_check_kind(r->path, &r->header, kind, error);
}

static mha_status read_numbers(reading *r, mha_npy_kind kind, void *target, mha_error *error) {
  const size_t item = mha_npy_item_bytes(&r->header);
  const int64_t most = (int64_t)(r->buffer_bytes / item);
  mha_status status = MHA_OK;
  for (int64_t first = 0; !status && first < r->header.n_elements; first += most) {
    const int64_t rest = r->header.n_elements - first;
    const int64_t n = rest < most ? rest : most;
    status = mha_read_at(r->path, r->file, r->header.data_offset + first * (int64_t)item, r->buffer,
                         (size_t)n * item, error);
    if (!status)
      mha_npy_convert(&r->header, first, n, r->buffer, kind, target);
  }
  return status;
}

static mha_status allocate_array(const reading *r, mha_npy_kind kind, mha_npy_array *array,
                                 mha_error *error) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, mha_npy_kind_bytes(kind), r->header.n_elements, 1, 1);
  if (layout.overflow)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s holds %" PRId64 " numbers; rule: their size fits the address space",
                    mha_shown_path(r->path), r->header.n_elements);
  array->data_bytes = layout.bytes ? layout.bytes : MHA_ALIGNMENT;
  array->data = mha_memory_allocate(&array->allocator, array->data_bytes);
  if (!array->data)
    return mha_fail(error, MHA_ERROR_MEMORY, "no memory for the %zu bytes of %s", array->data_bytes,
                    mha_shown_path(r->path));
  array->rank = r->header.rank;
  memcpy(array->shape, r->header.shape, sizeof array->shape);
  array->n_elements = r->header.n_elements;
  return MHA_OK;
}

mha_status mha_npy_read(const char *path, mha_npy_kind kind, const mha_allocator *allocator,
                        mha_npy_array *array, mha_error *error) {
  reading r = {.path = path, .file = -1, .buffer_bytes = MHA_NPY_HEADER_LIMIT + MHA_ALIGNMENT};
  int64_t file_bytes = 0;
  memset(array, 0, sizeof *array);
  array->allocator = mha_memory_allocator(allocator);
  const mha_allocator memory = array->allocator;
  mha_status status = mha_open_regular(path, &r.file, &file_bytes, error);
  if (!status) {
    r.buffer = mha_memory_allocate(&memory, r.buffer_bytes);
    if (!r.buffer)
      status = mha_fail(error, MHA_ERROR_MEMORY, "no memory for the %zu bytes to read %s with",
                        r.buffer_bytes, mha_shown_path(path));
  }
  if (!status)
    status = read_header(&r, file_bytes, kind, error);
  if (!status)
    status = allocate_array(&r, kind, array, error);
  if (!status)
    status = read_numbers(&r, kind, array->data, error);
  mha_memory_release(&memory, r.buffer, r.buffer_bytes);
  if (r.file >= 0)
    (void)close(r.file);
  if (!status)
    return mha_succeed(error);
  mha_npy_array_release(array);
  return status;
}

void mha_npy_array_release(mha_npy_array *array) {
  if (array->data)
    mha_memory_release(&array->allocator, array->data, array->data_bytes);
  memset(array, 0, sizeof *array);
}

/* ---- Writing a file -------------------------------------------------------------------------- */

#define MAGIC_BYTES  10
#define HEADER_BYTES 256 /* 8 dimensions of 19 digits fit; numbers begin at a multiple of 64 */

static int header_text(int rank, const int64_t *shape, unsigned char *bytes) {
  char text[HEADER_BYTES];
  char dimensions[HEADER_BYTES - 60];
  (void)mha_shape_text(rank, shape, dimensions, sizeof dimensions);
  const int used = snprintf(text, sizeof text,
                            "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }", dimensions);
  const int total = (MAGIC_BYTES + used + 1 + 63) / 64 * 64;
  const int length = total - MAGIC_BYTES;
  memcpy(bytes, "\x93NUMPY\x01\x00", 8);
  bytes[8] = (unsigned char)(length & 0xFF);
  bytes[9] = (unsigned char)(length >> 8);
  memset(bytes + MAGIC_BYTES, ' ', (size_t)length - 1);
  memcpy(bytes + MAGIC_BYTES, text, (size_t)used);
  bytes[total - 1] = '\n';
  return total;
}

mha_status mha_npy_stage(const char *path, int rank, const int64_t *shape, const float *data,
                         mha_output *output, mha_error *error) {
  unsigned char header[HEADER_BYTES + 64];
  int64_t n = 1;
  output->has_temporary = 0;
  for (int axis = 0; axis < rank; axis++)
    if (rank > MHA_NPY_MAX_RANK || !mha_multiply(n, shape[axis], &n))
      return mha_fail(error, MHA_ERROR_OVERFLOW,
                      "the shape for %s has no size; rule: its "
                      "dimensions are not negative and their product fits 63 bits",
                      mha_shown_path(path));
  mha_status status = mha_output_open(path, output, error);
  if (!status)
    status = mha_output_write(output, header, (size_t)header_text(rank, shape, header), error);
  if (!status)
    status = mha_output_write_numbers(output, data, sizeof *data, n, error);
  return status ? status : mha_output_sync(output, error);
}

mha_status mha_npy_write(const char *path, int rank, const int64_t *shape, const float *data,
                         mha_error *error) {
  mha_output output;
  const mha_status status = mha_npy_stage(path, rank, shape, data, &output, error);
  return status ? status : mha_output_commit(&output, error);
}
