/* Owns memory: the only file that calls the C library's allocator, and the layout of arenas. */
#include "memory.h"

#include <stdlib.h>

static size_t round_up(size_t bytes) {
  return (bytes + MHA_ALIGNMENT - 1) / MHA_ALIGNMENT * MHA_ALIGNMENT;
}

static void *library_allocate(void *user, size_t bytes, size_t alignment) {
  (void)user;
  /* aligned_alloc wants a size that is a multiple of the alignment */
  return bytes > SIZE_MAX - alignment ? NULL : aligned_alloc(alignment, round_up(bytes));
}

static void library_release(void *user, void *memory, size_t bytes) {
  (void)user;
  (void)bytes;
  free(memory);
}

mha_allocator mha_memory_allocator(const mha_allocator *allocator) {
  const mha_allocator library = {NULL, library_allocate, library_release};
  return allocator && allocator->allocate && allocator->release ? *allocator : library;
}

void *mha_memory_allocate(const mha_allocator *allocator, size_t bytes) {
  return allocator->allocate(allocator->user, bytes, MHA_ALIGNMENT);
}

void mha_memory_release(const mha_allocator *allocator, void *memory, size_t bytes) {
  if (memory)
    allocator->release(allocator->user, memory, bytes);
}

/* Into the second-level cache: the first is too small for what is asked for at a time. To stay a
 * file away from its callers: compilers that see through it take it for a function without effect.
 */
void mha_memory_fetch(const void *data, int64_t rows, size_t stride_bytes, size_t row_bytes) {
#ifdef __GNUC__
  const char *row = data;
  for (int64_t r = 0; r < rows; r++, row += stride_bytes)
    for (size_t c = 0; c < row_bytes; c += MHA_ALIGNMENT)
      __builtin_prefetch(row + c, 0, 1);
#else
  (void)data, (void)rows, (void)stride_bytes, (void)row_bytes;
#endif
}

size_t mha_layout_add(mha_layout *layout, size_t element_bytes, int64_t n1, int64_t n2,
                      int64_t n3) {
  const size_t offset = layout->bytes;
  int64_t bytes = 0;
  const int64_t limit = (int64_t)(PTRDIFF_MAX - MHA_ALIGNMENT);
  if (layout->overflow || !mha_multiply(n1, n2, &bytes) || !mha_multiply(bytes, n3, &bytes) ||
      !mha_multiply(bytes, (int64_t)element_bytes, &bytes) ||
      !mha_add(bytes, (int64_t)offset, &bytes) || bytes > limit) {
    layout->overflow = true;
    return 0;
  }
  layout->bytes = round_up((size_t)bytes);
  return offset;
}
