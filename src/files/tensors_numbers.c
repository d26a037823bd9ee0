/* Owns the way of a tensor's numbers to float32, and when there is none to go. */
#include "base/element.h"
#include "npy.h"
#include "tensors.h"
#include "text.h"

#include <stdalign.h>
#include <string.h>

/* The mha_element of each type; -1 = none. */
static const int32_t elements[] = {
    [MHA_RAW_F32] = MHA_F32,   [MHA_RAW_F64] = -1,        [MHA_RAW_F16] = MHA_F16,
    [MHA_RAW_BF16] = MHA_BF16, [MHA_RAW_Q8_0] = MHA_Q8_0, [MHA_RAW_Q4_0] = MHA_Q4_0,
    [MHA_RAW_OTHER] = -1,
};

int32_t mha_tensor_element(const mha_raw_tensor *tensor) {
  const int32_t element = elements[tensor->element];
  const bool in_order = !tensor->column_major && tensor->big_endian == mha_machine_is_big_endian();
  const bool aligned = element != MHA_F32 || (uintptr_t)tensor->data % alignof(float) == 0;
  return in_order && aligned ? element : -1;
}

/* n numbers, whole blocks; the arguments are right, so that it cannot fail. */
static void widen(int32_t element, const void *source, float *target, int64_t n) {
  const mha_status status = mha_element_convert(element, source, MHA_F32, target, n, NULL);
  (void)status;
}

/* Types that NumPy has not, row-major and little-endian: a block, of one number or more, begins
 * with two bytes that alone have an order. */
static void convert_blocks(const mha_raw_tensor *tensor, float *target) {
  unsigned char block[64];
  const int32_t element = elements[tensor->element];
  const int64_t step = mha_element_block(element);
  const size_t block_bytes = mha_element_bytes(element, step);
  if (mha_tensor_element(tensor) == element) {
    widen(element, tensor->data, target, tensor->n_elements);
    return;
  }
  for (int64_t i = 0; i < tensor->n_elements; i += step) {
    memcpy(block, tensor->data + (size_t)(i / step) * block_bytes, block_bytes);
    const unsigned char first = block[0];
    block[0] = block[1];
    block[1] = first;
    widen(element, block, target + i, step);
  }
}

/* Every other type, as npy_numbers.c converts it. */
static void convert_numbers(const mha_raw_tensor *tensor, float *target) {
  mha_npy_header header = {.big_endian = tensor->big_endian,
                           .column_major = tensor->column_major,
                           .rank = tensor->rank,
                           .n_elements = tensor->n_elements};
  header.type = tensor->element == MHA_RAW_F16   ? MHA_NPY_F2
                : tensor->element == MHA_RAW_F32 ? MHA_NPY_F4
                                                 : MHA_NPY_F8;
  memcpy(header.shape, tensor->shape, sizeof header.shape);
  mha_npy_convert(&header, 0, tensor->n_elements, tensor->data, MHA_NPY_FLOATS, target);
}

void mha_tensor_convert(const mha_raw_tensor *tensor, float *target) {
  if (tensor->element == MHA_RAW_BF16 || tensor->element == MHA_RAW_Q8_0 ||
      tensor->element == MHA_RAW_Q4_0)
    convert_blocks(tensor, target);
  else
    convert_numbers(tensor, target);
}
