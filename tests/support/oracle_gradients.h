/* The judge of gradients: the way back through oracle.h's problem as plain loops over whole
 * matrices in double precision, written from the formulas of the contract alone. */
#ifndef MHA_TESTS_ORACLE_GRADIENTS_H
#define MHA_TESTS_ORACLE_GRADIENTS_H

#include "oracle.h"

/* Gradients of Σ dy∘output. Each lies as the thing itself, dense where that is dense; a bound is
 * 1e-5 of the gradient's largest element, plus 1e-6. n is 0 where the problem has no such thing.
 * The arrays of query, key and value are taken for three different ones. */
typedef struct oracle_gradients {
  oracle_numbers query, key, value;
  oracle_numbers wq, wk, wv, wo; /* [out][ld] or [in][ld] without the last row's gap; gaps are 0 */
  oracle_numbers bq, bk, bv, bo;
  oracle_numbers query_norm, key_norm; /* with any norm, also where the weight is absent, as ones */
  oracle_numbers bias;                 /* [B][H][Lq][Lk] */
  oracle_numbers slopes, sinks;        /* [H] */
} oracle_gradients;

/* dy [B][Lq][Eo]. What nothing passes back to, per token and head, is exactly 0, and its numbers
 * are not looked at; rows of dy beyond query_lengths, or outside all packed sequences, count for bo
 * alone. */
void oracle_differentiate(const oracle_problem *problem, const double *dy,
                          oracle_gradients *gradients);
void oracle_gradients_free(oracle_gradients *gradients);

/* Where one array serves as two, its gradient is the sum: value's is added to key's, then key's to
 * query's. What was added remains in its own place. */
void oracle_gradients_share(oracle_gradients *gradients, bool key_is_value, bool query_is_key);

/* The gradient of a bias whose extents are `batch`, `heads` and `rows`, 1 or full, and Lk columns:
 * gradients->bias summed over those that are 1. Free `sum` with oracle_numbers_free. */
void oracle_reduce_bias(const oracle_problem *problem, const oracle_gradients *gradients,
                        int64_t batch, int64_t heads, int64_t rows, oracle_numbers *sum);
void oracle_numbers_free(oracle_numbers *numbers);

#endif
