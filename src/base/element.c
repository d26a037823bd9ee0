/* Owns the facts about element types: what they are called, how many numbers make a block, how many
 * bytes a block has. */
#include "element.h"

#include "arithmetic.h"

enum { BLOCK_SHIFT = 5 };
_Static_assert(MHA_BLOCK == 1 << BLOCK_SHIFT, "numbers become blocks by a shift");

/* A block has 1 << shift numbers, in `bytes` bytes. */
static const struct {
  const char *name;
  int shift;
  int64_t bytes;
} facts[] = {[MHA_F32] = {"F32", 0, sizeof(float)},
             [MHA_F16] = {"F16", 0, 2},
             [MHA_BF16] = {"BF16", 0, 2},
             [MHA_Q8_0] = {"Q8_0", BLOCK_SHIFT, MHA_BLOCK_SCALE_BYTES + MHA_BLOCK},
             [MHA_Q4_0] = {"Q4_0", BLOCK_SHIFT, MHA_BLOCK_SCALE_BYTES + MHA_BLOCK / 2}};

bool mha_element_is_known(int32_t element) {
  return element >= 0 && (size_t)element < sizeof facts / sizeof *facts;
}

int64_t mha_element_block(int32_t element) {
  return INT64_C(1) << facts[element].shift;
}

bool mha_element_extent(int32_t element, int64_t n, int64_t *bytes) {
  return mha_multiply(n >> facts[element].shift, facts[element].bytes, bytes);
}

const void *mha_element_at(const void *data, int32_t element, int64_t index) {
  return (const char *)data + (index >> facts[element].shift) * facts[element].bytes;
}

const char *mha_element_name(int32_t element) {
  return mha_element_is_known(element) ? facts[element].name : "unknown type";
}

size_t mha_element_bytes(int32_t element, int64_t n) {
  int64_t bytes = 0;
  if (!mha_element_is_known(element) || n < 0 || n % mha_element_block(element) != 0 ||
      !mha_element_extent(element, n, &bytes) || (uint64_t)bytes > SIZE_MAX)
    return 0;
  return (size_t)bytes;
}
