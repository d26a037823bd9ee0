/* Owns the inputs from which it can be read off who was seen: equal scores and one-hot values. */
#include "seen.h"

#include <string.h>

enum { MAX_KEYS = 16 };

void seen_expect_sets(mha_rules rules, int64_t B, int64_t Lq, int64_t Lk, const char *const *sets) {
  static const float zeros[MAX_KEYS * MAX_KEYS];
  static float v[4 * MAX_KEYS * MAX_KEYS], output[4 * MAX_KEYS * MAX_KEYS];
  for (int64_t b = 0; b < B; b++)
    for (int64_t j = 0; j < Lk; j++)
      for (int64_t c = 0; c < Lk; c++)
        v[(b * Lk + j) * Lk + c] = j == c ? 1.0F : 0.0F;
  test_core core = {.B = B,
                    .Lq = Lq,
                    .Lk = Lk,
                    .dv = Lk,
                    .q = zeros,
                    .k = zeros,
                    .v = v,
                    .output = output,
                    .rules = rules};
  test_core_run(&core);
  for (int64_t row = 0; row < B * Lq; row++) {
    const double share = 1.0 / (double)strlen(sets[row]);
    for (int64_t j = 0; j < Lk; j++) {
      const bool seen = strchr(sets[row], (int)('0' + j)) != NULL;
      /* 1/n is exact in the mathematics; three roundings of float32 in the softmax */
      test_near(sets[row], (double)output[row * Lk + j], seen ? share : 0.0,
                seen ? 4 * 0x1p-24 : 0.0);
    }
  }
}

mha_rules seen_rules(int causal, mha_alignment alignment, int64_t offset) {
  mha_rules rules;
  MHA_INIT(&rules);
  rules.causal = causal;
  rules.alignment = (int32_t)alignment;
  rules.offset = offset;
  return rules;
}

void seen_expect_weights(test_core *core, int64_t n, const double *expected) {
  float weights[16];
  test_fill_poison(weights, 16);
  core->results.weights = weights;
  test_core_run(core);
  for (int64_t at = 0; at < n; at++)
    test_near("weight", (double)weights[at], expected[at], expected[at] == 0.0 ? 0.0 : 1e-6);
}
