/* A block of queries: the two products of step 3 for one tile of keys. */
#ifndef MHA_SRC_ATTENTION_BLOCK_H
#define MHA_SRC_ATTENTION_BLOCK_H

#include "core.h"

/* Queries [i, i + n) of heads [h, h + heads) of entry b, heads being 1 or whole groups that share a
 * key head, with the place of their scores and of their results. */
typedef struct mha_block {
  int64_t b, h, heads, i, n;
  float *scores; /* [heads·n][keys of a tile]: row k·n + r is query i + r of head h + k */
  int64_t score_stride;
  float *fetched; /* room for a tile of keys or values that are not float32 in one piece */
  float *output;  /* [heads][n][dv] by its strides; NULL if only scores are asked for */
  int64_t output_row_stride, output_head_stride;
} mha_block;

/* The block's queries `rows`, as a block, whose scores are those of the keys of one tile. */
mha_block mha_block_tile(const mha_core *core, const mha_block *block, mha_range rows,
                         mha_range keys);

/* The heads of a block that share its key head number `group`, as a block. */
int64_t mha_block_groups(const mha_core *core, const mha_block *block);
mha_block mha_block_group(const mha_core *core, const mha_block *block, int64_t group);

/* Scores of a block for the keys of one tile, of which only the scale may be missing, see
 * mha_core_score_factor. */
mha_status mha_block_scores(const mha_core *core, const mha_block *block, mha_range keys);

/* output += P·V for one tile; P lies in place of the scores. V comes from where it lies, or from
 * a copy of the tile's rows [keys][dv] for the block's one group. */
mha_status mha_block_accumulate(const mha_core *core, const mha_block *block, mha_range keys,
                                const mha_stored *copy);

#endif
