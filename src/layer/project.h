/* Steps 1 and 5: y = x·W + b on strided rows, and absent matrices. */
#ifndef MHA_SRC_LAYER_PROJECT_H
#define MHA_SRC_LAYER_PROJECT_H

#include "base/arguments.h"
#include "cache/cache_rows.h"
#include "runtime/context.h"
#include "weights.h"

/* Rows that are computed: at most counts[b] of each entry where there are counts, and none from
 * `limit` on, where packed input ends with its last sequence. */
typedef struct mha_live_rows {
  const int64_t *counts; /* [B] or NULL */
  int64_t limit;
} mha_live_rows;

/* One projection of a call. Rows that are not live are not read. */
typedef struct mha_projecting {
  const mha_projection *projection;
  const float *x; /* [B][L][in] */
  float *y;       /* [B][L][out] */
  mha_rows_shape x_shape, y_shape;
  mha_live_rows live;
  const mha_cache_rows *cached; /* not NULL: y is [n_entries][capacity][out] of a cache, and each
                               entry's rows go behind those that it has; y_shape is not used */
  float *partial;  /* room for mha_partial_floats of a single row, or NULL: it is then not cut so */
  bool accumulate; /* y += x·W + b */
  bool fill;       /* rows that are not live count as x = 0: they become b */
} mha_projecting;

/* A single row times a matrix stored by rows is cut along those rows, so that each is read from end
 * to end: a task for each part, whose result [out] is a partial sum. Numbers that they need at
 * most. */
int64_t mha_partial_floats(const mha_projection *projection);

/* The most numbers that a worker widens a matrix of another type than float32 to at a time, for
 * calls of so many rows altogether, or of fewer. */
int64_t mha_widened_floats(const mha_projection *projection, int64_t rows);

/* At least the tasks of a projection of `entries` times `length` rows, or fewer, of whatever type;
 * false if they overflow. */
bool mha_projection_tasks(const mha_projection *projection, int64_t entries, int64_t length,
                          int64_t *tasks);

/* Few new rows of each of several entries lie far apart in a cache; a product for each entry would
 * read the matrix as often. They are projected side by side instead, into this many scratch rows of
 * each entry. 0 = straight into the cache, where many rows make the copy the dearer way. */
int64_t mha_gathered_rows(int64_t entries, int64_t rows);

/* Many rows for pages that are much smaller than a panel are worth the copy too: rows of an entry,
 * of `rows` altogether, that go to scratch before they go to pages of so many; 0 = none. */
int64_t mha_paged_rows(int64_t page_tokens, int64_t rows);

/* Where matrices of other types than float32 are widened: `floats` numbers for each worker, one
 * room after the other. */
typedef struct mha_widening {
  float *room;
  int64_t floats;
} mha_widening;

/* Runs n projections as one list of panels, which share the room. Panels are cut by shape alone. */
mha_status mha_project(const mha_context *context, const mha_projecting *projections, int n,
                       mha_widening widening);

#endif
