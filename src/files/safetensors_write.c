/* Owns the writing of the safetensors format. */
#include "base/element.h"
#include "base/error.h"
#include "base/memory.h"
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
  failed |= json_object_set_new(entry, "dtype", json_string(mha_element_name(tensor->element)));
  failed |= json_object_set_new(entry, "shape", shape);
  failed |= json_object_set_new(entry, "data_offsets", offsets);
  failed |= json_object_set_new(root, tensor->name, entry);
  return failed == 0;
}

/* *end = begin + the bytes of the tensor. */
static bool end_of(const mha_tensor_to_write *tensor, int64_t begin, int64_t *end) {
  int64_t bytes = (int64_t)mha_element_bytes(tensor->element, 1);
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

/* Row by row, which may lie further apart than they are long. */
static mha_status write_numbers(mha_output *output, const mha_tensor_to_write *tensor,
                                mha_error *error) {
  const int64_t rows = tensor->rank == 2 ? tensor->shape[0] : 1;
  const int64_t width = tensor->rank == 0 ? 1 : tensor->shape[tensor->rank - 1];
  const size_t each = mha_element_bytes(tensor->element, 1);
  mha_status status = MHA_OK;
  if (tensor->row_stride == width)
    return mha_output_write_numbers(output, tensor->data, each, rows * width, error);
  for (int64_t row = 0; !status && row < rows; row++)
    status = mha_output_write_numbers(
        output, mha_element_at(tensor->data, tensor->element, row * tensor->row_stride), each,
        width, error);
  return status;
}

static mha_status write_file(const char *path, const header *made,
                             const mha_tensor_to_write *tensors, int n, mha_error *error) {
  mha_output output;
  mha_status status = mha_output_open(path, &output, error);
  if (status)
    return status;
  status = mha_output_write(&output, made->bytes, made->n, error);
  for (int i = 0; !status && i < n; i++)
    status = write_numbers(&output, &tensors[i], error);
  if (!status)
    status = mha_output_sync(&output, error);
  return status ? status : mha_output_commit(&output, error);
}

mha_status mha_safetensors_write(const char *path, const mha_tensor_to_write *tensors, int n,
                                 mha_error *error) {
  header made = {NULL, 0, mha_memory_allocator(NULL)};
  json_t *root = json_object();
  mha_status status = root ? build_tree(path, tensors, n, root, error)
                           : mha_fail(error, MHA_ERROR_MEMORY, "no memory for the header of %s",
                                      mha_shown_path(path));
  if (!status)
    status = print_tree(path, root, &made, error);
  json_decref(root);
  if (!status)
    status = write_file(path, &made, tensors, n, error);
  mha_memory_release(&made.allocator, made.bytes, made.n);
  return status;
}
