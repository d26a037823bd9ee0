/* Step 3, the core: O_h = softmax(visible(scores))·V_g for every batch entry and head. */
#ifndef MHA_SRC_ATTENTION_ATTENTION_H
#define MHA_SRC_ATTENTION_ATTENTION_H

#include "base/memory.h"
#include "laid.h"
#include "runtime/parallel.h"

/* Where the scratch of a call lies in an arena. */
typedef struct mha_attention_scratch {
  size_t row_max, row_sum, parts, keys, workers, worker_bytes;
} mha_attention_scratch;

/* Lays the scratch out for at most n_threads. Only of keys that are laid out G and d count. */
mha_attention_scratch mha_attention_plan(const mha_cut_sizes *sizes, int32_t n_threads,
                                         mha_layout *layout);

/* Cuts the call, whose sizes are those that were laid out, and gives it its places in the arena,
 * and its kernels where keys are laid out. */
void mha_attention_use(mha_core *core, char *arena, const mha_attention_scratch *at,
                       const mha_kernels *kernels, const mha_laid_strides *strides);

/* Lends a block the room that a worker's scratch has for its scores and for a tile of keys. */
void mha_attention_lend(const mha_core *core, int32_t worker, mha_block *block);

/* Computes output, row_max and row_sum. Rows that see no key get output 0. */
mha_status mha_attention_run(const mha_core *core, const mha_threads *threads);

#endif
