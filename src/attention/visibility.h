/* Who may attend to whom: the one predicate, as key ranges and as rules applied to a row. */
#ifndef MHA_SRC_ATTENTION_VISIBILITY_H
#define MHA_SRC_ATTENTION_VISIBILITY_H

#include "base/arithmetic.h"
#include "cache/cache_rows.h"
#include "mha.h"

#include <stdbool.h>

/* Keys [begin, end); empty if begin >= end. */
typedef struct mha_range {
  int64_t begin, end;
} mha_range;

static inline bool mha_range_is_empty(mha_range range) {
  return range.begin >= range.end;
}

static inline mha_range mha_range_intersect(mha_range a, mha_range b) {
  const mha_range both = {mha_max(a.begin, b.begin), mha_min(a.end, b.end)};
  return both;
}

/* A mask or bias [B|1][H|1][Lq|1][Lk] with the strides of its broadcast dimensions 0. */
typedef struct mha_broadcast {
  int64_t batch_stride, head_stride, row_stride;
  bool is_empty; /* it has no number, since B or Lq is 0 and one of its extents */
} mha_broadcast;

typedef struct mha_visibility {
  int64_t B, H, Lq, Lk;         /* packed: B sequences, Lq and Lk all rows together */
  const int64_t *query_lengths; /* [B] or NULL */
  const int64_t *key_lengths;
  const int64_t *query_starts;  /* [B+1] or NULL: packed */
  const int64_t *key_starts;    /* with a cache: of the rows that the call appends */
  const mha_cache_rows *cached; /* the keys are in a cache; NULL = they are not */
  int32_t alignment;
  int64_t offset;
  const int64_t *offsets;
  bool causal;
  int64_t left, right; /* -1 = open */
  const uint8_t *attend;
  mha_broadcast attend_strides;
  const float *bias;
  mha_broadcast bias_strides;
  const float *alibi_slopes;
} mha_visibility;

/* Queries and keys of entry b: their number, and where they start in a packed sequence (0 if not
 * packed). Queries beyond the number see no key; keys beyond it are never touched. */
int64_t mha_query_count(const mha_visibility *visibility, int64_t b);
int64_t mha_key_count(const mha_visibility *visibility, int64_t b);
int64_t mha_query_start(const mha_visibility *visibility, int64_t b);
int64_t mha_key_start(const mha_visibility *visibility, int64_t b);

/* off[b]: key i + off[b] is query i's own. */
int64_t mha_own_key_offset(const mha_visibility *visibility, int64_t b);

/* Keys of entry b that are in memory: all, but for those that a ring has dropped. */
mha_range mha_present_keys(const mha_visibility *visibility, int64_t b);

/* The most keys of an entry that are in memory. */
int64_t mha_key_span(const mha_visibility *visibility);

/* The keys that lengths, causal and window leave to query i of entry b. Both ends lie between 0 and
 * the number of keys and do not decrease with i. */
mha_range mha_visible_keys(const mha_visibility *visibility, int64_t b, int64_t i);

/* Applies bias, ALiBi and mask to scores[0 ..] of query i and the keys of `keys`, of head h: hidden
 * keys become -inf. */
void mha_visibility_apply(const mha_visibility *visibility, int64_t b, int64_t h, int64_t i,
                          mha_range keys, float *scores);

#endif
