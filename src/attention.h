/* Step 3, the core: O_h = softmax(visible(scores))·V_g for every batch entry and head. */
#ifndef MHA_SRC_ATTENTION_H
#define MHA_SRC_ATTENTION_H

#include "memory.h"
#include "parallel.h"
#include "visibility.h"

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

/* Heads of a [B][L][heads][size] tensor as strides; size has stride 1. */
typedef struct mha_heads {
  const float *data;
  int64_t batch_stride, row_stride, head_stride;
} mha_heads;

/* One call of the core. The sizes and who sees whom are in `visibility`. */
typedef struct mha_core {
  mha_visibility visibility;
  int64_t G, d, dv;
  mha_heads q, k, v; /* [B][Lq][H][d], [B][Lk][G][d], [B][Lk][G][dv] */
  float *output;     /* [B][Lq][H][dv] */
  int64_t output_batch_stride, output_row_stride, output_head_stride;
  float scale, softcap;
  const float *sinks; /* [H] or NULL */
  float *row_max;     /* [B][H][Lq], of the final scores; -inf = the query sees no key */
  float *row_sum;     /* [B][H][Lq], of exp(score - max), without the sink */
  char *scratch;      /* mha_core_scratch_bytes for each worker, one after the other */
  size_t scratch_bytes;
} mha_core;

/* Takes scale, softcap and sinks over from `rules`; the layer's scale and softcap hold where the
 * call does not override them. */
mha_status mha_core_rules(mha_core *core, const mha_attention *rules, float scale, float softcap,
                          mha_error *error);

/* Scratch of one worker; and the number of tasks, which is also the most workers that can have
 * something to do: false if it overflows. */
size_t mha_core_scratch_bytes(int64_t Lq, int64_t Lk, int64_t dv, mha_layout *layout);
bool mha_core_task_count(int64_t B, int64_t H, int64_t Lq, bool packed, int64_t *tasks);

/* Computes output, row_max and row_sum. Rows that see no key get output 0. */
mha_status mha_core_run(const mha_core *core, const mha_threads *threads);

/* Scores of queries [i, i + n) of head h and keys [keys.begin, keys.end), scaled only, into
 * scores [n][keys], rows `stride` apart. */
mha_status mha_core_scores(const mha_core *core, int64_t b, int64_t h, int64_t i, int64_t n,
                           mha_range keys, float *scores, int64_t stride);

/* Index of (b, h, i) in row_max and row_sum. */
int64_t mha_core_row_index(const mha_core *core, int64_t b, int64_t h, int64_t i);

/* Denominator of a row's softmax: sum, and the sink's share relative to the row's max. */
float mha_core_denominator(const mha_core *core, int64_t h, float max, float sum);

#endif
