/* A GGUF file put together in memory, number by number, for the tests of its reader. */
#ifndef MHA_TESTS_GGUF_IMAGE_H
#define MHA_TESTS_GGUF_IMAGE_H

#include "support.h"

/* The types of values and of tensors, by their numbers in the file. */
enum {
  GGUF_UINT8,
  GGUF_INT8,
  GGUF_UINT16,
  GGUF_INT16,
  GGUF_UINT32,
  GGUF_INT32,
  GGUF_FLOAT32,
  GGUF_BOOL,
  GGUF_STRING,
  GGUF_ARRAY,
  GGUF_UINT64,
  GGUF_INT64,
  GGUF_FLOAT64
};
enum { GGUF_F32 = 0, GGUF_F16 = 1, GGUF_Q4_0 = 2, GGUF_Q8_0 = 8, GGUF_F64 = 28, GGUF_BF16 = 30 };

typedef struct gguf_image {
  unsigned char bytes[65536];
  size_t n;
} gguf_image;

/* Little-endian numbers of 1, 4 and 8 bytes, and text behind its length. */
void gguf_u8(gguf_image *f, unsigned number);
void gguf_u32(gguf_image *f, uint32_t number);
void gguf_u64(gguf_image *f, uint64_t number);
void gguf_f32(gguf_image *f, float number);
void gguf_f64(gguf_image *f, double number);
void gguf_text(gguf_image *f, const char *text);

/* Begins the image anew: magic, version and the counts. */
void gguf_begin_version(gguf_image *f, uint32_t version, uint64_t n_tensors, uint64_t n_pairs);
/* The same of version 3. */
void gguf_begin(gguf_image *f, uint64_t n_tensors, uint64_t n_pairs);
/* A key and the type of the value that is put next. */
void gguf_key(gguf_image *f, const char *key, uint32_t type);
void gguf_pair_u32(gguf_image *f, const char *key, uint32_t value);
void gguf_pair_f32(gguf_image *f, const char *key, float value);
void gguf_pair_text(gguf_image *f, const char *key, const char *value);
/* The description of a tensor of up to two dimensions, the fastest first. */
void gguf_tensor(gguf_image *f, const char *name, uint32_t rank, uint64_t n0, uint64_t n1,
                 uint32_t type, uint64_t offset);
/* Zeros up to a multiple of `alignment`, then n bytes 1, 2, 3 … */
void gguf_data(gguf_image *f, size_t alignment, size_t n);

#endif
