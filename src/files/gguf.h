/* The GGUF format: a reader of bytes in memory that trusts nothing.
 *
 * A file is "GGUF", a version (4 bytes, all numbers little-endian), the count of tensors and that
 * of metadata pairs (8 each), the pairs (a key, a type, a value), a description of each tensor
 *
 *     name, rank (4), dimensions (8 each, the fastest first), type (4), offset (8)
 *
 * and, from the next multiple of the alignment on, the numbers. Text is a length of 8 bytes and so
 * many bytes. Offsets count from the first number and are multiples of the alignment. */
#ifndef MHA_SRC_FILES_GGUF_H
#define MHA_SRC_FILES_GGUF_H

#include "tensors.h"

/* Begin with {0}. */
typedef struct mha_gguf {
  int64_t n;
  mha_raw_tensor *items; /* sorted by name; their data point into the bytes that were parsed */
  mha_model_info model;  /* its architecture points into the block */
  bool rope_is_scaled;   /* as in mha_raw_tensors */
  size_t memory_bytes;   /* of one block: the items, their names, types that are not known */
  void *memory;
  mha_allocator allocator;
} mha_gguf;

/* Checks the whole structure of a file that lies in memory, versions 2 and 3. `name` is for
 * messages. Shapes are told in the order of all others, the fastest dimension last. A type that is
 * not known is MHA_RAW_OTHER and reaches to the next tensor. The result is in memory of `allocator`
 * (NULL = the C library). Errors: FORMAT; UNSUPPORTED for other versions, the other byte order and
 * more than MHA_MAX_RANK dimensions; MEMORY; then `parsed` is all zero. */
mha_status mha_gguf_parse(const char *name, const void *bytes, size_t n_bytes,
                          const mha_allocator *allocator, mha_gguf *parsed, mha_error *error);

/* Frees the tensors and zeroes `parsed`; one that is all zero is ignored. */
void mha_gguf_release(mha_gguf *parsed);

#endif
