/* Step 3 as data: what one call of the core works on, and where its rows lie. */
#ifndef MHA_SRC_ATTENTION_CORE_H
#define MHA_SRC_ATTENTION_CORE_H

#include "engine/engine.h"
#include "engine/kernels.h"
#include "engine/numbers.h"
#include "tiles.h"

/* Heads of a [B][L][heads][size] tensor as strides; size has stride 1. Queries are float32. */
typedef struct mha_heads {
  const void *data;
  int32_t element;
  int64_t batch_stride, row_stride, head_stride;
} mha_heads;

/* Offsets of a worker's arrays within its scratch, see attention.c. */
typedef struct mha_scratch_offsets {
  size_t scores, correction, spare, poison, values, kinds, fetched, output;
} mha_scratch_offsets;

/* Kernels for P·V by 2^step keys. */
enum { MHA_VALUE_KERNELS = 9 };

/* Keys laid out for kernels, see laid.c. Unless cut.laid is set there are none, and the products
 * are the engine's. */
typedef struct mha_laid {
  float *keys; /* [G][blocks][d][MHA_KEY_BLOCK] */
  int64_t blocks;
  const mha_kernel *scores, *narrow_scores;           /* Q·Kᵀ of a block, or of its begin */
  const mha_kernel *values[MHA_VALUE_KERNELS];        /* P·V, where V lies */
  const mha_kernel *copied_values[MHA_VALUE_KERNELS]; /* and with a dense copy */
} mha_laid;

/* Which weights are dropped, see mha_rules. */
typedef struct mha_dropout {
  uint32_t threshold; /* random words below it drop theirs; 0 = none is dropped */
  float factor;       /* of those that stay: 1/(1 - p) */
  uint64_t seed, call;
} mha_dropout;

/* Entries of packed queries over a cache are in different states: those with few queries over many
 * keys are served in a pass of their own, before the others. */
typedef enum mha_core_pass {
  MHA_PASS_ALL, /* any other call */
  MHA_PASS_FEW,
  MHA_PASS_MANY
} mha_core_pass;

/* One call of the core. The sizes and who sees whom are in `visibility`. */
typedef struct mha_core {
  const mha_engine *engine;
  bool is_laid; /* whether the call is cut for keys that are laid out */
  mha_laid laid;
  mha_visibility visibility;
  mha_core_pass pass;
  mha_cut cut;
  int64_t G, d, dv;
  mha_heads q, k, v; /* [B][Lq][H][d], [B][Lk][G][d], [B][Lk][G][dv] */
  float *output;     /* [B][Lq][H][dv] */
  int64_t output_batch_stride, output_row_stride, output_head_stride;
  float scale, softcap;
  const float *sinks; /* [H] or NULL */
  mha_dropout dropout;
  mha_results results; /* what is asked for beside the output */
  float *row_max;      /* [B][H][Lq], of the final scores; -inf = the query sees no key */
  float *row_sum;      /* [B][H][Lq], of exp(score - max), without the sink */
  float *parts;        /* few queries: results of the parts, see parts in attention.c */
  char *scratch;       /* one part for each worker, one after the other */
  size_t scratch_bytes;
  mha_scratch_offsets scratch_at;
} mha_core;

/* Floating-point operations of the core's products, masks left aside. */
double mha_core_operations(const mha_core *core);

/* Sizes that decide how the call, or the pass at hand, is cut. */
mha_cut_sizes mha_core_cut_sizes(const mha_core *core);

/* Where the rows of entry b begin: at its own batch stride or, packed, at its first row, `start`.
 */
int64_t mha_core_entry(const mha_core *core, int64_t b, int64_t start, int64_t batch_stride,
                       int64_t row_stride);

/* Rows [i, i + n) of head h of entry b of something that queries have: [n][size]. */
mha_view mha_core_query_rows(const mha_core *core, const mha_heads *heads, int64_t b, int64_t h,
                             int64_t i, int64_t n, int64_t size);

/* Queries [i, i + n) of head h of entry b: [n][d]. */
mha_view mha_core_queries(const mha_core *core, int64_t b, int64_t h, int64_t i, int64_t n);

/* Rows of `heads`, which are the core's k or v, for the key head that serves query head h; keys
 * that follow one another in memory: [keys][size]. */
mha_stored mha_core_rows(const mha_core *core, const mha_heads *heads, int64_t b, int64_t h,
                         mha_range keys, int64_t size);

/* How many keys from key j on lie in rows that follow one another: a page or a ring may end. */
int64_t mha_core_run(const mha_core *core, int64_t j);

/* Whether keys of one tile lie in pages that do not follow one another, so that one product can
 * only take a copy of them. */
bool mha_core_is_scattered(const mha_core *core, mha_range keys);

/* mha_core_rows as float32: where they lie, or in the scratch [keys][size], dense. */
mha_view mha_core_fetch(const mha_core *core, const mha_heads *heads, int64_t b, int64_t h,
                        mha_range keys, int64_t size, float *scratch);

/* Where the result of query i of head h goes; the next query is output_row_stride further. */
float *mha_core_output(const mha_core *core, int64_t b, int64_t h, int64_t i);

/* Whether entry b is served in the pass at hand. */
bool mha_core_serves(const mha_core *core, int64_t b);

/* Queries of entry b that a task of few queries has: all of them, packed or not. */
int64_t mha_core_few_queries(const mha_core *core, int64_t b);

/* Whether the call multiplies numbers of other types than float32 as they are stored for entry b,
 * rather than widened. */
bool mha_core_multiplies_stored(const mha_core *core, int64_t b);

/* What the scores of mha_block_scores are still to be multiplied with. */
float mha_core_score_factor(const mha_core *core);

/* Whether nothing becomes of a visible score but the scale. */
bool mha_core_scores_are_plain(const mha_core *core);

/* Brings scores of mha_block_scores, of query i of head h of entry b and the keys `keys`, to a
 * stage before the softmax: the scale, the softcap, then bias, ALiBi and mask, which make hidden
 * keys -inf. */
void mha_core_advance_scores(const mha_core *core, mha_stage stage, int64_t b, int64_t h, int64_t i,
                             mha_range keys, float *scores);

/* Index of (b, h, i) in row_max and row_sum. */
int64_t mha_core_row_index(const mha_core *core, int64_t b, int64_t h, int64_t i);

/* Denominator of a row's softmax: sum, and the sink's share relative to the row's max. */
float mha_core_denominator(const mha_core *core, int64_t h, float max, float sum);

#endif
