/* Owns the facts about element types: what they are called, how many numbers make a block, how many
 * bytes a block has. */
#include "element.h"

#include "arithmetic.h"

static const struct {
  const char *name;
  int64_t block;
  int64_t bytes; /* of a block */
} facts[] = {[MHA_F32] = {"F32", 1, sizeof(float)},
             [MHA_F16] = {"F16", 1, 2},
             [MHA_BF16] = {"BF16", 1, 2},
             [MHA_Q8_0] = {"Q8_0", MHA_BLOCK, MHA_BLOCK_SCALE_BYTES + MHA_BLOCK},
             [MHA_Q4_0] = {"Q4_0", MHA_BLOCK, MHA_BLOCK_SCALE_BYTES + MHA_BLOCK / 2}};

bool mha_element_is_known(int32_t element) {
  return element >= 0 && (size_t)element < sizeof facts / sizeof *facts;
}

int64_t mha_element_block(int32_t element) {
  return facts[element].block;
}

bool mha_element_extent(int32_t element, int64_t n, int64_t *bytes) {
  return mha_multiply(n / facts[element].block, facts[element].bytes, bytes);
}

const void *mha_element_at(const void *data, int32_t element, int64_t index) {
  return (const char *)data + index / facts[element].block * facts[element].bytes;
}

const char *mha_element_name(int32_t element) {
  return mha_element_is_known(element) ? facts[element].name : "unknown type";
}

size_t mha_element_bytes(int32_t element, int64_t n) {
  int64_t bytes = 0;
  if (!mha_element_is_known(element) || n < 0 || n % facts[element].block != 0 ||
      !mha_element_extent(element, n, &bytes) || (uint64_t)bytes > SIZE_MAX)
    return 0;
  return (size_t)bytes;
}
