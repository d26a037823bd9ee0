/* The element types as facts: names, blocks, bytes. */
#ifndef MHA_SRC_BASE_ELEMENT_H
#define MHA_SRC_BASE_ELEMENT_H

#include "mha.h"

#include <stdbool.h>

/* Numbers of a block of the types that have blocks. */
enum { MHA_BLOCK = 32, MHA_BLOCK_SCALE_BYTES = 2 };

bool mha_element_is_known(int32_t element);

/* Numbers that share a block: 1 or MHA_BLOCK. Those of 1 have as many bytes as mha_element_bytes
 * says of one. The element is known. */
int64_t mha_element_block(int32_t element);

/* *bytes = those of n numbers, n >= 0 and whole blocks; false if they overflow. */
bool mha_element_extent(int32_t element, int64_t n, int64_t *bytes);

/* Where number `index`, the first of a block, of an array lies. */
const void *mha_element_at(const void *data, int32_t element, int64_t index);

#endif
