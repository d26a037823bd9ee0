/* Owns the table of engines. */
#include "engine.h"

#include "blas_threads.h"
#include "products.h"

const mha_engine mha_engine_blas = {
    .multiply = mha_products_multiply,
    .begin = mha_blas_guard_enter,
    .end = mha_blas_guard_leave,
};
