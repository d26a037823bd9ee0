/* The engine that every promise is made for: each product is one or several CBLAS calls. */
#ifndef MHA_SRC_ENGINE_PRODUCTS_H
#define MHA_SRC_ENGINE_PRODUCTS_H

#include "view.h"

/* C = alpha·A·B + beta·C with C [A.rows][B.columns], row-major, rows c_stride apart. alpha is not
 * 0 (a BLAS may then skip A and B and lose their NaN); beta 0 writes C without reading it. Sizes
 * and strides must fit the BLAS's integer: MHA_ERROR_OVERFLOW otherwise, C untouched. */
mha_status mha_products_multiply(float alpha, mha_view a, mha_view b, float beta, float *c,
                                 int64_t c_stride);

#endif
