/* Row kernels of the way back through step 3. */
#ifndef MHA_SRC_ENGINE_DERIVATIVE_H
#define MHA_SRC_ENGINE_DERIVATIVE_H

#include "base/ieee.h"
#include "mha.h"

/* Each kernel works on a row of n floats, n >= 0. Results below the smallest normal number are 0,
 * since subnormal ones would slow the product that follows. Sums here are double, in the same
 * partial sums on every instruction set. */

/* gradient[j] *= 1 - (capped[j]/cap)², the derivative of cap·tanh(s/cap) by what it gave. A
 * gradient of 0 stays 0. */
void mha_row_softcap_back(float *gradient, const float *capped, float cap, int64_t n);

/* row[j] *= factors[j], but a row[j] of 0, and a factor of 0, give 0. */
void mha_row_multiply(float *row, const float *factors, int64_t n);

/* Σ gradient[j]·|first + j|. */
double mha_row_alibi_back(const float *gradient, float first, int64_t n);

/* Σ row[j]. */
double mha_row_sum(const float *row, int64_t n);

/* Σ a[j]·b[j]. */
double mha_row_dot(const float *a, const float *b, int64_t n);

#endif
