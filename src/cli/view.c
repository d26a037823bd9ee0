/* Owns the algebra of strided views: split, swap and merge dimensions without touching a number. */
#include "view.h"

#include "files/npy.h"
#include "files/text.h"

#include <string.h>

mha_view mha_view_of_step(const mha_trace_step *step) {
  mha_view view = {.data = step->data, .rank = step->rank};
  memcpy(view.shape, step->shape, sizeof view.shape);
  memcpy(view.strides, step->strides, sizeof view.strides);
  return view;
}

/* Removes `axis` from shape and strides. */
static void remove_axis(mha_view *view, int axis) {
  const size_t behind = (size_t)(view->rank - axis - 1);
  memmove(view->shape + axis, view->shape + axis + 1, behind * sizeof view->shape[0]);
  memmove(view->strides + axis, view->strides + axis + 1, behind * sizeof view->strides[0]);
  view->rank--;
}

mha_view mha_view_without_batch(mha_view view) {
  if (view.rank > 0 && view.shape[0] == 1)
    remove_axis(&view, 0);
  return view;
}

mha_view mha_view_entry(mha_view view, int64_t index) {
  view.data += index * view.strides[0];
  remove_axis(&view, 0);
  return view;
}

bool mha_view_split(mha_view *view, int axis, int64_t parts) {
  const size_t behind = (size_t)(view->rank - axis);
  if (view->rank == 4 || parts < 1 || view->shape[axis] % parts != 0)
    return false;
  memmove(view->shape + axis + 1, view->shape + axis, behind * sizeof view->shape[0]);
  memmove(view->strides + axis + 1, view->strides + axis, behind * sizeof view->strides[0]);
  view->rank++;
  view->shape[axis] = parts;
  view->shape[axis + 1] /= parts;
  view->strides[axis] = view->strides[axis + 1] * view->shape[axis + 1];
  return true;
}

mha_view mha_view_swap(mha_view view, int a, int b) {
  const int64_t shape = view.shape[a];
  const int64_t stride = view.strides[a];
  view.shape[a] = view.shape[b];
  view.strides[a] = view.strides[b];
  view.shape[b] = shape;
  view.strides[b] = stride;
  return view;
}

bool mha_view_merge(mha_view *view, int axis) {
  if (view->strides[axis] != view->strides[axis + 1] * view->shape[axis + 1])
    return false;
  view->shape[axis + 1] *= view->shape[axis];
  remove_axis(view, axis);
  return true;
}

bool mha_view_same_shape(const mha_view *a, const mha_view *b) {
  return a->rank == b->rank &&
         memcmp(a->shape, b->shape, (size_t)a->rank * sizeof a->shape[0]) == 0;
}

bool mha_view_same_place(const mha_view *a, const mha_view *b) {
  return a->data == b->data && mha_view_same_shape(a, b) &&
         memcmp(a->strides, b->strides, (size_t)a->rank * sizeof a->strides[0]) == 0;
}

void mha_view_print(const char *label, const mha_view *view, FILE *stream) {
  char shape[128];
  char strides[128];
  fprintf(stream, "  %-18s %-14s strides %s\n", label,
          mha_shape_text(view->rank, view->shape, shape, sizeof shape),
          mha_shape_text(view->rank, view->strides, strides, sizeof strides));
}

void mha_view_trace(void *stream, const mha_trace_step *step) {
  const mha_view view = mha_view_of_step(step);
  mha_view_print(step->name, &view, stream);
}
