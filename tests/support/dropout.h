/* Dropout as the contract says it, one weight at a time; shares nothing with the library. */
#ifndef MHA_TESTS_DROPOUT_H
#define MHA_TESTS_DROPOUT_H

#include <stdint.h>

/* Philox4x32-10: `counter` and `key`, low words first, to four random words. */
void test_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]);

/* What weight number e is multiplied by: 0 or 1/(1 - p). */
double test_dropout(double p, uint64_t seed, uint64_t call, uint64_t e);

#endif
