/* Owns the description of step 3: the views of each head's rows, and the two products. */
#include "core.h"

#include "memory.h"
#include "parallel.h"
#include "softmax.h"

#include <math.h>

/* ---- addresses ---- */

int64_t mha_core_row_index(const mha_core *core, int64_t b, int64_t h, int64_t i) {
  const mha_visibility *v = &core->visibility;
  return v->query_starts ? h * v->Lq + v->query_starts[b] + i : (b * v->H + h) * v->Lq + i;
}

/* Entry b begins at its own batch stride or, packed, at its first row. */
static int64_t entry_offset(bool packed, int64_t b, int64_t start, int64_t batch_stride,
                            int64_t row_stride) {
  return packed ? start * row_stride : b * batch_stride;
}

/* Queries [i, i + n) of one head: [n][d]. */
static mha_view query_rows(const mha_core *core, int64_t b, int64_t h, int64_t i, int64_t n) {
  const mha_visibility *v = &core->visibility;
  const float *data = core->q.data +
                      entry_offset(v->query_starts != NULL, b, mha_query_start(v, b),
                                   core->q.batch_stride, core->q.row_stride) +
                      i * core->q.row_stride + h * core->q.head_stride;
  return mha_view_rows(data, n, core->d, core->q.row_stride);
}

/* Rows of one tile of keys or values, for the key head that serves query head h: [keys][size]. */
static mha_view key_rows(const mha_core *core, const mha_heads *heads, int64_t b, int64_t h,
                         mha_range keys, int64_t size) {
  const mha_visibility *v = &core->visibility;
  const int64_t entry = v->cached ? mha_cache_rows_entry(v->cached, b) : b;
  const int64_t row = v->cached ? mha_cache_rows_row(v->cached, keys.begin) : keys.begin;
  const int64_t g = h / (v->H / core->G);
  const float *data = heads->data +
                      entry_offset(v->key_starts != NULL, entry, mha_key_start(v, b),
                                   heads->batch_stride, heads->row_stride) +
                      row * heads->row_stride + g * heads->head_stride;
  return mha_view_rows(data, keys.end - keys.begin, size, heads->row_stride);
}

mha_view mha_core_values(const mha_core *core, int64_t b, int64_t h, mha_range keys) {
  return key_rows(core, &core->v, b, h, keys, core->dv);
}

float *mha_core_output(const mha_core *core, int64_t b, int64_t h, int64_t i) {
  const mha_visibility *v = &core->visibility;
  return core->output +
         entry_offset(v->query_starts != NULL, b, mha_query_start(v, b), core->output_batch_stride,
                      core->output_row_stride) +
         i * core->output_row_stride + h * core->output_head_stride;
}

/* ---- products ---- */

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

/* The piece of a tile that begins `done` keys behind its begin. */
static mha_range piece_at(const mha_core *core, mha_range keys, int64_t done) {
  const int64_t begin = keys.begin + done;
  const mha_range piece = {begin, mha_min(begin + core->cut.product_keys, keys.end)};
  return piece;
}

/* Asks for the rows that the next products will read, the share of one of `groups`, so that they
 * arrive in the order in which they lie while this group is multiplied. Only where heads are
 * neighbours, so that the rows of all groups are one run. */
static void fetch_ahead(const mha_heads *heads, mha_view next, int64_t group, int64_t groups) {
  const int64_t first = group * next.rows / groups;
  const int64_t end = (group + 1) * next.rows / groups;
  if (heads->head_stride == next.columns)
    mha_memory_fetch(next.data + first * next.row_stride, end - first, next.row_stride,
                     groups * next.columns);
}

/* One query of several heads is a matrix too: its rows are the heads. */
static bool is_one_product(const mha_block *block, int64_t head_stride, int64_t size) {
  return block->heads == 1 || (block->n == 1 && head_stride >= size && head_stride <= MHA_BLAS_MAX);
}

/* scale·Q·Kᵀ of one group and one piece. */
static mha_status multiply_scores(const mha_core *core, const mha_block *block, float scale,
                                  mha_view keys, int64_t column) {
  const bool one = is_one_product(block, core->q.head_stride, core->d);
  float *scores = block->scores + column;
  mha_status status = MHA_OK;
  for (int64_t k = 0; !status && k < (one ? 1 : block->heads); k++) {
    mha_view q = query_rows(core, block->b, block->h + k, block->i, block->n);
    if (one && block->heads > 1)
      q = mha_view_rows(q.data, block->heads, core->d, core->q.head_stride);
    status = mha_blas_multiply(scale, q, mha_view_transposed(keys), 0.0f,
                               scores + k * block->n * block->score_stride, block->score_stride);
  }
  return status;
}

