/* Owns mha_weights: one layer's matrices, biases and vectors. A layer is one block of memory: the
 * object, then the numbers if they are copied. */
#include "weights.h"

#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/error.h"
#include "base/memory.h"
#include "engine/packed.h"
#include "rope.h"

#include <string.h>

/* ---- matrices ---- */

/* One of the four, with all that is checked and copied of it. */
typedef struct matrix_entry {
  const char *name;
  const void *data;
  const float *bias;
  int32_t element;
  int64_t in, out, ld;
  mha_projection *projection;
  int32_t kept; /* mha_element of the layer's own copy */
} matrix_entry;

#define N_MATRICES 4

/* Copies are of the type `kept`, or each as it is given if that is MHA_AS_GIVEN. */
static void list_matrices(matrix_entry entries[N_MATRICES], mha_weights *layer,
                          const mha_matrices *m, const mha_widths *w, int32_t kept) {
  const mha_config *c = &layer->config;
  const matrix_entry list[N_MATRICES] = {
      {"query", m->query, m->query_bias, m->query_element, c->query_width, w->q, m->query_ld,
       &layer->query, 0},
      {"key", m->key, m->key_bias, m->key_element, c->key_width, w->k, m->key_ld, &layer->key, 0},
      {"value", m->value, m->value_bias, m->value_element, c->value_width, w->v, m->value_ld,
       &layer->value, 0},
      {"output", m->output, m->output_bias, m->output_element, w->concat, c->output_width,
       m->output_ld, &layer->output, 0}};
  memcpy(entries, list, sizeof list);
  for (int k = 0; k < N_MATRICES; k++)
    entries[k].kept = kept == MHA_AS_GIVEN ? entries[k].element : kept;
}

static int64_t matrix_rows(const matrix_entry *e, int32_t orientation) {
  return orientation == MHA_OUT_IN ? e->out : e->in;
}

static int64_t matrix_columns(const matrix_entry *e, int32_t orientation) {
  return orientation == MHA_OUT_IN ? e->in : e->out;
}

static mha_status check_blocks(const matrix_entry *e, int64_t columns, mha_error *error) {
  const int64_t block = mha_element_block(e->element);
  const int64_t kept = mha_element_block(e->kept);
  if (columns % block != 0)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "matrices.%s has rows of %lld numbers; rule: whole blocks of %s, %lld", e->name,
                    (long long)columns, mha_element_name(e->element), (long long)block);
  if (columns % kept != 0)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "the %s matrix has rows of %lld numbers; rule: whole blocks of %s, %lld",
                    e->name, (long long)columns, mha_element_name(e->kept), (long long)kept);
  if (e->ld % block != 0)
    return mha_fail(error, MHA_ERROR_STRIDE,
                    "matrices.%s_ld is %lld; rule: whole blocks of %s, %lld", e->name,
                    (long long)e->ld, mha_element_name(e->element), (long long)block);
  return MHA_OK;
}

static mha_status check_matrix(matrix_entry *e, int32_t orientation, mha_error *error) {
  if (!mha_element_is_known(e->element))
    return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                    "matrices.%s_element is %d; rule: a value of mha_element", e->name,
                    (int)e->element);
  if (!e->data && e->in != e->out)
    return mha_fail(error, MHA_ERROR_WEIGHTS,
                    "matrices.%s is NULL between widths %lld and %lld; rule: an absent matrix is "
                    "the identity and needs equal widths",
                    e->name, (long long)e->in, (long long)e->out);
  if (!e->data)
    return MHA_OK;
  if (orientation != MHA_IN_OUT && orientation != MHA_OUT_IN)
    return mha_fail(error, MHA_ERROR_VALUE,
                    "matrices.orientation is %d; rule: MHA_IN_OUT or MHA_OUT_IN", orientation);
  const int64_t columns = matrix_columns(e, orientation);
  if (e->ld == 0 || matrix_rows(e, orientation) == 1)
    e->ld = columns;
  if (e->ld < columns)
    return mha_fail(error, MHA_ERROR_STRIDE,
                    "matrices.%s_ld is %lld; rule: 0 or at least the row length, %lld", e->name,
                    (long long)e->ld, (long long)columns);
  if (e->ld > MHA_BLAS_MAX)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "matrices.%s_ld is %lld; rule: at most %lld, the BLAS's integer", e->name,
                    (long long)e->ld, (long long)MHA_BLAS_MAX);
  return check_blocks(e, columns, error);
}

