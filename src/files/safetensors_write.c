/* Owns the writing of the safetensors format. */
#include "base/element.h"
#include "base/error.h"
#include "base/memory.h"
#include "npy.h"
#include "output.h"
#include "path.h"
#include "safetensors.h"
#include "text.h"

#include <jansson.h>
#include <string.h>

#define LENGTH_BYTES 8

static const char metadata_key[] = "__metadata__";

/* The header with its length before it. */
typedef struct header {
  unsigned char *bytes;
  size_t n;
  mha_allocator allocator;
} header;

static mha_status check_name(const char *path, const mha_tensor_to_write *tensor,
                             mha_error *error) {
  char shown[MHA_SHOWN_BYTES];
  const char *fault = mha_name_fault(tensor->name);
  if (!fault && strcmp(tensor->name, metadata_key) == 0)
    fault = "is reserved";
  if (!fault)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_VALUE,
                  "the tensor name \"%s\" for %s %s; rule: names are UTF-8 without control "
                  "characters, and not __metadata__",
                  mha_shown_text(tensor->name, strlen(tensor->name), shown), mha_shown_path(path),
                  fault);
}

/* The format has no types with blocks. */
static bool has_blocks(const mha_tensor_to_write *tensor) {
  return mha_element_block(tensor->element) > 1;
}

static const char *type_of(const mha_tensor_to_write *tensor) {
  return has_blocks(tensor) ? "U8" : mha_element_name(tensor->element);
}

static size_t bytes_each(const mha_tensor_to_write *tensor) {
  return has_blocks(tensor) ? 1 : mha_element_bytes(tensor->element, 1);
}

/* Adds one entry; jansson takes NULL, for want of memory, as a failure. The parts belong to the
 * tree once they are handed over, whatever comes of it. */
static bool add_entry(json_t *root, const mha_tensor_to_write *tensor, int64_t begin, int64_t end) {
  json_t *shape = json_array();
  json_t *offsets = json_array();
  json_t *entry = json_object();
  int failed = 0;
  for (int axis = 0; axis < tensor->rank; axis++)
    failed |= json_array_append_new(shape, json_integer(tensor->shape[axis]));
  failed |= json_array_append_new(offsets, json_integer(begin));
  failed |= json_array_append_new(offsets, json_integer(end));
  failed |= json_object_set_new(entry, "dtype", json_string(type_of(tensor)));
  failed |= json_object_set_new(entry, "shape", shape);
  failed |= json_object_set_new(entry, "data_offsets", offsets);
  failed |= json_object_set_new(root, tensor->name, entry);
  return failed == 0;
}

/* *end = begin + the bytes of the tensor. */
static bool end_of(const mha_tensor_to_write *tensor, int64_t begin, int64_t *end) {
  int64_t bytes = (int64_t)bytes_each(tensor);
  for (int axis = 0; axis < tensor->rank; axis++)
    if (!mha_multiply(bytes, tensor->shape[axis], &bytes))
      return false;
  return mha_add(begin, bytes, end);
}

static mha_status build_tree(const char *path, const mha_tensor_to_write *tensors, int n,
                             json_t *root, mha_error *error) {
  int64_t begin = 0;
  for (int i = 0; i < n; i++) {
    char shown[MHA_SHOWN_BYTES];
    const mha_tensor_to_write *tensor = &tensors[i];
    int64_t end = 0;
    const mha_status status = check_name(path, tensor, error);
    if (status)
      return status;
    (void)mha_shown_text(tensor->name, strlen(tensor->name), shown);
    if (json_object_get(root, tensor->name))
      return mha_fail(error, MHA_ERROR_VALUE,
                      "the tensor name \"%s\" for %s stands twice; rule: each name once", shown,
                      mha_shown_path(path));
    if (!end_of(tensor, begin, &end))
      return mha_fail(error, MHA_ERROR_OVERFLOW,
                      "the end of tensor \"%s\" in %s overflows; rule: it fits 63 bits", shown,
                      mha_shown_path(path));
    if (!add_entry(root, tensor, begin, end))
      return mha_fail(error, MHA_ERROR_MEMORY, "no memory for the header of %s",
                      mha_shown_path(path));
    begin = end;
  }
  return MHA_OK;
}

static mha_status add_metadata(const char *path, const mha_file_to_write *file, json_t *root,
                               mha_error *error) {
  json_t *metadata = file->n_pairs > 0 ? json_object() : NULL;
  int failed = 0;
  if (file->n_pairs == 0)
    return MHA_OK;
  for (int i = 0; i < file->n_pairs; i++)
    failed |= json_object_set_new(metadata, file->pairs[i].key, json_string(file->pairs[i].value));
  failed |= json_object_set_new(root, metadata_key, metadata);
  return failed ? mha_fail(error, MHA_ERROR_MEMORY, "no memory for the header of %s",
                           mha_shown_path(path))
                : MHA_OK;
}

