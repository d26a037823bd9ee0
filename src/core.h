/* Step 3 as data: what one call of the core works on, and where its rows lie. */
#ifndef MHA_SRC_CORE_H
#define MHA_SRC_CORE_H

#include "blas.h"
#include "visibility.h"

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
  char *scratch;      /* mha_attention_scratch_bytes for each worker, one after the other */
  size_t scratch_bytes;
} mha_core;

/* Takes scale, softcap and sinks over from `rules`; the layer's scale and softcap hold where the
 * call does not override them. */
mha_status mha_core_rules(mha_core *core, const mha_attention *rules, float scale, float softcap,
                          mha_error *error);

/* Floating-point operations of the core's products, masks left aside. */
double mha_core_operations(const mha_core *core);

/* Values [keys][dv] of the key/value head that serves query head h, as they lie. */
mha_view mha_core_values(const mha_core *core, int64_t b, int64_t h, mha_range keys);

/* Where the result of query i of head h goes; the next query is output_row_stride further. */
float *mha_core_output(const mha_core *core, int64_t b, int64_t h, int64_t i);

/* Scores of queries [i, i + n) of head h and keys [keys.begin, keys.end), scaled only, into
 * scores [n][keys], rows `stride` apart. */
mha_status mha_core_scores(const mha_core *core, int64_t b, int64_t h, int64_t i, int64_t n,
                           mha_range keys, float *scores, int64_t stride);

/* Index of (b, h, i) in row_max and row_sum. */
int64_t mha_core_row_index(const mha_core *core, int64_t b, int64_t h, int64_t i);

/* Denominator of a row's softmax: sum, and the sink's share relative to the row's max. */
float mha_core_denominator(const mha_core *core, int64_t h, float max, float sum);

#endif
