/* Owns which weights are dropped: the index of a weight in [B][H][Lq][Lk] is that of its random
 * word, so neither tiles nor threads have a part in it. */
#include "dropout.h"

#include "engine/philox.h"

/* ((b·H + h)·Lq + i)·Lk + j modulo 2^64. */
static uint64_t word_index(const mha_visibility *v, int64_t b, int64_t h, int64_t i, int64_t j) {
  const uint64_t row = ((uint64_t)b * (uint64_t)v->H + (uint64_t)h) * (uint64_t)v->Lq + (uint64_t)i;
  return row * (uint64_t)v->Lk + (uint64_t)j;
}

void mha_dropout_factors(const mha_core *core, int64_t b, int64_t h, int64_t i, mha_range keys,
                         float *factors) {
  const mha_dropout *dropout = &core->dropout;
  const mha_philox philox = {dropout->seed, dropout->call};
  mha_philox_factors(&philox, word_index(&core->visibility, b, h, i, keys.begin),
                     keys.end - keys.begin, dropout->threshold, dropout->factor, factors);
}