/* Points a projection at numbers that lie `ld` apart. */
static void set_projection(const matrix_entry *e, int32_t orientation, const void *data,
                           int32_t element, const float *bias, int64_t ld) {
  const bool in_out = orientation != MHA_OUT_IN;
  const mha_projection p = {data, element, bias, e->in, e->out, in_out ? ld : 1, in_out ? 1 : ld,
                            NULL, 0};
  *e->projection = p;
}

/* A vector of the layer that belongs to no matrix. */
typedef struct vector_entry {
  const float *data; /* NULL = absent */
  int64_t n;
  const float **place; /* in the layer */
} vector_entry;

#define N_VECTORS 3

static void borrow(const matrix_entry entries[N_MATRICES], const vector_entry vectors[N_VECTORS],
                   int32_t orientation) {
  for (int k = 0; k < N_MATRICES; k++)
    set_projection(&entries[k], orientation, entries[k].data, entries[k].element, entries[k].bias,
                   entries[k].ld);
  for (int k = 0; k < N_VECTORS; k++)
    *vectors[k].place = vectors[k].data;
}

/* Adds a dense copy of the matrix to the layout. */
static size_t plan_copy(const matrix_entry *e, int32_t orientation, mha_layout *layout) {
  int64_t row_bytes = 0;
  layout->overflow |= !mha_element_extent(e->kept, matrix_columns(e, orientation), &row_bytes);
  return mha_layout_add(layout, 1, matrix_rows(e, orientation), row_bytes, 1);
}

static void copy_matrix(const matrix_entry *e, int32_t orientation, char *base,
                        mha_layout *layout) {
  char *data = NULL;
  float *bias = NULL;
  const int64_t rows = matrix_rows(e, orientation);
  const int64_t columns = matrix_columns(e, orientation);
  const size_t row_bytes = mha_element_bytes(e->kept, columns);
  if (e->data) {
    data = base + plan_copy(e, orientation, layout);
    for (int64_t r = 0; r < rows; r++)
      mha_numbers_convert(data + (size_t)r * row_bytes, e->kept,
                          mha_element_at(e->data, e->element, r * e->ld), e->element, columns);
  }
  if (e->bias) {
    bias = (void *)(base + mha_layout_add(layout, sizeof *bias, e->out, 1, 1));
    memcpy(bias, e->bias, (size_t)e->out * sizeof *bias);
  }
  set_projection(e, orientation, data, e->kept, bias, columns);
}

/* Adds the packed matrix to the layout. */
static size_t plan_packed(const matrix_entry *e, mha_layout *layout) {
  int64_t floats = 0;
  layout->overflow |= !mha_packed_floats(e->in, e->out, &floats);
  return mha_layout_add(layout, sizeof(float), floats, 1, 1);
}

/* Packs the matrix, as the projection has it already. */
static void pack_matrix(const matrix_entry *e, char *base, mha_layout *layout) {
  mha_projection *p = e->projection;
  if (!p->matrix)
    return;
  float *packed = (void *)(base + plan_packed(e, layout));
  const mha_stored w = mha_projection_matrix(p);
  mha_packed_fill(packed, &w);
  p->packed = packed;
}

static void list_vectors(vector_entry vectors[N_VECTORS], mha_weights *layer,
                         const mha_matrices *m) {
  const mha_config *c = &layer->config;
  const bool full = c->norm == MHA_NORM_FULL;
  const int64_t G = full ? c->n_kv_heads : 1;
  const int64_t H = full ? c->n_heads : 1;
  const vector_entry list[N_VECTORS] = {{m->query_norm, H * c->head_size, &layer->query_norm},
                                        {m->key_norm, G * c->head_size, &layer->key_norm},
                                        {m->sinks, c->n_heads, &layer->sinks}};
  memcpy(vectors, list, sizeof list);
}

static void copy_vector(const vector_entry *e, char *base, mha_layout *layout) {
  if (!e->data)
    return;
  float *data = (void *)(base + mha_layout_add(layout, sizeof *data, e->n, 1, 1));
  memcpy(data, e->data, (size_t)e->n * sizeof *data);
  *e->place = data;
}

