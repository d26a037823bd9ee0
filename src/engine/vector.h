/* Row kernels of a layer: what happens to rows of numbers before and after step 3. */
#ifndef MHA_SRC_ENGINE_VECTOR_H
#define MHA_SRC_ENGINE_VECTOR_H

#include "base/ieee.h"
#include "mha.h"

/* Each kernel works on n >= 0 floats. Arrays overlap only where they are the same. */

/* y[j] += x[j]. */
void mha_vector_add(float *y, const float *x, int64_t n);

/* y = beta·y for rows that are y_stride apart, without reading y where beta is 0: whether a BLAS
 * then clears a NaN differs between versions and cores. */
void mha_vector_start_rows(float beta, float *y, int64_t rows, int64_t columns, int64_t y_stride);

/* y[j] += factor·x[j]. */
void mha_vector_add_scaled(float *y, const float *x, float factor, int64_t n);

/* sums[j] += factor·x[j], in double. */
void mha_vector_gather(double *sums, const float *x, double factor, int64_t n);

/* sums[j] += factor·x[j]·y[j], in double. */
void mha_vector_gather_products(double *sums, const float *x, const float *y, double factor,
                                int64_t n);

/* Σ x[j]², in double: squares of large floats overflow, and long rows would add up rounding errors.
 * The same partial sums on every instruction set. */
double mha_vector_squares(const float *x, int64_t n);

/* x[j] = x[j]·factor·weight[j]. */
void mha_vector_weigh(float *x, const float *weight, float factor, int64_t n);

/* y[c·y_stride + r] = x[r·x_stride + c] for r < rows, c < columns: xᵀ. */
void mha_vector_transpose(float *y, int64_t y_stride, const float *x, int64_t x_stride,
                          int64_t rows, int64_t columns);

/* Turns n pairs by their angles: (a, b) -> (a·cos - b·sin, b·cos + a·sin). Pair p is a[p] and b[p],
 * or pairs[2p] and pairs[2p + 1]. */
void mha_vector_turn_halves(float *a, float *b, const float *cosine, const float *sine, int64_t n);
void mha_vector_turn_neighbours(float *pairs, const float *cosine, const float *sine, int64_t n);

#endif
