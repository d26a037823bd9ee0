/* Parts of the keys: few queries over many keys leave a result for each part, which are merged. */
#ifndef MHA_SRC_ATTENTION_PARTS_H
#define MHA_SRC_ATTENTION_PARTS_H

#include "rows.h"
#include "runtime/parallel.h"

/* The numbers that the parts of a call leave behind; false if they overflow. */
bool mha_parts_floats(const mha_cut_sizes *sizes, int64_t *floats);

/* Whether tasks leave parts: a single part is the whole, whose task finishes its rows itself. */
bool mha_parts_are_left(const mha_core *core);

/* The tasks of few queries, one for each strip of heads and part of an entry's keys; the block of
 * one of them, and its part. */
int64_t mha_parts_count(const mha_core *core);
int64_t mha_parts_locate(const mha_core *core, int64_t index, mha_block *block);

/* Where the rows of a part keep m, l, poison and O. */
void mha_parts_place(mha_rows *rows, int64_t part);

/* Merges all parts into the core's output, row_max and row_sum. */
mha_status mha_parts_merge(mha_core *core, const mha_threads *threads);

#endif
