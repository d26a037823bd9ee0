/* A trial of a layer call, and of the way back through it. */
#ifndef MHA_TESTS_FUZZ_FORWARD_H
#define MHA_TESTS_FUZZ_FORWARD_H

#include "gradients.h"
#include "rules.h"
#include "session.h"

/* What is done with the call. */
typedef enum fuzz_way {
  FUZZ_FORWARD,
  FUZZ_FORWARD_WITH_TAPE, /* in one of the runs or in both */
  FUZZ_BACK,
  FUZZ_BACK_WITH_TAPE /* likewise */
} fuzz_way;

typedef struct fuzz_forward {
  fuzz_trial trial; /* first */
  const fuzz_layer *layer;
  const mha_weights *weights;
  fuzz_cache *cache; /* or NULL */
  fuzz_rules rules;
  mha_forward_args args;
  const mha_forward_args *given[2];
  int64_t entries;     /* of the arrays: B, or 1 if packed */
  int64_t most_rows;   /* few with a cache, or it is soon full */
  int64_t rows;        /* that are appended, or Lk */
  int64_t *to_entries; /* cache_entries, or NULL */
  int64_t *counts;     /* new_lengths, or NULL */
  int64_t *arrivals;   /* packed with a cache: rows that each sequence appends, otherwise NULL */
  int64_t *expected;   /* expected_lengths, or NULL */
  bool no_context, no_args;
  bool no_twin; /* both runs use the cache itself */
  fuzz_way way;
  mha_tape *tapes[2]; /* of the two runs, or NULL; on the way back one that is full */
  /* on the way back */
  mha_backward_args back;
  const mha_backward_args *back_given[2];
  fuzz_gradients gradients;
  bool no_back;
} fuzz_forward;

/* Whether the call is made for its way back. */
bool fuzz_goes_back(const fuzz_forward *t);

/* Strides that count, of [batch][length][width]. */
int64_t fuzz_row_step(int64_t row_stride, int64_t width);
int64_t fuzz_batch_step(int64_t batch_stride, int64_t row_stride, int64_t length, int64_t width);

/* The way back of a call whose arguments have been chosen: what comes from above, and which
 * gradients are wanted. */
void fuzz_choose_back(fuzz_forward *t);
/* Makes one thing about it wrong. */
void fuzz_spoil_back(fuzz_forward *t);
/* Makes what is given of it, and fills its tape, if it is to have one. */
void fuzz_finish_back(fuzz_forward *t);
/* Makes tapes for the runs of a forward call. */
void fuzz_choose_tapes(fuzz_forward *t);
/* Gives them back. */
void fuzz_end_tapes(fuzz_forward *t);

#endif