/* Bytes of the object and, if they are copied or packed, of the numbers behind it. */
static mha_layout plan_memory(const matrix_entry entries[N_MATRICES],
                              const vector_entry vectors[N_VECTORS], const mha_matrices *m,
                              bool pack, int64_t frequencies) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(mha_weights), 1, 1, 1);
  for (int k = 0; m->ownership == MHA_COPY && k < N_MATRICES; k++) {
    if (entries[k].data)
      (void)plan_copy(&entries[k], m->orientation, &layout);
    if (entries[k].bias)
      (void)mha_layout_add(&layout, sizeof(float), entries[k].out, 1, 1);
  }
  for (int k = 0; m->ownership == MHA_COPY && k < N_VECTORS; k++)
    if (vectors[k].data)
      (void)mha_layout_add(&layout, sizeof(float), vectors[k].n, 1, 1);
  for (int k = 0; pack && k < N_MATRICES; k++)
    if (entries[k].data)
      (void)plan_packed(&entries[k], &layout);
  (void)mha_layout_add(&layout, sizeof(double), frequencies, 1, 1);
  return layout;
}

/* ---- creation ---- */

#ifndef MHA_ALWAYS_PACK /* a build of the tests does */
#define MHA_ALWAYS_PACK 0
#endif

/* Reads and checks everything into `layer`, which lives on the stack until memory is there. */
static mha_status prepare(mha_weights *layer, mha_matrices *m, matrix_entry entries[N_MATRICES],
                          const mha_config *config, const mha_matrices *matrices, int32_t kept,
                          mha_error *error) {
  mha_widths widths = {0};
  mha_status status = mha_read_struct(&layer->config, sizeof layer->config, MHA_FIRST_CONFIG,
                                      config, "config", error);
  if (!status)
    status = mha_read_struct(m, sizeof *m, MHA_FIRST_MATRICES, matrices, "matrices", error);
  if (!status && m->ownership != MHA_COPY && m->ownership != MHA_BORROW)
    status = mha_fail(error, MHA_ERROR_VALUE,
                      "matrices.ownership is %d; rule: MHA_COPY or MHA_BORROW", m->ownership);
  if (!status && m->ownership == MHA_COPY && m->release)
    status = mha_fail(error, MHA_ERROR_VALUE,
                      "matrices.release is given with MHA_COPY; rule: only what is borrowed is "
                      "given back");
  if (!status)
    status = mha_config_complete(&layer->config, m, &widths, error);
  if (!status)
    status = mha_require_sinks(m->sinks, layer->config.n_heads, "matrices.sinks", error);
  if (status)
    return status;
  list_matrices(entries, layer, m, &widths, kept);
  for (int k = 0; !status && k < N_MATRICES; k++)
    status = check_matrix(&entries[k], m->orientation, error);
  const mha_config *c = &layer->config;
  layer->scale = c->flags & MHA_SCALE ? c->scale : mha_default_scale(c->head_size);
  layer->orientation = m->orientation;
  layer->allocator = mha_memory_allocator(c->allocator);
  layer->config.allocator = NULL;
  layer->release = m->release;
  layer->release_user = m->release_user;
  return status;
}

static atomic_ullong last_serial;

