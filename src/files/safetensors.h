/* The safetensors format: a reader of bytes in memory that trusts nothing, and a writer.
 *
 * A file is the header's length N (8 bytes, little-endian), N bytes of JSON that begin with '{' and
 * may end with spaces, then the numbers. The JSON object has one member per tensor,
 *
 *     "name": {"dtype": "F32", "shape": [7, 8], "data_offsets": [begin, end]}
 *
 * with offsets in bytes from the end of the header, and perhaps "__metadata__", an object of
 * strings. The tensors cover what follows the header exactly. */
#ifndef MHA_SRC_FILES_SAFETENSORS_H
#define MHA_SRC_FILES_SAFETENSORS_H

#include "tensors.h"

/* Largest N. */
#define MHA_SAFETENSORS_HEADER_LIMIT 100000000

/* Begin with {0}. */
typedef struct mha_safetensors {
  int64_t n;
  mha_raw_tensor *items; /* sorted by name; their data point into the bytes that were parsed */
  size_t memory_bytes;   /* of one block: the items, their names, types that are not known */
  mha_allocator allocator;
} mha_safetensors;

/* Checks the whole structure of a file that lies in memory. `name` is for messages. A type that is
 * not known is MHA_RAW_OTHER; its size is not checked against its shape, all else is. The
 * header is parsed with memory of the C library, the result is in memory of `allocator` (NULL = the
 * C library). Errors: FORMAT; UNSUPPORTED for more than MHA_MAX_RANK dimensions; MEMORY;
 * then `parsed` is all zero. */
mha_status mha_safetensors_parse(const char *name, const void *bytes, size_t n_bytes,
                                 const mha_allocator *allocator, mha_safetensors *parsed,
                                 mha_error *error);

/* Frees the tensors and zeroes `parsed`; one that is all zero is ignored. */
void mha_safetensors_release(mha_safetensors *parsed);

/* A tensor of rank 0, 1 or 2. */
typedef struct mha_tensor_to_write {
  const char *name; /* UTF-8 without control characters, not "__metadata__" */
  int rank;
  int64_t shape[2];
  const void *data;
  int64_t row_stride; /* of rank 2: numbers between the beginnings of rows, at least shape[1] */
  int32_t element;    /* mha_element of data, one without blocks */
} mha_tensor_to_write;

/* Writes the n tensors in their order, dense and little-endian, each in its type. Afterwards `path`
 * is the whole new file, or on failure what it was before. Errors: VALUE for a name that cannot be
 * written or stands twice; OVERFLOW; MEMORY; IO. */
mha_status mha_safetensors_write(const char *path, const mha_tensor_to_write *tensors, int n,
                                 mha_error *error);

#endif
