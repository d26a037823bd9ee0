/* Step 3, the core: O_h = softmax(visible(scores))·V_g for every batch entry and head. */
#ifndef MHA_SRC_ATTENTION_H
#define MHA_SRC_ATTENTION_H

#include "core.h"
#include "memory.h"
#include "parallel.h"
#include "tiles.h"

/* Scratch of one worker; and the number of tasks, which is also the most workers that can have
 * something to do: false if it overflows. */
size_t mha_attention_scratch_bytes(int64_t Lq, int64_t Lk, int64_t dv, mha_layout *layout);
bool mha_attention_task_count(int64_t B, int64_t H, int64_t Lq, bool packed, int64_t *tasks);

/* Computes output, row_max and row_sum. Rows that see no key get output 0. */
mha_status mha_attention_run(const mha_core *core, const mha_threads *threads);

#endif
