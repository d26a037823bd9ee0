/* The gradients that a way back is asked for: some of those that there are. */
#ifndef MHA_TESTS_FUZZ_GRADIENTS_H
#define MHA_TESTS_FUZZ_GRADIENTS_H

#include "session.h"

enum { FUZZ_MOST_GRADIENTS = 16 };

typedef struct fuzz_gradients {
  int32_t accumulate;
  int n, n_missing;
  struct {
    float **member;
    int64_t floats;
  } wanted[FUZZ_MOST_GRADIENTS];
  float **missing[FUZZ_MOST_GRADIENTS]; /* of what is not there */
} fuzz_gradients;

/* Whether gradients are added to what is there. */
void fuzz_begin_gradients(fuzz_trial *trial, fuzz_gradients *gradients);

/* n floats for the gradient that `member` points to, of which the caller says which are written; or
 * NULL, if it is not wanted. */
float *fuzz_want_gradient(fuzz_trial *trial, fuzz_gradients *gradients, float **member, int64_t n,
                          bool is_there);
/* The same of a vector, all of which is written. */
void fuzz_want_vector(fuzz_trial *trial, fuzz_gradients *gradients, float **member, int64_t n,
                      bool is_there);
/* The same of the bias in rules. */
void fuzz_want_bias(fuzz_trial *trial, fuzz_gradients *gradients, float **member,
                    const mha_rules *rules);

/* One more than there is, or one that overlaps another or `neighbour`. Returns whether the contract
 * refuses it. */
bool fuzz_spoil_gradients(fuzz_trial *trial, fuzz_gradients *gradients, const void *neighbour);

#endif
