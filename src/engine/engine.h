/* An engine: who does the products of a context's calls. MHA_ENGINE_XSMM is the one below, with
 * kernels (kernels.h) in front of it. */
#ifndef MHA_SRC_ENGINE_ENGINE_H
#define MHA_SRC_ENGINE_ENGINE_H

#include "view.h"

typedef struct mha_engine {
  /* C = alpha·A·B + beta·C with C [A.rows][B.columns], row-major, rows c_stride apart. alpha is not
   * 0 (a BLAS may then skip A and B and lose their NaN); beta 0 writes C without reading it.
   * MHA_ERROR_OVERFLOW where it cannot count so far, C untouched. From any thread, between begin
   * and end. */
  mha_status (*multiply)(float alpha, mha_view a, mha_view b, float beta, float *c,
                         int64_t c_stride);

  /* Round a call that has the engine to itself: its own threads stay out of the way. */
  void (*begin)(void);
  void (*end)(void);
} mha_engine;

/* The engine that every promise is made for. */
extern const mha_engine mha_engine_blas;

#endif
