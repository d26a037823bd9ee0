/* What the way back needs of a layer call: in the caller's tape, or in scratch. */
#ifndef MHA_SRC_LAYER_TAPE_H
#define MHA_SRC_LAYER_TAPE_H

#include "base/memory.h"
#include "weights.h"

/* The arrays, all dense. */
typedef struct mha_kept {
  float *q, *k, *v;         /* [B][Lq][H·d], [B][Lk][G·d], [B][Lk][G·dv], as step 3 reads them */
  float *raw_q, *raw_k;     /* as projected, where the layer normalises them */
  float *concat;            /* [B][Lq][H·dv] */
  float *row_max, *row_sum; /* [B][H][Lq], as in mha_core */
} mha_kept;

/* Their offsets. */
typedef struct mha_kept_offsets {
  size_t q, k, v, raw_q, raw_k, concat, row_max, row_sum;
} mha_kept_offsets;

/* Sizes of a call, as far as what is kept depends on them. */
typedef struct mha_kept_size {
  int64_t entries, B, Lq, Lk; /* packed: one entry, B sequences */
  bool packed;
} mha_kept_size;

mha_kept_offsets mha_kept_plan(const mha_weights *weights, const mha_kept_size *size,
                               mha_layout *layout);
mha_kept mha_kept_at(char *memory, const mha_kept_offsets *at, const mha_weights *weights);

/* Bytes of all of them. OVERFLOW, with `name` for what has the sizes. */
mha_status mha_kept_bytes(const mha_weights *weights, const mha_kept_size *size, const char *name,
                          size_t *bytes, mha_error *error);

struct mha_tape {
  mha_allocator allocator;
  char *memory;
  size_t bytes;
  uint64_t layer; /* serial of the layer whose call filled it; 0 = empty */
  mha_kept_size size;
  mha_kept kept;
};

/* Empties the tape and makes room for a call; it is full when mha_tape_close says so. MEMORY,
 * OVERFLOW. */
mha_status mha_tape_open(mha_tape *tape, const mha_weights *weights, const mha_kept_size *size,
                         mha_error *error);
void mha_tape_close(mha_tape *tape, const mha_weights *weights);

/* Makes the memory at least this large. What the tape held is gone, unless that fails. */
mha_status mha_tape_grow(mha_tape *tape, size_t bytes, mha_error *error);

/* Fails with VALUE unless the tape was filled by a call of this layer and these sizes. */
mha_status mha_tape_check(const mha_tape *tape, const mha_weights *weights,
                          const mha_kept_size *size, mha_error *error);

#endif
