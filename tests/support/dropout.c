/* Owns the judge's random numbers: a block at a time, a round as the paper draws it. */
#include "dropout.h"

#include <math.h>

static void multiply(uint32_t a, uint32_t b, uint32_t *high, uint32_t *low) {
  const uint64_t product = (uint64_t)a * b;
  *high = (uint32_t)(product >> 32);
  *low = (uint32_t)(product & 0xffffffffU);
}

void test_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]) {
  uint32_t left_key = key[0], right_key = key[1];
  for (int w = 0; w < 4; w++)
    words[w] = counter[w];
  for (int round = 1; round <= 10; round++) {
    uint32_t high0 = 0, low0 = 0, high1 = 0, low1 = 0;
    multiply(0xD2511F53U, words[0], &high0, &low0);
    multiply(0xCD9E8D57U, words[2], &high1, &low1);
    const uint32_t next[4] = {high1 ^ words[1] ^ left_key, low1, high0 ^ words[3] ^ right_key,
                              low0};
    for (int w = 0; w < 4; w++)
      words[w] = next[w];
    left_key += 0x9E3779B9U;
    right_key += 0xBB67AE85U;
  }
}

double test_dropout(double p, uint64_t seed, uint64_t call, uint64_t e) {
  const uint64_t block = e / 4;
  const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  const uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)call,
                               (uint32_t)(call >> 32)};
  uint32_t words[4];
  test_philox(counter, key, words);
  return (double)words[e % 4] >= p * ldexp(1, 32) ? 1 / (1 - p) : 0;
}
