/* Row kernels of step 3: what happens to one row of scores between the two products. */
#ifndef MHA_SRC_ENGINE_SOFTMAX_H
#define MHA_SRC_ENGINE_SOFTMAX_H

#include "base/ieee.h"
#include "mha.h"

#include <stdbool.h>

/* Each kernel works on a row of n floats, n >= 0, in place where it changes it. -inf marks a hidden
 * key. Sums run over MHA_LANES interleaved partial sums, the same ones on every instruction set. */
#define MHA_LANES 16

/* Largest element that is not NaN; -inf if there is none. */
float mha_row_max(const float *row, int64_t n);

/* row[j] = exp(factor·row[j] - max), max >= every factor·row[j], and returns their sum. Results
 * below the smallest normal number are 0: subnormal weights would slow the product that follows.
 * Relative error at most 2 units in the last place. NaN stays NaN. */
float mha_row_exp(float *row, int64_t n, float factor, float max);

/* The same for a max that need not be one: results are right up to exp(80). *largest is what
 * mha_row_max would have found. */
float mha_row_exp_max(float *row, int64_t n, float factor, float max, float *largest);

/* The weights of a row of scores and the derivative of the softmax by them:
 *
 *   weight = exp(score - max)·share,  gradient = weight·(gradient - dot)
 *
 * in place of scores and gradient, max being finite; returns the sum of the gradients. 0 are the
 * weights of hidden keys and those below the smallest normal number, and the gradients of such
 * weights, whatever came; a score above max counts as max. */
double mha_row_softmax_back(float *scores, float *gradient, int64_t n, float max, float share,
                            float dot);

/* row[j] *= factor, but 0 where that is below the smallest normal number. */
void mha_row_lower(float *row, int64_t n, float factor);

/* exp(x) for one x <= 0, the same function. */
float mha_exp(float x);

/* row[j] *= factor. */
void mha_row_scale(float *row, int64_t n, float factor);

/* row[j] = cap·tanh(row[j] / cap), cap > 0; tanh to 3 units of 2^-24 of its value. */
void mha_row_softcap(float *row, int64_t n, float cap);

/* row[j] += bias[j], but -inf where bias[j] is -inf, whatever row[j] holds. */
void mha_row_add_bias(float *row, const float *bias, int64_t n);

/* row[j] -= slope·|first + j|: ALiBi, `first` being the distance of the row's first key. */
void mha_row_add_alibi(float *row, int64_t n, float slope, float first);

/* row[j] = -inf where attend[j] is 0. */
void mha_row_hide(float *row, const uint8_t *attend, int64_t n);

/* copy = row; true if no element is NaN or infinite. They do not overlap. */
bool mha_row_copy_finite(float *copy, const float *row, int64_t n);

/* True if no element is NaN or infinite. */
bool mha_row_is_finite(const float *row, int64_t n);

/* Name of the instruction set that the kernels run on here. */
const char *mha_row_instruction_set(void);

#endif
