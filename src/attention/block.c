/* Owns the products of step 3. A tile of keys is multiplied in pieces, and each piece for one key
 * head after the other, so that few queries read the keys and values in the order in which they
 * lie. */
#include "block.h"

#include "base/arithmetic.h"
#include "base/memory.h"
#include "laid.h"

mha_block mha_block_tile(const mha_core *core, const mha_block *block, mha_range rows,
                         mha_range keys) {
  mha_block part = *block;
  part.scores += mha_laid_column(core, keys);
  part.i += rows.begin;
  part.n = rows.end - rows.begin;
  if (part.output)
    part.output += rows.begin * part.output_row_stride;
  return part;
}

int64_t mha_block_groups(const mha_core *core, const mha_block *block) {
  return block->heads == 1 ? 1 : block->heads / (core->visibility.H / core->G);
}

mha_block mha_block_group(const mha_core *core, const mha_block *block, int64_t group) {
  mha_block part = *block;
  part.heads = block->heads == 1 ? 1 : core->visibility.H / core->G;
  const int64_t first = group * part.heads;
  part.h += first;
  part.scores += first * part.n * part.score_stride;
  if (part.output)
    part.output += first * part.output_head_stride;
  return part;
}

/* ---- one group, one piece ---- */

/* One query of several heads is a matrix too: its rows are the heads. */
static bool is_one_product(const mha_block *block, int64_t head_stride, int64_t size) {
  return block->heads == 1 || (block->n == 1 && head_stride >= size && head_stride <= MHA_BLAS_MAX);
}

/* scale·Q·Kᵀ into the scores from `column` on. A scale of 0 must not reach the BLAS, 0·NaN being
 * NaN: it is left to mha_core_score_factor. */
static mha_status multiply_scores(const mha_core *core, const mha_block *block,
                                  const mha_stored *keys, int64_t column) {
  const mha_stored transposed = mha_stored_transposed(*keys);
  const bool one = is_one_product(block, core->q.head_stride, core->d);
  const float scale = core->scale == 0.0f ? 1.0f : core->scale;
  float *scores = block->scores + column;
  mha_status status = MHA_OK;
  for (int64_t k = 0; !status && k < (one ? 1 : block->heads); k++) {
    mha_view q = mha_core_queries(core, block->b, block->h + k, block->i, block->n);
    if (one && block->heads > 1)
      q = mha_view_rows(q.data, block->heads, core->d, core->q.head_stride);
    status = mha_numbers_multiply(core->engine, scale, q, &transposed, 0.0f,
                                  scores + k * block->n * block->score_stride, block->score_stride);
  }
  return status;
}

/* O += P·V, P from `column` on. */
static mha_status multiply_values(const mha_core *core, const mha_block *block,
                                  const mha_stored *values, int64_t column) {
  const bool one = is_one_product(block, block->output_head_stride, core->dv);
  const int64_t stride =
      one && block->heads > 1 ? block->output_head_stride : block->output_row_stride;
  const int64_t rows = one ? block->heads * block->n : block->n;
  mha_status status = MHA_OK;
  for (int64_t k = 0; !status && k < (one ? 1 : block->heads); k++) {
    const float *weights = block->scores + k * block->n * block->score_stride + column;
    const mha_view p = mha_view_rows(weights, rows, values->rows, block->score_stride);
    status = mha_numbers_multiply(core->engine, 1.0f, p, values, 1.0f,
                                  block->output + k * block->output_head_stride, stride);
  }
  return status;
}

/* ---- all groups, all pieces ---- */

/* What a tile is multiplied with: rows [keys][size] of each key head, where they lie or as a dense
 * copy of the one head that is asked for. */
typedef struct operand {
  const mha_heads *heads;
  int64_t size;
  const mha_stored *copy;
  mha_status (*multiply)(const mha_core *core, const mha_block *block, const mha_stored *rows,
                         int64_t column);
} operand;

/* The piece of a tile that begins `done` keys behind its begin. Few queries are bound by reading,
 * so a piece ends with its page; many are worth a copy of all of them. */
static mha_range piece_at(const mha_core *core, mha_range keys, int64_t done) {
  const int64_t begin = keys.begin + done;
  mha_range piece = {begin, mha_min(begin + core->cut.product_keys, keys.end)};
  if (core->cut.few && begin < keys.end && mha_core_is_scattered(core, piece))
    piece.end = begin + mha_core_run(core, begin);
  return piece;
}

/* Asks for the rows that the next products will read, the share of one of `groups`, so that they
 * arrive in the order in which they lie while this group is multiplied. Only where heads are
 * neighbours, so that the rows of all groups are one run. */
static void fetch_ahead(const mha_heads *heads, mha_stored next, int64_t group, int64_t groups) {
  const int64_t first = group * next.rows / groups;
  const int64_t end = (group + 1) * next.rows / groups;
  if (heads->head_stride == next.columns)
    mha_memory_fetch(mha_element_at(next.data, next.element, first * next.row_stride), end - first,
                     mha_element_bytes(next.element, next.row_stride),
                     mha_element_bytes(next.element, groups * next.columns));
}

/* The rows that a piece is multiplied with: as float32, unless few queries meet them. */
static mha_stored piece_rows(const mha_core *core, const mha_block *block, mha_range piece,
                             int64_t done, const operand *with) {
  const bool as_stored = mha_core_multiplies_stored(core, block->b);
  if (!with->copy && !as_stored)
    return mha_stored_view(
        mha_core_fetch(core, with->heads, block->b, block->h, piece, with->size, block->fetched));
  const mha_stored rows =
      with->copy ? mha_stored_row_block(*with->copy, done, piece.end - piece.begin)
                 : mha_core_rows(core, with->heads, block->b, block->h, piece, with->size);
  return as_stored ? rows : mha_stored_view(mha_numbers_fetch(&rows, block->fetched));
}

static mha_status multiply_tile(const mha_core *core, const mha_block *block, mha_range keys,
                                const operand *with) {
  const int64_t groups = mha_block_groups(core, block);
  const int64_t n = keys.end - keys.begin;
  mha_status status = MHA_OK;
  int64_t length = 0;
  for (int64_t done = 0; !status && done < n; done += length) {
    const mha_range piece = piece_at(core, keys, done);
    length = piece.end - piece.begin;
    const mha_range next = piece_at(core, keys, piece.end - keys.begin);
    for (int64_t g = 0; !status && g < groups; g++) {
      const mha_block part = mha_block_group(core, block, g);
      if (core->cut.few && !with->copy && !mha_range_is_empty(next))
        fetch_ahead(with->heads,
                    mha_core_rows(core, with->heads, block->b, block->h, next, with->size), g,
                    groups);
      const mha_stored rows = piece_rows(core, &part, piece, done, with);
      status = with->multiply(core, &part, &rows, done);
    }
  }
  return status;
}

mha_status mha_block_scores(const mha_core *core, const mha_block *block, mha_range keys) {
  const operand k = {&core->k, core->d, NULL, multiply_scores};
  if (!core->cut.laid)
    return multiply_tile(core, block, keys, &k);
  mha_laid_scores(core, block, keys);
  return MHA_OK;
}

mha_status mha_block_accumulate(const mha_core *core, const mha_block *block, mha_range keys,
                                const mha_stored *copy) {
  const operand v = {&core->v, core->dv, copy, multiply_values};
  if (!core->cut.laid)
    return multiply_tile(core, block, keys, &v);
  mha_laid_accumulate(core, block, keys, copy);
  return MHA_OK;
}
