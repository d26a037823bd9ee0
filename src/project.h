/* Steps 1 and 5: y = x·W + b on strided rows, and absent matrices. */
#ifndef MHA_SRC_PROJECT_H
#define MHA_SRC_PROJECT_H

#include "arguments.h"
#include "parallel.h"
#include "weights.h"

/* One projection of a call. Rows i < count(b) of entry b are computed; the others are not read. */
typedef struct mha_projecting {
  const mha_projection *projection;
  const float *x; /* [B][L][in] */
  float *y;       /* [B][L][out] */
  mha_rows_shape x_shape, y_shape;
  const int64_t *counts; /* [B] or NULL = all L */
  int64_t limit;         /* rows that exist at all: packed input may end before L */
  bool accumulate;       /* y += x·W + b */
  bool fill;             /* rows beyond the count count as x = 0: they become b */
} mha_projecting;

/* Runs n projections as one list of panels. Panels are cut by shape alone. */
mha_status mha_project(const mha_threads *threads, const mha_projecting *projections, int n);

#endif
