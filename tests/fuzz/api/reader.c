/* Owns the choices that a fuzzer's bytes stand for. */
#include "reader.h"

#include <float.h>
#include <math.h>

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof *(array)))

bool fuzz_read_is_over(const fuzz_reader *reader) {
  return reader->at >= reader->size;
}

static uint8_t next_byte(fuzz_reader *reader) {
  return fuzz_read_is_over(reader) ? 0 : reader->data[reader->at++];
}

/* From 0 to n - 1. */
static int64_t choose(fuzz_reader *reader, int64_t n) {
  const uint8_t byte = next_byte(reader);
  reader->left = byte / n;
  return byte % n;
}

int64_t fuzz_read(fuzz_reader *reader, int64_t low, int64_t high) {
  return high > low ? low + choose(reader, high - low + 1) : low;
}

bool fuzz_read_one_in(fuzz_reader *reader, int n) {
  return choose(reader, n) == n - 1;
}

int64_t fuzz_read_left(const fuzz_reader *reader) {
  return reader->left;
}

int64_t fuzz_read_any(fuzz_reader *reader) {
  static const int64_t borders[] = {INT64_MAX,
                                    INT64_MIN,
                                    INT64_MAX - 1,
                                    INT64_MIN + 1,
                                    INT64_MAX / 2,
                                    INT64_MIN / 2,
                                    INT32_MAX,
                                    INT32_MIN,
                                    -1,
                                    1,
                                    UINT32_MAX,
                                    INT64_C(1) << 40,
                                    -(INT64_C(1) << 32),
                                    INT64_MAX / 4,
                                    INT64_MAX / 8,
                                    7};
  const int64_t kind = fuzz_read(reader, 0, 2);
  if (kind == 0)
    return fuzz_read(reader, -8, 24);
  if (kind == 1)
    return borders[fuzz_read(reader, 0, COUNT(borders) - 1)];
  uint64_t bits = 0;
  for (int k = 0; k < 8; k++)
    bits = bits << 8 | next_byte(reader);
  return (int64_t)bits;
}

int64_t fuzz_read_no_size(fuzz_reader *reader) {
  static const int64_t sizes[] = {-1,
                                  INT64_MIN,
                                  INT64_MAX,
                                  INT64_C(1) << 62,
                                  INT64_MAX / 2,
                                  -7,
                                  INT64_MAX - 1,
                                  (INT64_C(1) << 61) + 1,
                                  INT64_MIN + 1,
                                  -(INT64_C(1) << 32)};
  return sizes[fuzz_read(reader, 0, COUNT(sizes) - 1)];
}

int32_t fuzz_read_no_enumerator(fuzz_reader *reader, int32_t low, int32_t high) {
  const int32_t values[] = {low - 1, high + 1, INT32_MIN, INT32_MAX, high + 256};
  return values[fuzz_read(reader, 0, COUNT(values) - 1)];
}

float fuzz_read_finite(fuzz_reader *reader) {
  static const float numbers[] = {1.0f,   0.0f,         -0.0f, -1.0f,    0.25f,
                                  1e-40f, FLT_TRUE_MIN, 1e30f, -FLT_MAX, FLT_MIN};
  return numbers[fuzz_read(reader, 0, COUNT(numbers) - 1)];
}

float fuzz_read_not_finite(fuzz_reader *reader) {
  const float numbers[] = {NAN, INFINITY, -INFINITY};
  return numbers[fuzz_read(reader, 0, COUNT(numbers) - 1)];
}

/* ---- arrays ---- */

/* In [-1, 1). */
static float next_ordinary(uint32_t *state) {
  *state = *state * 1664525U + 1013904223U;
  return (float)(int32_t)*state / 2147483648.0f;
}

static void fill(float *numbers, int64_t n, uint32_t seed, const float *special,
                 int64_t n_special) {
  uint32_t state = seed * 2654435761U + 12345U;
  for (int64_t k = 0; k < n; k++) {
    numbers[k] = next_ordinary(&state);
    if (n_special > 0 && (state >> 8) % 5 == 0)
      numbers[k] = special[(state >> 16) % (uint32_t)n_special];
  }
}

void fuzz_read_floats(fuzz_reader *reader, float *numbers, int64_t n) {
  const float special[] = {NAN, INFINITY, -INFINITY, 1e30f, -1e30f, 1e-40f, 0.0f, -1000.0f};
  const uint8_t choice = next_byte(reader);
  fill(numbers, n, choice, special, choice % 4 == 3 ? COUNT(special) : 0);
}

void fuzz_read_finites(fuzz_reader *reader, float *numbers, int64_t n) {
  const float special[] = {1e30f, -FLT_MAX, 1e-40f, 0.0f};
  const uint8_t choice = next_byte(reader);
  fill(numbers, n, choice, special, choice % 4 == 3 ? COUNT(special) : 0);
}
