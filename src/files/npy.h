/* The .npy format: a reader that trusts nothing, and a writer that leaves no half file behind.
 *
 * Loaded: versions 1.0, 2.0 and 3.0; float16, float32 and float64 as numbers, bool and uint8 as
 * bytes, bool, uint8, int32 and int64 as integers; both byte orders; row-major and column-major,
 * which is transposed while it is read. Anything else is refused by name. A message about the
 * content of a file tells the byte position. */
#ifndef MHA_SRC_FILES_NPY_H
#define MHA_SRC_FILES_NPY_H

#include "output.h"

#include <stdbool.h>

#define MHA_NPY_MAX_RANK 8

/* Longer than any type that is known. */
#define MHA_NPY_DESCR_BYTES 34

/* The header text of any sane file is below 1 KiB; version 1.0 cannot exceed 64 KiB. */
#define MHA_NPY_HEADER_LIMIT 65536

typedef enum mha_npy_type {
  MHA_NPY_F2,
  MHA_NPY_F4,
  MHA_NPY_F8,
  MHA_NPY_I4,
  MHA_NPY_I8,
  MHA_NPY_U1,
  MHA_NPY_B1
} mha_npy_type;

typedef struct mha_npy_header {
  char descr[MHA_NPY_DESCR_BYTES]; /* the type as the file spells it, cut; or what is not loaded */
  mha_npy_type type;
  bool big_endian;
  bool column_major;
  int rank; /* 0 = a single number */
  int64_t shape[MHA_NPY_MAX_RANK];
  int64_t n_elements;  /* product of the shape */
  int64_t data_offset; /* where the numbers begin */
} mha_npy_header;

/* What the numbers become in memory. */
typedef enum mha_npy_kind {
  MHA_NPY_FLOATS,  /* float, from float16, float32, float64 (rounded; too large = infinity) */
  MHA_NPY_BYTES,   /* uint8_t, from bool and uint8 */
  MHA_NPY_INTEGERS /* int64_t, from bool, uint8, int32, int64 */
} mha_npy_kind;

/* An array in memory, row-major whatever its file was. Thread rule: as plain data. */
typedef struct mha_npy_array {
  int rank;
  int64_t shape[MHA_NPY_MAX_RANK];
  int64_t n_elements;
  void *data; /* of the kind asked for; not NULL, even without elements; NULL = nothing loaded */
  size_t data_bytes;
  mha_allocator allocator;
} mha_npy_array;

/* Reads the header in `bytes`, the first n_bytes of a file of file_bytes bytes: all of it, or at
 * least MHA_NPY_HEADER_LIMIT + 12. `name` is for messages. After MHA_OK the file holds exactly the
 * header and the n_elements it promises. FORMAT: the file is malformed; UNSUPPORTED: it is an array
 * of something else, and header->descr tells of what. */
mha_status mha_npy_parse(const char *name, const void *bytes, size_t n_bytes, int64_t file_bytes,
                         mha_npy_header *header, mha_error *error);

/* Whether this machine stores the high byte of a number first. */
bool mha_machine_is_big_endian(void);

/* Bytes of one number in the file. */
size_t mha_npy_item_bytes(const mha_npy_header *header);

/* A type as a file spells it behind its byte order, such as "f4". */
const char *mha_npy_type_text(mha_npy_type type);

/* Bytes of one number of a kind in memory. */
size_t mha_npy_kind_bytes(mha_npy_kind kind);

/* Whether the file's type may become `kind`; UNSUPPORTED otherwise. */
mha_status mha_npy_check_kind(const char *name, const mha_npy_header *header, mha_npy_kind kind,
                              mha_error *error);

/* Converts the file's elements first … first + n - 1, which begin at `source`, to their places in
 * `target`, the whole row-major array of n_elements numbers of a checked kind. */
void mha_npy_convert(const mha_npy_header *header, int64_t first, int64_t n, const void *source,
                     mha_npy_kind kind, void *target);

/* Loads a file into memory of `allocator` (NULL = the C library); free it with
 * mha_npy_array_release. Only regular files are opened. On failure `array` is all zero. */
mha_status mha_npy_read(const char *path, mha_npy_kind kind, const mha_allocator *allocator,
                        mha_npy_array *array, mha_error *error);

/* Frees the numbers and zeroes `array`; one that is all zero is ignored. */
void mha_npy_array_release(mha_npy_array *array);

/* Writes `data`, row-major float32 of the shape, to a temporary file and syncs it. The target is
 * not touched. End it with mha_output_commit or mha_output_discard; on failure there is nothing to
 * end. */
mha_status mha_npy_stage(const char *path, int rank, const int64_t *shape, const float *data,
                         mha_output *output, mha_error *error);

/* Stage and commit in one: afterwards `path` is the whole new file, or what it was before. */
mha_status mha_npy_write(const char *path, int rank, const int64_t *shape, const float *data,
                         mha_error *error);

#endif
