/* The scores of a call again, after its core has run: for those who want to see them, not only what
 * they led to. */
#ifndef MHA_SRC_ATTENTION_RECOMPUTE_H
#define MHA_SRC_ATTENTION_RECOMPUTE_H

#include "block.h"

/* What a hidden key shows at a stage. */
float mha_recompute_hidden(mha_stage stage);

/* Whether hidden keys show their scores at a stage: before the rules are applied they have some. */
bool mha_recompute_shows_all(mha_stage stage);

/* The keys for which query i of entry b shows a number at a stage, not the value of a hidden key.
 */
mha_range mha_recompute_shown(const mha_core *core, mha_stage stage, int64_t b, int64_t i);

/* Makes the scores of a block for one tile of keys again and brings them to a stage, in place. The
 * tiles are to be walked as the core walked them, so that the scores have the bits whose maximum
 * the core kept: one above it would make exp overflow. */
mha_status mha_recompute_tile(const mha_core *core, const mha_block *block, mha_range keys,
                              mha_stage stage);

#endif
