/* The bytes of one file, mapped or read into memory. */
#ifndef MHA_SRC_FILES_MAPPING_H
#define MHA_SRC_FILES_MAPPING_H

#include "mha.h"

#include <stdbool.h>

/* Begin with {0}. Of a file that is mapped the bytes change with the file, and reading beyond what
 * is left of it ends the process. */
typedef struct mha_mapping {
  const unsigned char *bytes; /* NULL = not open; otherwise not NULL, also of an empty file */
  size_t n_bytes;
  void *memory; /* what has to be given back, or NULL */
  bool is_mapped;
  mha_allocator allocator;
} mha_mapping;

/* Opens a regular file, and nothing else, for reading; close it with close(). */
mha_status mha_open_regular(const char *path, int *file, int64_t *file_bytes, mha_error *error);

/* Reads exactly n bytes at `offset`; a file that has become shorter is MHA_ERROR_IO. */
mha_status mha_read_at(const char *path, int file, int64_t offset, void *target, size_t n,
                       mha_error *error);

/* Maps a regular file, or reads it into memory of `allocator` (NULL = the C library). No descriptor
 * stays open. Errors: IO, MEMORY; then `mapping` is all zero. */
mha_status mha_mapping_open(const char *path, bool read_into_memory, const mha_allocator *allocator,
                            mha_mapping *mapping, mha_error *error);

/* Gives the bytes back and zeroes `mapping`; one that is all zero is ignored. */
void mha_mapping_close(mha_mapping *mapping);

#endif
