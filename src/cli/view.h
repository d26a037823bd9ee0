/* Strided views of the library's data: how a reshape or transpose moves nothing. */
#ifndef MHA_SRC_CLI_VIEW_H
#define MHA_SRC_CLI_VIEW_H

#include "mha.h"

#include <stdbool.h>
#include <stdio.h>

/* Element (i0, i1, …) is data[i0·strides[0] + i1·strides[1] + …]. `data` is an address to compare;
 * the numbers behind it may be gone. */
typedef struct mha_view {
  const float *data;
  int rank;
  int64_t shape[4];
  int64_t strides[4];
} mha_view;

mha_view mha_view_of_step(const mha_trace_step *step);

/* Drops a first dimension of extent 1; any other view comes back as it is. */
mha_view mha_view_without_batch(mha_view view);

/* Entry `index` of the first dimension. */
mha_view mha_view_entry(mha_view view, int64_t index);

/* Splits `axis` into `parts` blocks: extents parts and shape/parts. False if that leaves a
 * remainder or the rank is 4 already. */
bool mha_view_split(mha_view *view, int axis, int64_t parts);

/* Exchanges two dimensions. */
mha_view mha_view_swap(mha_view view, int a, int b);

/* Makes `axis` and the one behind it one dimension. False if the numbers do not lie so, in which
 * case they would have to be copied. */
bool mha_view_merge(mha_view *view, int axis);

bool mha_view_same_shape(const mha_view *a, const mha_view *b);

/* Same address, shape and strides. */
bool mha_view_same_place(const mha_view *a, const mha_view *b);

/* Prints "  label  (2, 7, 4)  strides (4, 8, 1)". */
void mha_view_print(const char *label, const mha_view *view, FILE *stream);

/* An mha_trace_function: prints each step to `stream`, a FILE. */
void mha_view_trace(void *stream, const mha_trace_step *step);

#endif
