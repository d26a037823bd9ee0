/* Step 3 as data: what one call of the core works on, and where its rows lie. */
#ifndef MHA_SRC_CORE_H
#define MHA_SRC_CORE_H

#include "blas.h"
#include "tiles.h"

/* Heads of a [B][L][heads][size] tensor as strides; size has stride 1. */
typedef struct mha_heads {
  const float *data;
  int64_t batch_stride, row_stride, head_stride;
} mha_heads;

/* Offsets of a worker's arrays within its scratch, see attention.c. */
typedef struct mha_scratch_offsets {
  size_t scores, correction, poison, values, kinds;
} mha_scratch_offsets;

/* What is wanted besides the output. */
typedef struct mha_wanted {
  float *weights; /* [B][H][Lq][Lk] at `stage`, or NULL */
  mha_stage stage;
  float *average;     /* [B][Lq][Lk] after softmax, or NULL */
  float *log_sum_exp; /* [B][H][Lq], or NULL */
} mha_wanted;

/* One call of the core. The sizes and who sees whom are in `visibility`. */
typedef struct mha_core {
  mha_visibility visibility;
  mha_cut cut;
  int64_t G, d, dv;
  mha_heads q, k, v; /* [B][Lq][H][d], [B][Lk][G][d], [B][Lk][G][dv] */
  float *output;     /* [B][Lq][H][dv] */
  int64_t output_batch_stride, output_row_stride, output_head_stride;
  float scale, softcap;
  const float *sinks; /* [H] or NULL */
  mha_wanted wanted;
  float *row_max; /* [B][H][Lq], of the final scores; -inf = the query sees no key */
  float *row_sum; /* [B][H][Lq], of exp(score - max), without the sink */
  float *parts;   /* few queries: results of the parts, see parts in attention.c */
  char *scratch;  /* one part for each worker, one after the other */
  size_t scratch_bytes;
  mha_scratch_offsets scratch_at;
} mha_core;

/* Floating-point operations of the core's products, masks left aside. */
double mha_core_operations(const mha_core *core);

/* Sizes that decide how the call is cut. */
mha_cut_sizes mha_core_cut_sizes(const mha_core *core);

/* Queries [i, i + n) of heads [h, h + heads) of entry b, heads being 1 or whole groups that share a
 * key head, with the place of their scores and of their results. */
typedef struct mha_block {
  int64_t b, h, heads, i, n;
  float *scores; /* [heads·n][keys of a tile]: row k·n + r is query i + r of head h + k */
  int64_t score_stride;
  float *output; /* [heads][n][dv] by its strides; NULL if only scores are asked for */
  int64_t output_row_stride, output_head_stride;
} mha_block;

/* The heads of a block that share its key head number `group`, as a block. */
int64_t mha_block_groups(const mha_core *core, const mha_block *block);
mha_block mha_block_group(const mha_core *core, const mha_block *block, int64_t group);

/* Scores of a block for the keys of one tile, scaled only. */
mha_status mha_core_scores(const mha_core *core, const mha_block *block, mha_range keys);

/* output += P·V for one tile; P lies in place of the scores. V comes from where it lies, or from
 * `values` [keys][dv], rows values_stride apart, of the block's one group. */
mha_status mha_core_accumulate(const mha_core *core, const mha_block *block, mha_range keys,
                               const float *values, int64_t values_stride);

/* Values [keys][dv] of the key head that serves query head h, as they lie; keys of one tile. */
mha_view mha_core_values(const mha_core *core, int64_t b, int64_t h, mha_range keys);

/* Where the result of query i of head h goes; the next query is output_row_stride further. */
float *mha_core_output(const mha_core *core, int64_t b, int64_t h, int64_t i);

/* Index of (b, h, i) in row_max and row_sum. */
int64_t mha_core_row_index(const mha_core *core, int64_t b, int64_t h, int64_t i);

/* Denominator of a row's softmax: sum, and the sink's share relative to the row's max. */
float mha_core_denominator(const mha_core *core, int64_t h, float max, float sum);

#endif
