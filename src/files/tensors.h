/* The tensors of a safetensors or GGUF file, or of a folder of .npy files, as they lie there. */
#ifndef MHA_SRC_FILES_TENSORS_H
#define MHA_SRC_FILES_TENSORS_H

#include "mha.h"

#include <stdbool.h>

/* The types that become float32. Tensors of other types may be in a file as long as nobody asks for
 * their numbers. */
typedef enum mha_raw_type {
  MHA_RAW_F32,
  MHA_RAW_F64,
  MHA_RAW_F16,
  MHA_RAW_BF16,
  MHA_RAW_Q8_0, /* in GGUF alone: little-endian, rows of whole blocks */
  MHA_RAW_Q4_0,
  MHA_RAW_OTHER
} mha_raw_type;

/* One tensor. Nothing of it is owned. */
typedef struct mha_raw_tensor {
  const char *name; /* UTF-8, zero-terminated, without control characters */
  const char *type; /* as the file spells it, such as "F32", "Q6_K" or "<f4"; for messages */
  mha_raw_type element;
  bool big_endian;
  bool column_major;
  int rank; /* 0 = a single number */
  int64_t shape[MHA_MAX_RANK];
  int64_t n_elements;
  const unsigned char *data; /* checked to hold all elements */
  size_t bytes;
} mha_raw_tensor;

/* All tensors of a path, sorted by name (strcmp), each name once. */
typedef struct mha_raw_tensors {
  int64_t n;
  mha_raw_tensor *items;
  bool is_folder;
  mha_model_info model; /* what the file says of it; all zero = nothing */
  bool rope_is_scaled;  /* ... and that its rotary positions do not follow from the base alone */
  struct mha_tensor_store *store; /* what stands behind: maps, names, parsed headers */
} mha_raw_tensors;

/* Opens and checks the whole of a safetensors or GGUF file, told apart by their first bytes, or of
 * a folder of .npy files (its other files, and those that begin with a dot, are not looked at). A
 * .npy file that is sound, but of a type or rank that npy.h does not load, is an entry of that type
 * without shape and numbers. The files are mapped, or read into memory of `allocator` (NULL = the C
 * library). On failure `tensors` is all zero. */
mha_status mha_tensors_open(const char *path, bool read_into_memory, const mha_allocator *allocator,
                            mha_raw_tensors *tensors, mha_error *error);

/* The same of the bytes of a file that are in memory and stay there; `name` is for
 * messages. */
mha_status mha_tensors_open_bytes(const char *name, const void *bytes, size_t n_bytes,
                                  const mha_allocator *allocator, mha_raw_tensors *tensors,
                                  mha_error *error);

/* Unmaps and frees everything and zeroes `tensors`; one that is all zero is ignored. */
void mha_tensors_close(mha_raw_tensors *tensors);

/* The mha_element as which the numbers can be used where they lie: in this machine's byte order,
 * row-major, float32 aligned as a float is; -1 = they have to be converted. */
int32_t mha_tensor_element(const mha_raw_tensor *tensor);

/* Converts all elements (of a type that is not OTHER) to row-major float32 at `target`
 * [n_elements]; what is too large becomes infinite, NaN stays NaN. */
void mha_tensor_convert(const mha_raw_tensor *tensor, float *target);

#endif
