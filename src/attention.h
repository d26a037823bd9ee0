/* Step 3, the core: O_h = softmax(visible(scores))·V_g for every batch entry and head. */
#ifndef MHA_SRC_ATTENTION_H
#define MHA_SRC_ATTENTION_H

#include "core.h"
#include "memory.h"
#include "parallel.h"

/* Scratch of one worker. */
size_t mha_attention_scratch_bytes(const mha_cut_sizes *sizes, mha_layout *layout);

/* Takes over the scratch of all workers, scratch_bytes for each, one after the other. */
void mha_attention_use_scratch(mha_core *core, char *scratch, size_t scratch_bytes);

/* Where a worker's scratch has room for the scores of a task, rows *stride apart. */
float *mha_attention_scores(const mha_core *core, int32_t worker, int64_t *stride);

/* At least the number of tasks, which is the most workers that can have something to do; and the
 * numbers that the parts of the keys leave behind. False if they overflow. G and d do not count. */
bool mha_attention_task_limit(const mha_cut_sizes *sizes, int64_t *tasks);
bool mha_attention_parts_floats(const mha_cut_sizes *sizes, int64_t *floats);

/* Computes output, row_max and row_sum. Rows that see no key get output 0. */
mha_status mha_attention_run(const mha_core *core, const mha_threads *threads);

#endif