mha_status mha_core_scores(const mha_core *core, const mha_block *block, mha_range keys) {
  /* A scale of 0 must not reach the BLAS: 0·NaN is NaN. */
  const bool zero = core->scale == 0.0f;
  const int64_t n = keys.end - keys.begin;
  const int64_t groups = mha_block_groups(core, block);
  mha_status status = MHA_OK;
  for (int64_t done = 0; !status && done < n; done += core->cut.product_keys) {
    const mha_range piece = piece_at(core, keys, done);
    const mha_range next = piece_at(core, keys, piece.end - keys.begin);
    for (int64_t g = 0; !status && g < groups; g++) {
      const mha_block part = mha_block_group(core, block, g);
      if (core->cut.few)
        fetch_ahead(&core->k, key_rows(core, &core->k, block->b, block->h, next, core->d), g,
                    groups);
      status = multiply_scores(core, &part, zero ? 1.0f : core->scale,
                               key_rows(core, &core->k, block->b, part.h, piece, core->d), done);
    }
  }
  for (int64_t r = 0; zero && r < block->heads * block->n; r++)
    mha_row_scale(block->scores + r * block->score_stride, n, 0.0f);
  return status;
}

/* O += P·V of one group and one piece. */
static mha_status multiply_values(const mha_block *block, mha_view values, int64_t column) {
  const bool one = is_one_product(block, block->output_head_stride, values.columns);
  const int64_t stride =
      one && block->heads > 1 ? block->output_head_stride : block->output_row_stride;
  const int64_t rows = one ? block->heads * block->n : block->n;
  mha_status status = MHA_OK;
  for (int64_t k = 0; !status && k < (one ? 1 : block->heads); k++) {
    const float *weights = block->scores + k * block->n * block->score_stride + column;
    const mha_view p = mha_view_rows(weights, rows, values.rows, block->score_stride);
    status = mha_blas_multiply(1.0f, p, values, 1.0f, block->output + k * block->output_head_stride,
                               stride);
  }
  return status;
}

mha_status mha_core_accumulate(const mha_core *core, const mha_block *block, mha_range keys,
                               const float *values, int64_t values_stride) {
  const int64_t n = keys.end - keys.begin;
  const int64_t groups = mha_block_groups(core, block);
  mha_status status = MHA_OK;
  for (int64_t done = 0; !status && done < n; done += core->cut.product_keys) {
    const mha_range piece = piece_at(core, keys, done);
    const mha_range next = piece_at(core, keys, piece.end - keys.begin);
    for (int64_t g = 0; !status && g < groups; g++) {
      const mha_block part = mha_block_group(core, block, g);
      mha_view v = mha_core_values(core, block->b, part.h, piece);
      if (values)
        v = mha_view_rows(values + done * values_stride, v.rows, core->dv, values_stride);
      else if (core->cut.few)
        fetch_ahead(&core->v, mha_core_values(core, block->b, block->h, next), g, groups);
      status = multiply_values(&part, v, done);
    }
  }
  return status;
}

float mha_core_denominator(const mha_core *core, int64_t h, float max, float sum) {
  const float sink = core->sinks ? core->sinks[h] : -INFINITY;
  return sink == -INFINITY ? sum : sum + expf(sink - max);
}

mha_cut_sizes mha_core_cut_sizes(const mha_core *core) {
  const mha_visibility *v = &core->visibility;
  const mha_cut_sizes sizes = {v->B,
                               v->H,
                               core->G,
                               v->Lq,
                               mha_key_span(v),
                               core->d,
                               core->dv,
                               v->query_starts != NULL,
                               v->left >= 0};
  return sizes;
}

double mha_core_operations(const mha_core *core) {
  const mha_visibility *v = &core->visibility;
  const double entries = v->query_starts ? 1.0 : (double)v->B;
  const double span = (double)mha_key_span(v);
  const double numbers = entries * span * (double)(core->d + core->dv);
  const double products = 2.0 * numbers * (double)v->H * (double)v->Lq;
  const double reads = MHA_OPERATIONS_PER_READ * numbers * (double)core->G;
  return core->cut.few && reads > products ? reads : products;
}
