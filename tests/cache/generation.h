/* A sequence that is generated through a cache, in whatever steps, each call judged by itself: the
 * tokens as one value, the run that is on, and one call of it. */
#ifndef MHA_TESTS_GENERATION_H
#define MHA_TESTS_GENERATION_H

#include "fixture.h"

enum { GENERATION_MOST_ENTRIES = 4 };

static inline int64_t at_least(int64_t a, int64_t b) {
  return a > b ? a : b;
}

static inline int64_t at_most(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* ---- What to try ----------------------------------------------------------------------------- */

/* The tokens of `c` (Lq of them in each of its B entries), and their cache. */
typedef struct generation_plan {
  test_case c;
  int64_t capacity; /* 0 = as many as there are tokens */
  int64_t window, rollback;
  int64_t entries; /* of the cache; 0 = B. With more, batch entries use them from behind */
  int64_t gap;     /* between rows of inputs and outputs */
  /* Of the cache. Where it is not float32, the judge attends to what the cache holds, which has to
   * be the projections rounded once. */
  int32_t type;
  int64_t page_tokens; /* 0 = those of MHA_TEST_PAGE_TOKENS, or none */
  int64_t n_pages;     /* 0 = as many as may be needed */
} generation_plan;

/* A small layer for self attention, causal, with 21 tokens in each of two entries. */
test_case generation_case(uint64_t seed);

/* Mask kind `kind` of the GENERATION_MASKS that there are. */
enum { GENERATION_MASKS = 10 };
void generation_set_mask(test_case *c, int kind);

/* The cache is a ring, whose window is that of the calls. */
void generation_set_ring(generation_plan *plan, int64_t window, int64_t rollback, int64_t capacity);

/* ---- The run that is on ---------------------------------------------------------------------- */

/* The tokens, the judge's view of them, and how far each entry is. */
typedef struct generation_run {
  generation_plan plan;
  test_fixture f;
  oracle_problem p;
  mha_weights *weights;
  mha_context *context;
  mha_cache *cache;
  int64_t entries[GENERATION_MOST_ENTRIES]; /* of the cache, by batch entry */
  int64_t length[GENERATION_MOST_ENTRIES], highest[GENERATION_MOST_ENTRIES]; /* by batch entry */
  float *outputs; /* [B][Lq][Eo] of all calls */
} generation_run;

extern generation_run run; /* one at a time; too large for a stack */

void generation_open(const generation_plan *plan);
/* Fails the test if memory is left. */
void generation_close(void);
/* The same; the outputs of all calls, freed by the caller. */
float *generation_close_for_outputs(void);

/* The options of the run's cache. */
mha_cache_options generation_cache_options(void);
/* All float32 numbers of the cache, to be spoiled or compared. */
float *generation_cache_numbers(bool values, int64_t *n);
/* Where the row of a token of batch entry b begins, in a cache of any type. */
unsigned char *generation_cached_row(bool values, int64_t b, int64_t token);

/* After a change to the fixture's inputs: the judge looks at what is there now. */
void generation_renew_problem(void);
/* Entry 1 has the first n tokens of entry 0. */
void generation_share_tokens(int64_t n);

/* Takes all entries back to `length` tokens. */
void generation_truncate(int64_t length);

/* ---- One call -------------------------------------------------------------------------------- */

/* `keys` rows of new tokens and `queries` rows of queries, of which counts[b] are tokens; counts
 * NULL = all. The rest is filled in by step_prepare and freed by step_free. */
typedef struct generation_step {
  mha_cache_mode mode;
  int64_t queries, keys;
  const int64_t *counts;
  int64_t before[GENERATION_MOST_ENTRIES], after[GENERATION_MOST_ENTRIES];
  int64_t live[GENERATION_MOST_ENTRIES]; /* live queries */
  int64_t columns;                       /* Lk */
  test_pool pool;
  float *x, *k, *v, *y, *y_before;
  unsigned char *mask;
  float *bias, *weights, *average, *lse;
  int64_t *positions;
  mha_rules rules;
  mha_results results;
  mha_forward_args args;
} generation_step;

/* Sizes, inputs and arguments of the next call. */
void step_prepare(generation_step *s);
/* The call was made: the cache has the lengths that follow from it. */
void step_commit(const generation_step *s);
/* Prepares, calls and commits. */
void step_call(generation_step *s);
/* Compares the call's results with those of a problem of its own: all tokens so far as keys, the
 * call's rows as queries. Keeps the output among the run's. */
void step_judge(const generation_step *s);
/* Dense copy of the call's output; freed by the caller. */
float *step_output(const generation_step *s);
void step_free(generation_step *s);
/* Calls, judges and frees. */
void step_try(generation_step s);

/* ---- Many calls ------------------------------------------------------------------------------ */

/* Appends counts[b] tokens, at most n, to each entry, and judges the call. */
void generation_advance(int64_t n, const int64_t *counts);
/* The same without a judge; the output's bits, freed by the caller. */
float *generation_advance_for_bits(int64_t n, const int64_t *counts);

/* The most tokens that one call may bring. */
int64_t generation_largest_chunk(void);

/* Brings `tokens` in the largest chunks, without comparing. */
void generation_prefill(int64_t tokens);

typedef enum generation_schedule {
  GENERATION_AT_ONCE,
  GENERATION_IN_CHUNKS,
  GENERATION_ONE_BY_ONE,
  GENERATION_UNEVEN, /* entries grow by different counts, 0 included */
  GENERATION_SCHEDULES
} generation_schedule;

/* Every token that the entries do not have yet. */
void generation_finish(generation_schedule schedule);
/* Under a causal mask, with a float32 cache, all calls together are the uncached call. */
void generation_compare_with_whole(void);
/* Opens, finishes, compares and closes. */
void generation_try(const generation_plan *plan, generation_schedule schedule);

#endif
