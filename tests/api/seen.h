/* Who is seen, read off the core's answers to a few numbers. */
#ifndef MHA_TESTS_SEEN_H
#define MHA_TESTS_SEEN_H

#include "fixture.h"

mha_rules seen_rules(int causal, mha_alignment alignment, int64_t offset);

/* All scores are equal and value j is one-hot, so row i of the output is 1/n at the n keys that
 * query i sees. sets[b·Lq + i] lists them as digits. At most 4 entries of 16 keys. */
void seen_expect_sets(mha_rules rules, int64_t B, int64_t Lq, int64_t Lk, const char *const *sets);

/* Runs the core, of one query, for its weights. */
void seen_expect_weights(test_core *core, int64_t n, const double *expected);

#endif
