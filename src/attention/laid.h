/* Step 3 by kernels: the keys of a call laid out as Kᵀ, and the two products over them. */
#ifndef MHA_SRC_ATTENTION_LAID_H
#define MHA_SRC_ATTENTION_LAID_H

#include "base/memory.h"
#include "block.h"
#include "runtime/parallel.h"

/* Distances between rows of Q and of V. */
typedef struct mha_laid_strides {
  int64_t q, v;
} mha_laid_strides;

/* The kernels that a call needs. */
enum { MHA_LAID_SHAPES = 2 + 2 * MHA_VALUE_KERNELS };

/* Their shapes; returns how many, 0 = there can be none, and the products are the engine's. */
int mha_laid_shapes(const mha_cut_sizes *sizes, const mha_laid_strides *strides,
                    mha_kernel_shape shapes[MHA_LAID_SHAPES]);

/* Room for the keys of a call whose sizes say that they are laid out; returns its offset. */
size_t mha_laid_plan(const mha_cut_sizes *sizes, mha_layout *layout);

/* Gives a call the kernels, all of which are there, and the room. */
void mha_laid_use(mha_core *core, const mha_kernels *kernels, const mha_laid_strides *strides,
                  float *keys);

/* Lays out the keys, those of each key head once. */
mha_status mha_laid_keys(const mha_core *core, const mha_threads *threads);

/* Where the score of a tile's first key lies in a row: products are made in whole blocks. */
int64_t mha_laid_column(const mha_core *core, mha_range keys);

/* As mha_block_scores, not scaled, and mha_block_accumulate, for blocks of one head; a copy is
 * dense.
 */
void mha_laid_scores(const mha_core *core, const mha_block *block, mha_range keys);
void mha_laid_accumulate(const mha_core *core, const mha_block *block, mha_range keys,
                         const mha_stored *copy);

#endif
