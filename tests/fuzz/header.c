/* Owns the length of a mutated header. */
#include "header.h"

#include "fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTH_BYTES = 8 };

uint8_t *fuzz_end_header(const uint8_t *data, size_t size) {
  size_t end = size;
  while (end > LENGTH_BYTES && data[end - 1] != '}')
    end--;
  if (end <= LENGTH_BYTES)
    return NULL;
  uint8_t *copy = malloc(size);
  FUZZ_CHECK(copy);
  memcpy(copy, data, size);
  for (int i = 0; i < LENGTH_BYTES; i++)
    copy[i] = (uint8_t)((uint64_t)(end - LENGTH_BYTES) >> 8 * i);
  if (memcmp(copy, data, LENGTH_BYTES) != 0)
    return copy;
  free(copy);
  return NULL;
}
