/* Owns mha_weights_save: from a layer to a safetensors file. */
#include "base/arguments.h"
#include "base/element.h"
#include "base/error.h"
#include "base/memory.h"
#include "layer/weights.h"
#include "names.h"
#include "safetensors.h"

#include <string.h>

/* Longest name without its prefix, zero included. */
#define NAME_BYTES 16

/* What a file is made of, in one block of memory: the list, the names, and ones. */
typedef struct saved {
  mha_tensor_to_write tensors[MHA_N_PARTS];
  int n;
  char *next_name;
  const char *prefix;
  size_t prefix_bytes;
} saved;

static mha_status check_matrices(const mha_weights *w, mha_error *error) {
  const struct {
    const mha_projection *projection;
    const char *name;
  } projections[] = {
      {&w->query, "query"}, {&w->key, "key"}, {&w->value, "value"}, {&w->output, "output"}};
  for (int k = 0; k < 4; k++) {
    const mha_projection *p = projections[k].projection;
    if (!p->matrix)
      return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "the layer has no %s matrix; rule: a saved layer has all four",
                      projections[k].name);
    if (mha_element_block(p->element) > 1)
      return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "the layer's %s matrix is %s; rule: F32, F16 or BF16, since safetensors has "
                      "no types with blocks",
                      projections[k].name, mha_element_name(p->element));
  }
  return MHA_OK;
}

/* ---- The list -------------------------------------------------------------------------------- */

static mha_tensor_to_write *add(saved *s, const mha_weights *w, mha_part part) {
  const char *name = mha_part_saved_name(part, w->orientation);
  mha_tensor_to_write *tensor = &s->tensors[s->n++];
  memcpy(s->next_name, s->prefix, s->prefix_bytes);
  memcpy(s->next_name + s->prefix_bytes, name, strlen(name) + 1);
  tensor->name = s->next_name;
  s->next_name += s->prefix_bytes + NAME_BYTES;
  return tensor;
}

static void add_vector(saved *s, const mha_weights *w, mha_part part, const float *data,
                       int64_t n) {
  if (!data)
    return;
  mha_tensor_to_write *tensor = add(s, w, part);
  tensor->rank = 1;
  tensor->shape[0] = n;
  tensor->data = data;
  tensor->element = MHA_F32;
}

static void add_projection(saved *s, const mha_weights *w, mha_part matrix, mha_part bias,
                           const mha_projection *p) {
  const bool in_out = w->orientation == MHA_IN_OUT;
  mha_tensor_to_write *tensor = add(s, w, matrix);
  tensor->rank = 2;
  tensor->shape[0] = in_out ? p->in : p->out;
  tensor->shape[1] = in_out ? p->out : p->in;
  tensor->data = p->matrix;
  tensor->element = p->element;
  tensor->row_stride = in_out ? p->in_stride : p->out_stride;
  add_vector(s, w, bias, p->bias, p->out);
}

static void list_tensors(saved *s, const mha_weights *w, const float *ones) {
  const mha_config *c = &w->config;
  const bool full = c->norm == MHA_NORM_FULL;
  add_projection(s, w, MHA_PART_WQ, MHA_PART_BQ, &w->query);
  add_projection(s, w, MHA_PART_WK, MHA_PART_BK, &w->key);
  add_projection(s, w, MHA_PART_WV, MHA_PART_BV, &w->value);
  add_projection(s, w, MHA_PART_WO, MHA_PART_BO, &w->output);
  if (c->norm != MHA_NORM_NONE) {
    add_vector(s, w, MHA_PART_QUERY_NORM, w->query_norm ? w->query_norm : ones,
               full ? w->query.out : c->head_size);
    add_vector(s, w, MHA_PART_KEY_NORM, w->key_norm ? w->key_norm : ones,
               full ? w->key.out : c->head_size);
  }
  add_vector(s, w, MHA_PART_SINKS, w->sinks, c->n_heads);
}

/* ---- The file -------------------------------------------------------------------------------- */

/* A norm without weights is one of ones; in a file it has to be there to be found. */
static int64_t count_ones(const mha_weights *w) {
  const bool needed = w->config.norm != MHA_NORM_NONE && (!w->query_norm || !w->key_norm);
  return needed ? w->query.out : 0; /* H·d, the longest */
}

static mha_status save(const mha_weights *w, const char *path, const char *prefix,
                       mha_error *error) {
  const mha_allocator *allocator = &w->allocator;
  const int64_t n_ones = count_ones(w);
  const size_t prefix_bytes = strlen(prefix);
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(saved), 1, 1, 1);
  const size_t names_at =
      mha_layout_add(&layout, 1, MHA_N_PARTS, (int64_t)(prefix_bytes + NAME_BYTES), 1);
  const size_t ones_at = mha_layout_add(&layout, sizeof(float), n_ones, 1, 1);
  if (layout.overflow)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "the prefix has %zu bytes; rule: all names fit the address space",
                    prefix_bytes);
  char *memory = mha_memory_allocate(allocator, layout.bytes);
  if (!memory)
    return mha_fail(error, MHA_ERROR_MEMORY,
                    "the list of tensors needs %zu bytes; rule: they must be there", layout.bytes);
  saved *s = (void *)memory;
  float *ones = (void *)(memory + ones_at);
  for (int64_t i = 0; i < n_ones; i++)
    ones[i] = 1.0F;
  *s = (saved){.next_name = memory + names_at, .prefix = prefix, .prefix_bytes = prefix_bytes};
  list_tensors(s, w, ones);
  const mha_file_to_write file = {.tensors = s->tensors, .n = s->n};
  const mha_status status = mha_safetensors_write(path, &file, error);
  mha_memory_release(allocator, memory, layout.bytes);
  return status;
}

mha_status mha_weights_save(const mha_weights *weights, const char *path, const char *prefix,
                            mha_error *error) {
  mha_status status = mha_require(weights, "weights", error);
  if (!status)
    status = mha_require(path, "path", error);
  if (!status)
    status = check_matrices(weights, error);
  return status ? status : save(weights, path, prefix ? prefix : "", error);
}
