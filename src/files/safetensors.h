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

/* A member of "__metadata__". */
typedef struct mha_text_pair {
  const char *key, *value;
} mha_text_pair;

/* Begin with {0}. */
typedef struct mha_safetensors {
  int64_t n;
  mha_raw_tensor *items; /* sorted by name; their data point into the bytes that were parsed */
  int64_t n_pairs;
  mha_text_pair *pairs; /* the metadata, each key once */
  void *memory;         /* one block: all this with its texts */
  size_t memory_bytes;
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

/* The value of a key, or NULL. */
const char *mha_safetensors_metadata(const mha_safetensors *parsed, const char *key);

/* Where rows lie that do not follow one another evenly: *data is row `row`; returns how many rows
 * from it on follow one another, at least 1. */
typedef struct mha_row_source {
  int64_t (*find)(const void *user, int64_t row, const void **data);
  const void *user;
} mha_row_source;

/* A tensor of rank 0 to 3. One of a type with blocks has rank 3: it is written as U8, and shape[2]
 * counts bytes. */
typedef struct mha_tensor_to_write {
  const char *name; /* UTF-8 without control characters, not "__metadata__" */
  int rank;
  int64_t shape[3];
  const void *data;
  int64_t row_stride; /* of rank 2: numbers between the beginnings of rows, at least shape[1] */
  int32_t element;    /* mha_element of data */
  const mha_row_source *rows; /* of rank 3, where data is NULL */
} mha_tensor_to_write;

/* What a file is to hold: texts for its metadata, and tensors in their order. */
typedef struct mha_file_to_write {
  const mha_text_pair *pairs;
  int n_pairs;
  const mha_tensor_to_write *tensors;
  int n;
} mha_file_to_write;

/* Writes the tensors dense and little-endian, each in its type. Afterwards `path` is the whole new
 * file, or on failure what it was before. Errors: VALUE for a name that cannot be written or stands
 * twice; OVERFLOW; MEMORY; IO. */
mha_status mha_safetensors_write(const char *path, const mha_file_to_write *file, mha_error *error);

#endif