mha_status mha_weights_create_as(const mha_config *config, const mha_matrices *matrices,
                                 int32_t kept, mha_weights **weights, mha_error *error) {
  mha_weights layer = {.references = 0};
  mha_matrices m;
  matrix_entry entries[N_MATRICES];
  const mha_status status = prepare(&layer, &m, entries, config, matrices, kept, error);
  if (status)
    return status;
  vector_entry vectors[N_VECTORS];
  list_vectors(vectors, &layer, &m);
  const int64_t frequencies = layer.config.rope == MHA_ROPE_NONE || layer.config.rope_cos
                                  ? 0
                                  : layer.config.rotary_size / 2;
  const bool pack = MHA_ALWAYS_PACK || layer.config.flags & MHA_PACK_WEIGHTS;
  const mha_layout plan = plan_memory(entries, vectors, &m, pack, frequencies);
  if (plan.overflow)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "the matrices of config and matrices exceed the address space; rule: their "
                    "sizes must not overflow");
  char *memory = mha_memory_allocate(&layer.allocator, plan.bytes);
  if (!memory)
    return mha_fail(error, MHA_ERROR_MEMORY, "the layer needs %zu bytes; rule: they must be there",
                    plan.bytes);
  layer.bytes = plan.bytes;
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof layer, 1, 1, 1);
  if (m.ownership == MHA_BORROW)
    borrow(entries, vectors, m.orientation);
  else {
    for (int k = 0; k < N_MATRICES; k++)
      copy_matrix(&entries[k], m.orientation, memory, &layout);
    for (int k = 0; k < N_VECTORS; k++)
      copy_vector(&vectors[k], memory, &layout);
  }
  for (int k = 0; k < N_MATRICES; k++)
    entries[k].projection->given_ld =
        kept == MHA_AS_GIVEN ? entries[k].ld : matrix_columns(&entries[k], m.orientation);
  for (int k = 0; pack && k < N_MATRICES; k++)
    pack_matrix(&entries[k], memory, &layout);
  layer.rope_frequencies =
      (void *)(memory + mha_layout_add(&layout, sizeof(double), frequencies, 1, 1));
  if (frequencies > 0)
    mha_rope_frequencies(&layer.config, layer.rope_frequencies);
  memcpy(memory, &layer, sizeof layer);
  *weights = (mha_weights *)(void *)memory;
  atomic_init(&(*weights)->references, 1);
  (*weights)->serial = atomic_fetch_add(&last_serial, 1) + 1;
  return mha_succeed(error);
}

mha_status mha_weights_create(const mha_config *config, const mha_matrices *matrices,
                              mha_weights **weights, mha_error *error) {
  const mha_status status = mha_require(weights, "weights", error);
  if (status)
    return status;
  *weights = NULL;
  return mha_weights_create_as(config, matrices, MHA_AS_GIVEN, weights, error);
}

mha_weights *mha_weights_retain(mha_weights *weights) {
  if (weights)
    atomic_fetch_add(&weights->references, 1);
  return weights;
}

void mha_weights_destroy(mha_weights *weights) {
  if (!weights || atomic_fetch_sub(&weights->references, 1) != 1)
    return;
  const mha_allocator allocator = weights->allocator;
  mha_release_function *const release = weights->release;
  void *const user = weights->release_user;
  mha_memory_release(&allocator, weights, weights->bytes);
  if (release) /* last: the allocator may be part of what is given back */
    release(user);
}

mha_status mha_weights_config(const mha_weights *weights, mha_config *config, mha_error *error) {
  mha_config known;
  mha_status status = mha_require(weights, "weights", error);
  if (!status)
    status = mha_read_struct(&known, sizeof known, MHA_FIRST_CONFIG, config, "config", error);
  if (status)
    return status;
  mha_write_struct(config, &weights->config, sizeof weights->config);
  return mha_succeed(error);
}

static void show_matrix(const mha_projection *p, bool in_out, const void **matrix, int32_t *element,
                        int64_t *ld, const float **bias) {
  *matrix = p->matrix;
  *element = p->element;
  *ld = !p->matrix ? 0 : in_out ? p->in_stride : p->out_stride;
  *bias = p->bias;
}

mha_status mha_weights_matrices(const mha_weights *w, mha_matrices *matrices, mha_error *error) {
  mha_matrices m;
  mha_status status = mha_require(w, "weights", error);
  if (!status)
    status = mha_read_struct(&m, sizeof m, MHA_FIRST_MATRICES, matrices, "matrices", error);
  if (status)
    return status;
  const bool in_out = w->orientation == MHA_IN_OUT;
  MHA_INIT(&m);
  m.orientation = w->orientation;
  m.ownership = MHA_BORROW;
  show_matrix(&w->query, in_out, &m.query, &m.query_element, &m.query_ld, &m.query_bias);
  show_matrix(&w->key, in_out, &m.key, &m.key_element, &m.key_ld, &m.key_bias);
  show_matrix(&w->value, in_out, &m.value, &m.value_element, &m.value_ld, &m.value_bias);
  show_matrix(&w->output, in_out, &m.output, &m.output_element, &m.output_ld, &m.output_bias);
  m.query_norm = w->query_norm;
  m.key_norm = w->key_norm;
  m.sinks = w->sinks;
  mha_write_struct(matrices, &m, sizeof m);
  return mha_succeed(error);
}