/* The tree as text, filled up with spaces so that the numbers begin at a multiple of 8. */
static mha_status print_tree(const char *path, const json_t *root, header *made, mha_error *error) {
  const size_t used = json_dumpb(root, NULL, 0, JSON_COMPACT);
  const size_t length = (used + 7) / 8 * 8;
  if (length > MHA_SAFETENSORS_HEADER_LIMIT)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "the header of %s has %zu bytes; rule: at most 100000000", mha_shown_path(path),
                    length);
  made->n = LENGTH_BYTES + length;
  made->bytes = mha_memory_allocate(&made->allocator, made->n);
  if (used == 0 || !made->bytes ||
      json_dumpb(root, (char *)made->bytes + LENGTH_BYTES, used, JSON_COMPACT) != used)
    return mha_fail(error, MHA_ERROR_MEMORY, "no memory for the header of %s",
                    mha_shown_path(path));
  for (size_t i = 0; i < LENGTH_BYTES; i++)
    made->bytes[i] = (unsigned char)((uint64_t)length >> 8 * i & 0xFFU);
  memset(made->bytes + LENGTH_BYTES + used, ' ', length - used);
  return MHA_OK;
}

/* Numbers that follow one another; those with blocks, `n` bytes of them, begin each with two bytes
 * that alone have an order. */
static mha_status write_run(mha_output *output, const mha_tensor_to_write *tensor, const void *data,
                            int64_t n, mha_error *error) {
  const int64_t block = (int64_t)mha_element_bytes(tensor->element, MHA_BLOCK);
  const unsigned char *at = data;
  mha_status status = MHA_OK;
  if (!has_blocks(tensor))
    return mha_output_write_numbers(output, data, bytes_each(tensor), n, error);
  if (!mha_machine_is_big_endian())
    return mha_output_write(output, data, (size_t)n, error);
  for (int64_t done = 0; !status && done < n; done += block) {
    status = mha_output_write_numbers(output, at + done, MHA_BLOCK_SCALE_BYTES, 1, error);
    if (!status)
      status = mha_output_write(output, at + done + MHA_BLOCK_SCALE_BYTES,
                                (size_t)(block - MHA_BLOCK_SCALE_BYTES), error);
  }
  return status;
}

static mha_status write_rows(mha_output *output, const mha_tensor_to_write *tensor,
                             mha_error *error) {
  const int64_t width = tensor->shape[1] * tensor->shape[2];
  mha_status status = MHA_OK;
  int64_t n = 0;
  for (int64_t row = 0; !status && row < tensor->shape[0]; row += n) {
    const void *data = NULL;
    n = mha_min(tensor->rows->find(tensor->rows->user, row, &data), tensor->shape[0] - row);
    status = write_run(output, tensor, data, n * width, error);
  }
  return status;
}

/* Row by row, which may lie further apart than they are long. */
static mha_status write_numbers(mha_output *output, const mha_tensor_to_write *tensor,
                                mha_error *error) {
  const int64_t rows = tensor->rank == 2 ? tensor->shape[0] : 1;
  const int64_t width = tensor->rank == 0 ? 1 : tensor->shape[tensor->rank - 1];
  const size_t each = bytes_each(tensor);
  mha_status status = MHA_OK;
  if (tensor->rows)
    return write_rows(output, tensor, error);
  if (tensor->row_stride == width)
    return mha_output_write_numbers(output, tensor->data, each, rows * width, error);
  for (int64_t row = 0; !status && row < rows; row++)
    status = mha_output_write_numbers(
        output, mha_element_at(tensor->data, tensor->element, row * tensor->row_stride), each,
        width, error);
  return status;
}

static mha_status write_file(const char *path, const header *made, const mha_file_to_write *file,
                             mha_error *error) {
  mha_output output;
  mha_status status = mha_output_open(path, &output, error);
  if (status)
    return status;
  status = mha_output_write(&output, made->bytes, made->n, error);
  for (int i = 0; !status && i < file->n; i++)
    status = write_numbers(&output, &file->tensors[i], error);
  if (!status)
    status = mha_output_sync(&output, error);
  return status ? status : mha_output_commit(&output, error);
}

mha_status mha_safetensors_write(const char *path, const mha_file_to_write *file,
                                 mha_error *error) {
  header made = {NULL, 0, mha_memory_allocator(NULL)};
  json_t *root = json_object();
  mha_status status = root ? build_tree(path, file->tensors, file->n, root, error)
                           : mha_fail(error, MHA_ERROR_MEMORY, "no memory for the header of %s",
                                      mha_shown_path(path));
  if (!status)
    status = add_metadata(path, file, root, error);
  if (!status)
    status = print_tree(path, root, &made, error);
  json_decref(root);
  if (!status)
    status = write_file(path, &made, file, error);
  mha_memory_release(&made.allocator, made.bytes, made.n);
  return status;
}
