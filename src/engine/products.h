/* The engine that every promise is made for: each product is one or several CBLAS calls. */
#ifndef MHA_SRC_ENGINE_PRODUCTS_H
#define MHA_SRC_ENGINE_PRODUCTS_H

#include "view.h"

/* multiply of the engine's table: MHA_ERROR_OVERFLOW where a size or a stride does not fit the
 * BLAS's integer. */
mha_status mha_products_multiply(float alpha, mha_view a, mha_view b, float beta, float *c,
                                 int64_t c_stride);

#endif
