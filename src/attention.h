/* Step 3, the core: O_h = softmax(visible(scores))·V_g for every batch entry and head. */
#ifndef MHA_SRC_ATTENTION_H
#define MHA_SRC_ATTENTION_H

#include "core.h"
#include "memory.h"
#include "parallel.h"

/* Tile sizes: at most MHA_QUERY_TILE × MHA_KEY_TILE scores exist at a time, per thread. A larger
 * query tile amortises what the BLAS spends on packing K and V; the scores of a tile, 512 KiB,
 * should stay in a second-level cache. A build may make them tiny to bring every border of a tile
 * within reach of small tests. */
#ifndef MHA_QUERY_TILE
#define MHA_QUERY_TILE 256
#endif
#ifndef MHA_KEY_TILE
#define MHA_KEY_TILE 512
#endif
/* Keys per tile where a causal mask or a window cuts: a narrow tile wastes less of its products on
 * hidden keys, a wide one is multiplied faster. */
#ifndef MHA_EDGE_TILE
#define MHA_EDGE_TILE 64
#endif
_Static_assert(MHA_EDGE_TILE <= MHA_KEY_TILE, "the scratch of a task holds MHA_KEY_TILE keys");

/* Scratch of one worker; and the number of tasks, which is also the most workers that can have
 * something to do: false if it overflows. */
size_t mha_attention_scratch_bytes(int64_t Lq, int64_t Lk, int64_t dv, mha_layout *layout);
bool mha_attention_task_count(int64_t B, int64_t H, int64_t Lq, bool packed, int64_t *tasks);

/* Computes output, row_max and row_sum. Rows that see no key get output 0. */
mha_status mha_attention_run(const mha_core *core, const mha_threads *threads);

#endif
