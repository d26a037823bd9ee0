/* Memory: allocation through the caller's allocator, arena layout. */
#ifndef MHA_SRC_BASE_MEMORY_H
#define MHA_SRC_BASE_MEMORY_H

#include "arithmetic.h"
#include "mha.h"

/* Every block and every array in an arena begins at a cache line. */
#define MHA_ALIGNMENT 64

/* The allocator to use: `allocator` if both callbacks are set, otherwise the C library's. */
mha_allocator mha_memory_allocator(const mha_allocator *allocator);

/* MHA_ALIGNMENT-aligned memory, uninitialised; NULL if there is none. bytes > 0. */
void *mha_memory_allocate(const mha_allocator *allocator, size_t bytes);

/* Takes back `memory` of `bytes` bytes; NULL is ignored. */
void mha_memory_release(const mha_allocator *allocator, void *memory, size_t bytes);

/* A hint that `rows` rows of row_bytes, stride_bytes apart, will be read soon. */
void mha_memory_fetch(const void *data, int64_t rows, size_t stride_bytes, size_t row_bytes);

/* The sizes of an arena's arrays, added up one after the other. Begin with {0}. */
typedef struct mha_layout {
  size_t bytes;
  bool overflow; /* sticky: once true, bytes means nothing */
} mha_layout;

/* Reserves an aligned array of n1·n2·n3 elements of `element_bytes`; returns its offset. */
size_t mha_layout_add(mha_layout *layout, size_t element_bytes, int64_t n1, int64_t n2, int64_t n3);

#endif
