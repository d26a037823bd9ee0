/* Owns the bytes of GGUF files that tests make up. */
#include "gguf_image.h"

#include <string.h>

static void put(gguf_image *f, uint64_t number, int n_bytes) {
  assert_true(f->n + (size_t)n_bytes <= sizeof f->bytes);
  for (int i = 0; i < n_bytes; i++)
    f->bytes[f->n++] = (unsigned char)(number >> 8 * i & 0xFF);
}

void gguf_u8(gguf_image *f, unsigned number) {
  put(f, number, 1);
}

void gguf_u32(gguf_image *f, uint32_t number) {
  put(f, number, 4);
}

void gguf_u64(gguf_image *f, uint64_t number) {
  put(f, number, 8);
}

void gguf_f32(gguf_image *f, float number) {
  uint32_t bits = 0;
  memcpy(&bits, &number, sizeof bits);
  put(f, bits, 4);
}

void gguf_f64(gguf_image *f, double number) {
  uint64_t bits = 0;
  memcpy(&bits, &number, sizeof bits);
  put(f, bits, 8);
}

void gguf_text(gguf_image *f, const char *text) {
  put(f, strlen(text), 8);
  for (const char *c = text; *c; c++)
    put(f, (unsigned char)*c, 1);
}

void gguf_begin_version(gguf_image *f, uint32_t version, uint64_t n_tensors, uint64_t n_pairs) {
  f->n = 0;
  put(f, 0x46554747, 4); /* "GGUF" */
  put(f, version, 4);
  put(f, n_tensors, 8);
  put(f, n_pairs, 8);
}

void gguf_begin(gguf_image *f, uint64_t n_tensors, uint64_t n_pairs) {
  gguf_begin_version(f, 3, n_tensors, n_pairs);
}

void gguf_key(gguf_image *f, const char *key, uint32_t type) {
  gguf_text(f, key);
  put(f, type, 4);
}

void gguf_pair_u32(gguf_image *f, const char *key, uint32_t value) {
  gguf_key(f, key, GGUF_UINT32);
  put(f, value, 4);
}

void gguf_pair_f32(gguf_image *f, const char *key, float value) {
  gguf_key(f, key, GGUF_FLOAT32);
  gguf_f32(f, value);
}

void gguf_pair_text(gguf_image *f, const char *key, const char *value) {
  gguf_key(f, key, GGUF_STRING);
  gguf_text(f, value);
}

void gguf_tensor(gguf_image *f, const char *name, uint32_t rank, uint64_t n0, uint64_t n1,
                 uint32_t type, uint64_t offset) {
  gguf_text(f, name);
  put(f, rank, 4);
  if (rank > 0)
    put(f, n0, 8);
  if (rank > 1)
    put(f, n1, 8);
  put(f, type, 4);
  put(f, offset, 8);
}

void gguf_data(gguf_image *f, size_t alignment, size_t n) {
  while (f->n % alignment != 0)
    put(f, 0, 1);
  for (size_t i = 0; i < n; i++)
    put(f, (i + 1) & 0xFF, 1);
}
