/* A fuzzer's bytes as choices: bounded numbers, which run out as the lowest. */
#ifndef MHA_TESTS_FUZZ_READER_H
#define MHA_TESTS_FUZZ_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fuzz_reader {
  const uint8_t *data;
  size_t size, at;
  int64_t left; /* see fuzz_read_left */
} fuzz_reader;

bool fuzz_read_is_over(const fuzz_reader *reader);

/* A number from low to high, both included, at most 256 of them. */
int64_t fuzz_read(fuzz_reader *reader, int64_t low, int64_t high);

/* What the last choice among n left of its byte, divided by n: another choice, from 0 up, that
 * costs no byte and so changes no meaning of those behind it. 0 when the bytes have run out. */
int64_t fuzz_read_left(const fuzz_reader *reader);

/* One of n times; never when the bytes have run out. */
bool fuzz_read_one_in(fuzz_reader *reader, int n);

/* Any number at all: a small one, one at a border of the type, or eight bytes. */
int64_t fuzz_read_any(fuzz_reader *reader);

/* A size that nothing can have: negative, or so large that a product with 4 bytes overflows. */
int64_t fuzz_read_no_size(fuzz_reader *reader);

/* A value that an enumeration from low to high does not have. */
int32_t fuzz_read_no_enumerator(fuzz_reader *reader, int32_t low, int32_t high);

/* A usual number, 0, a tiny, a huge or a negative one; finite. */
float fuzz_read_finite(fuzz_reader *reader);

/* NaN or an infinity. */
float fuzz_read_not_finite(fuzz_reader *reader);

/* n numbers made from one byte: ordinary ones, or with huge, tiny, infinite ones or NaN among them.
 */
void fuzz_read_floats(fuzz_reader *reader, float *numbers, int64_t n);

/* The same, all finite. */
void fuzz_read_finites(fuzz_reader *reader, float *numbers, int64_t n);

#endif
