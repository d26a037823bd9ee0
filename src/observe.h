/* What can be asked for besides the output: attention weights, their average, log-sum-exp. */
#ifndef MHA_SRC_OBSERVE_H
#define MHA_SRC_OBSERVE_H

#include "arguments.h"
#include "attention.h"
#include "parallel.h"

typedef struct mha_results {
  float *weights; /* [B][H][Lq][Lk] at `stage`, or NULL */
  mha_stage stage;
  float *average;     /* [B][Lq][Lk] after softmax, or NULL */
  float *log_sum_exp; /* [B][H][Lq], or NULL */
} mha_results;

/* Takes over what `rules` asks for and adds it to the outputs of the call. */
mha_status mha_results_init(mha_results *results, const mha_attention *rules,
                            const mha_visibility *visibility, mha_address_ranges *ranges,
                            mha_error *error);

/* Fills the results in from the finished core and its row statistics. The scores are computed
 * again: the core that made the output does not know whether somebody looks. Scratch is the
 * core's. */
mha_status mha_observe(const mha_core *core, const mha_results *results,
                       const mha_threads *threads);

#endif
