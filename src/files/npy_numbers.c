/* Owns the way of a .npy file's numbers into memory: what may become what, byte orders, the
 * transposition of column-major arrays. */
#include "npy.h"

#include "base/error.h"
#include "path.h"

#include <string.h>

size_t mha_npy_kind_bytes(mha_npy_kind kind) {
  return kind == MHA_NPY_FLOATS  ? sizeof(float)
         : kind == MHA_NPY_BYTES ? sizeof(uint8_t)
                                 : sizeof(int64_t);
}

static bool may_become(mha_npy_type type, mha_npy_kind kind) {
  switch (type) {
  case MHA_NPY_F2:
  case MHA_NPY_F4:
  case MHA_NPY_F8:
    return kind == MHA_NPY_FLOATS;
  case MHA_NPY_I4:
  case MHA_NPY_I8:
    return kind == MHA_NPY_INTEGERS;
  case MHA_NPY_U1:
  case MHA_NPY_B1:
    return kind != MHA_NPY_FLOATS;
  }
  return false;
}

mha_status mha_npy_check_kind(const char *name, const mha_npy_header *header, mha_npy_kind kind,
                              mha_error *error) {
  static const char *const rules[] = {
      [MHA_NPY_FLOATS] = "float16, float32 or float64",
      [MHA_NPY_BYTES] = "bool or uint8",
      [MHA_NPY_INTEGERS] = "bool, uint8, int32 or int64",
  };
  if (may_become(header->type, kind))
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_UNSUPPORTED, "%s holds the type \"%s\"; rule: %s is needed here",
                  mha_shown_path(name), mha_npy_type_text(header->type), rules[kind]);
}

/* The bits of one number, whatever the byte order of file and machine. */
static uint64_t load_bits(const unsigned char *source, size_t n, bool big_endian) {
  uint64_t bits = 0;
  for (size_t i = 0; i < n; i++)
    bits = bits << 8 | source[big_endian ? i : n - 1 - i];
  return bits;
}

static float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* 1 sign, 5 exponent, 10 mantissa bits; the exponent's bias grows from 15 to 127. */
static float half_value(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000U) << 16;
  const uint32_t exponent = bits >> 10 & 0x1FU;
  const uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0) {
    const float magnitude = (float)mantissa * 0x1p-24F;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return float_of_bits(sign | wide << 23 | mantissa << 13);
}

static float float_value(mha_npy_type type, uint64_t bits) {
  double wide;
  if (type == MHA_NPY_F2)
    return half_value((uint32_t)bits);
  if (type == MHA_NPY_F4)
    return float_of_bits((uint32_t)bits);
  memcpy(&wide, &bits, sizeof wide);
  return (float)wide;
}

static int64_t integer_value(mha_npy_type type, uint64_t bits) {
  int64_t value;
  if (type == MHA_NPY_I4 && (bits & UINT64_C(0x80000000)))
    bits |= UINT64_C(0xFFFFFFFF00000000);
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Where element `index` of the file lies in a row-major array; in a column-major file the first
 * dimension runs fastest. */
static int64_t row_major_place(const mha_npy_header *header, int64_t index) {
  int64_t place = 0;
  int64_t stride = header->n_elements;
  if (!header->column_major)
    return index;
  for (int axis = 0; axis < header->rank; axis++) {
    const int64_t extent = header->shape[axis];
    stride /= extent;
    place += index % extent * stride;
    index /= extent;
  }
  return place;
}

bool mha_machine_is_big_endian(void) {
  const uint16_t one = 1;
  unsigned char first;
  memcpy(&first, &one, 1);
  return first == 0;
}

void mha_npy_convert(const mha_npy_header *header, int64_t first, int64_t n, const void *source,
                     mha_npy_kind kind, void *target) {
  const unsigned char *bytes = source;
  const size_t item = mha_npy_item_bytes(header);
  if (header->type == MHA_NPY_F4 && !header->column_major && n > 0 &&
      header->big_endian == mha_machine_is_big_endian()) {
    memcpy((float *)target + first, source, (size_t)n * item);
    return;
  }
  for (int64_t i = 0; i < n; i++) {
    const uint64_t bits = load_bits(bytes + (size_t)i * item, item, header->big_endian);
    const int64_t place = row_major_place(header, first + i);
    if (kind == MHA_NPY_FLOATS)
      ((float *)target)[place] = float_value(header->type, bits);
    else if (kind == MHA_NPY_BYTES)
      ((uint8_t *)target)[place] = (uint8_t)bits;
    else
      ((int64_t *)target)[place] = integer_value(header->type, bits);
  }
}
