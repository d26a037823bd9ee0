/* What can be asked for besides the output: attention weights, their average, log-sum-exp. */
#ifndef MHA_SRC_ATTENTION_OBSERVE_H
#define MHA_SRC_ATTENTION_OBSERVE_H

#include "core.h"
#include "runtime/parallel.h"

/* Fills in what is wanted, from the finished core and its row statistics. The scores are computed
 * again: the core that made the output does not know whether somebody looks. Scratch is the
 * core's. */
mha_status mha_observe(const mha_core *core, const mha_threads *threads);

#endif
