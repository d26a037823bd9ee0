/* A safetensors file whose header was mutated: its length is made right again. */
#ifndef MHA_TESTS_FUZZ_HEADER_H
#define MHA_TESTS_FUZZ_HEADER_H

#include <stddef.h>
#include <stdint.h>

/* A copy of the bytes with a length that ends the header at their last '}': a mutation of the text
 * is not lost because its length has changed. free() it; NULL if there is no header to end, or if
 * the length is right. */
uint8_t *fuzz_end_header(const uint8_t *data, size_t size);

#endif
