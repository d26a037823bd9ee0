/* Owns mha_weights: one layer's sizes, matrices and biases. A layer is one block of memory: the
 * object, then the numbers if they are copied. */
#include "weights.h"

#include "arguments.h"
#include "blas.h"
#include "error.h"
#include "memory.h"
#include "rope.h"

#include <math.h>
#include <string.h>

void mha_config_init_sized(mha_config *config, size_t struct_size, int64_t model_width,
                           int64_t n_heads) {
  if (!config || struct_size < MHA_FIRST_CONFIG)
    return;
  mha_struct_init(config, struct_size);
  config->query_width = model_width;
  config->n_heads = n_heads;
}

float mha_default_scale(int64_t d) {
  return (float)(1.0 / sqrt((double)d));
}

/* ---- sizes ---- */

static void derive(int64_t *size, int64_t from) {
  if (*size == 0)
    *size = from;
}

static mha_status divide_width(mha_config *c, mha_error *error) {
  if (c->head_size != 0)
    return MHA_OK;
  if (c->query_width % c->n_heads != 0)
    return mha_fail(
        error, MHA_ERROR_HEADS,
        "config.query_width is %lld with %lld heads; rule: without head_size the width is a "
        "multiple of n_heads",
        (long long)c->query_width, (long long)c->n_heads);
  c->head_size = c->query_width / c->n_heads;
  return MHA_OK;
}

static mha_status check_not_negative(const mha_config *c, mha_error *error) {
  const struct {
    int64_t value;
    const char *name;
  } sizes[] = {{c->n_kv_heads, "config.n_kv_heads"},
               {c->head_size, "config.head_size"},
               {c->value_head_size, "config.value_head_size"},
               {c->query_width, "config.query_width"},
               {c->key_width, "config.key_width"},
               {c->value_width, "config.value_width"},
               {c->output_width, "config.output_width"}};
  mha_status status = mha_require_at_least(c->n_heads, 1, "config.n_heads", error);
  for (size_t k = 0; !status && k < sizeof sizes / sizeof *sizes; k++)
    status = mha_require_at_least(sizes[k].value, 0, sizes[k].name, error);
  return status;
}

static mha_status multiply_heads(int64_t heads, int64_t size, const char *name, int64_t *width,
                                 mha_error *error) {
  if (mha_multiply(heads, size, width) && *width <= MHA_BLAS_MAX)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_OVERFLOW,
                  "%s is %lld with %lld heads; rule: the product is at most %lld, the BLAS's "
                  "integer",
                  name, (long long)size, (long long)heads, (long long)MHA_BLAS_MAX);
}

/* Widths inside the layer: H·d, G·d, G·dv, H·dv. */
typedef struct inner_widths {
  int64_t q, k, v, concat;
} inner_widths;

static mha_status compute_inner(const mha_config *c, inner_widths *w, mha_error *error) {
  mha_status status = multiply_heads(c->n_heads, c->head_size, "config.head_size", &w->q, error);
  if (!status)
    status = multiply_heads(c->n_kv_heads, c->head_size, "config.head_size", &w->k, error);
  if (!status)
    status =
        multiply_heads(c->n_kv_heads, c->value_head_size, "config.value_head_size", &w->v, error);
  if (!status)
    status =
        multiply_heads(c->n_heads, c->value_head_size, "config.value_head_size", &w->concat, error);
  return status;
}

static mha_status check_widths(const mha_config *c, mha_error *error) {
  const struct {
    int64_t value;
    const char *name;
  } widths[] = {
      {c->head_size, "config.head_size"},     {c->value_head_size, "config.value_head_size"},
      {c->query_width, "config.query_width"}, {c->key_width, "config.key_width"},
      {c->value_width, "config.value_width"}, {c->output_width, "config.output_width"}};
  mha_status status = MHA_OK;
  for (size_t k = 0; !status && k < sizeof widths / sizeof *widths; k++) {
    status = mha_require_at_least(widths[k].value, 1, widths[k].name, error);
    if (!status && widths[k].value > MHA_BLAS_MAX)
      status =
          mha_fail(error, MHA_ERROR_OVERFLOW, "%s is %lld; rule: at most %lld, the BLAS's integer",
                   widths[k].name, (long long)widths[k].value, (long long)MHA_BLAS_MAX);
  }
  return status;
}

/* Fills in the sizes that were left 0. An absent matrix forces its input and output widths to be
 * equal, which derives what Eq cannot. */
static mha_status derive_config(mha_config *c, const mha_matrices *m, inner_widths *w,
                                mha_error *error) {
  mha_status status = check_not_negative(c, error);
  if (status)
    return status;
  derive(&c->n_kv_heads, c->n_heads);
  if (c->n_heads % c->n_kv_heads != 0)
    return mha_fail(
        error, MHA_ERROR_HEADS,
        "config.n_heads is %lld and config.n_kv_heads %lld; rule: n_heads is a multiple",
        (long long)c->n_heads, (long long)c->n_kv_heads);
  status = divide_width(c, error);
  derive(&c->value_head_size, c->head_size);
  if (!status)
    status = compute_inner(c, w, error);
  if (status)
    return status;
  if (!m->query)
    derive(&c->query_width, w->q);
  derive(&c->key_width, m->key ? c->query_width : w->k);
  derive(&c->value_width, m->value ? c->query_width : w->v);
  derive(&c->output_width, m->output ? c->query_width : w->concat);
  return check_widths(c, error);
}

static mha_status check_score_rule(mha_config *c, mha_error *error) {
  mha_status status = mha_require_flags(c->flags, MHA_SCALE | MHA_READ_FILE, "config.flags", error);
  if (!status && c->flags & MHA_SCALE)
    status = mha_require_finite(c->scale, "config.scale", error);
  if (!status)
    status = mha_require_finite(c->softcap, "config.softcap", error);
  if (!status && c->softcap < 0.0f)
    status = mha_fail(error, MHA_ERROR_VALUE, "config.softcap is %g; rule: at least 0",
                      (double)c->softcap);
  return status;
}

/* ---- normalisation, positions, sinks ---- */

static mha_status check_norm(const mha_config *c, const mha_matrices *m, mha_error *error) {
  if (c->norm < MHA_NORM_NONE || c->norm > MHA_NORM_FULL)
    return mha_fail(error, MHA_ERROR_VALUE, "config.norm is %d; rule: a value of mha_norm",
                    (int)c->norm);
  if (c->norm == MHA_NORM_NONE && (m->query_norm || m->key_norm))
    return mha_fail(error, MHA_ERROR_WEIGHTS,
                    "matrices.%s is given without config.norm; rule: norm says over what it runs",
                    m->query_norm ? "query_norm" : "key_norm");
  const mha_status status = mha_require_finite(c->norm_epsilon, "config.norm_epsilon", error);
  if (!status && c->norm != MHA_NORM_NONE && !(c->norm_epsilon > 0.0f))
    return mha_fail(error, MHA_ERROR_VALUE,
                    "config.norm_epsilon is %g; rule: greater than 0 where norm is set",
                    (double)c->norm_epsilon);
  return status;
}

static mha_status check_tables(const mha_config *c, mha_error *error) {
  if (!c->rope_cos != !c->rope_sin)
    return mha_fail(error, MHA_ERROR_NULL, "config.rope_%s is NULL; rule: both tables or none",
                    c->rope_cos ? "sin" : "cos");
  if (c->rope == MHA_ROPE_NONE || !c->rope_cos)
    return MHA_OK;
  int64_t elements = 0;
  const mha_status status =
      mha_require_at_least(c->rope_positions, 1, "config.rope_positions", error);
  if (!status && !mha_multiply(c->rope_positions, c->rotary_size / 2, &elements))
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "config.rope_positions is %lld with rotary_size %lld; rule: the tables' size "
                    "must not overflow",
                    (long long)c->rope_positions, (long long)c->rotary_size);
  return status;
}

/* Fills in rotary_size and rope_base; d is known. */
static mha_status derive_rope(mha_config *c, mha_error *error) {
  if (c->rope < MHA_ROPE_NONE || c->rope > MHA_ROPE_INTERLEAVED)
    return mha_fail(error, MHA_ERROR_VALUE, "config.rope is %d; rule: a value of mha_rope",
                    (int)c->rope);
  if (!isfinite(c->rope_base) || c->rope_base < 0.0)
    return mha_fail(error, MHA_ERROR_VALUE,
                    "config.rope_base is %g; rule: finite and greater than 0, or 0 = 10000",
                    c->rope_base);
  if (c->rope != MHA_ROPE_NONE) {
    derive(&c->rotary_size, c->head_size);
    if (c->rope_base == 0.0)
      c->rope_base = 10000.0;
  }
  if (c->rotary_size < 0 || c->rotary_size > c->head_size || c->rotary_size % 2 != 0)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "config.rotary_size is %lld; rule: even and at most the head size, %lld",
                    (long long)c->rotary_size, (long long)c->head_size);
  return check_tables(c, error);
}

/* ---- matrices ---- */

/* One of the four, with all that is checked and copied of it. */
typedef struct matrix_entry {
  const char *name;
  const float *data, *bias;
  int64_t in, out, ld;
  mha_projection *projection;
} matrix_entry;

#define N_MATRICES 4

static void list_matrices(matrix_entry entries[N_MATRICES], mha_weights *layer,
                          const mha_matrices *m, const inner_widths *w) {
  const mha_config *c = &layer->config;
  const matrix_entry list[N_MATRICES] = {
      {"query", m->query, m->query_bias, c->query_width, w->q, m->query_ld, &layer->query},
      {"key", m->key, m->key_bias, c->key_width, w->k, m->key_ld, &layer->key},
      {"value", m->value, m->value_bias, c->value_width, w->v, m->value_ld, &layer->value},
      {"output", m->output, m->output_bias, w->concat, c->output_width, m->output_ld,
       &layer->output}};
  memcpy(entries, list, sizeof list);
}

static int64_t matrix_rows(const matrix_entry *e, int32_t orientation) {
  return orientation == MHA_OUT_IN ? e->out : e->in;
}

static int64_t matrix_columns(const matrix_entry *e, int32_t orientation) {
  return orientation == MHA_OUT_IN ? e->in : e->out;
}

static mha_status check_matrix(matrix_entry *e, int32_t orientation, mha_error *error) {
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
  return MHA_OK;
}

/* Points a projection at numbers that lie `ld` apart. */
static void set_projection(const matrix_entry *e, int32_t orientation, const float *data,
                           const float *bias, int64_t ld) {
  const bool in_out = orientation != MHA_OUT_IN;
  const mha_projection p = {data, bias, e->in, e->out, in_out ? ld : 1, in_out ? 1 : ld};
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
    set_projection(&entries[k], orientation, entries[k].data, entries[k].bias, entries[k].ld);
  for (int k = 0; k < N_VECTORS; k++)
    *vectors[k].place = vectors[k].data;
}

static void copy_matrix(const matrix_entry *e, int32_t orientation, char *base,
                        mha_layout *layout) {
  float *data = NULL;
  float *bias = NULL;
  const int64_t rows = matrix_rows(e, orientation);
  const int64_t columns = matrix_columns(e, orientation);
  if (e->data) {
    data = (void *)(base + mha_layout_add(layout, sizeof *data, rows, columns, 1));
    for (int64_t r = 0; r < rows; r++)
      memcpy(data + r * columns, e->data + r * e->ld, (size_t)columns * sizeof *data);
  }
  if (e->bias) {
    bias = (void *)(base + mha_layout_add(layout, sizeof *bias, e->out, 1, 1));
    memcpy(bias, e->bias, (size_t)e->out * sizeof *bias);
  }
  set_projection(e, orientation, data, bias, columns);
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

/* Bytes of the object and, if they are copied, of the numbers behind it. */
static mha_layout plan_memory(const matrix_entry entries[N_MATRICES],
                              const vector_entry vectors[N_VECTORS], const mha_matrices *m,
                              int64_t frequencies) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(mha_weights), 1, 1, 1);
  for (int k = 0; m->ownership == MHA_COPY && k < N_MATRICES; k++) {
    if (entries[k].data)
      (void)mha_layout_add(&layout, sizeof(float), entries[k].in, entries[k].out, 1);
    if (entries[k].bias)
      (void)mha_layout_add(&layout, sizeof(float), entries[k].out, 1, 1);
  }
  for (int k = 0; m->ownership == MHA_COPY && k < N_VECTORS; k++)
    if (vectors[k].data)
      (void)mha_layout_add(&layout, sizeof(float), vectors[k].n, 1, 1);
  (void)mha_layout_add(&layout, sizeof(double), frequencies, 1, 1);
  return layout;
}

/* ---- creation ---- */

/* Reads and checks everything into `layer`, which lives on the stack until memory is there. */
static mha_status prepare(mha_weights *layer, mha_matrices *m, matrix_entry entries[N_MATRICES],
                          const mha_config *config, const mha_matrices *matrices,
                          mha_error *error) {
  inner_widths widths = {0};
  mha_status status = mha_read_struct(&layer->config, sizeof layer->config, MHA_FIRST_CONFIG,
                                      config, "config", error);
  if (!status)
    status = mha_read_struct(m, sizeof *m, MHA_FIRST_MATRICES, matrices, "matrices", error);
  if (!status && m->ownership != MHA_COPY && m->ownership != MHA_BORROW)
    status = mha_fail(error, MHA_ERROR_VALUE,
                      "matrices.ownership is %d; rule: MHA_COPY or MHA_BORROW", m->ownership);
  if (!status)
    status = check_score_rule(&layer->config, error);
  if (!status)
    status = mha_require_reserved(layer->config.reserved, "config.reserved", error);
  if (!status)
    status = derive_config(&layer->config, m, &widths, error);
  if (!status)
    status = derive_rope(&layer->config, error);
  if (!status)
    status = check_norm(&layer->config, m, error);
  if (!status)
    status = mha_require_sinks(m->sinks, layer->config.n_heads, "matrices.sinks", error);
  if (status)
    return status;
  list_matrices(entries, layer, m, &widths);
  for (int k = 0; !status && k < N_MATRICES; k++)
    status = check_matrix(&entries[k], m->orientation, error);
  const mha_config *c = &layer->config;
  layer->scale = c->flags & MHA_SCALE ? c->scale : mha_default_scale(c->head_size);
  layer->orientation = m->orientation;
  layer->allocator = mha_memory_allocator(c->allocator);
  layer->config.allocator = NULL;
  layer->config.flags &= ~MHA_READ_FILE;
  return status;
}

static mha_status create(const mha_config *config, const mha_matrices *matrices,
                         mha_weights **weights, mha_error *error) {
  mha_weights layer = {.references = 0};
  mha_matrices m;
  matrix_entry entries[N_MATRICES];
  const mha_status status = prepare(&layer, &m, entries, config, matrices, error);
  if (status)
    return status;
  vector_entry vectors[N_VECTORS];
  list_vectors(vectors, &layer, &m);
  const int64_t frequencies = layer.config.rope == MHA_ROPE_NONE || layer.config.rope_cos
                                  ? 0
                                  : layer.config.rotary_size / 2;
  const mha_layout plan = plan_memory(entries, vectors, &m, frequencies);
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
  layer.rope_frequencies =
      (void *)(memory + mha_layout_add(&layout, sizeof(double), frequencies, 1, 1));
  if (frequencies > 0)
    mha_rope_frequencies(&layer.config, layer.rope_frequencies);
  memcpy(memory, &layer, sizeof layer);
  *weights = (mha_weights *)(void *)memory;
  atomic_init(&(*weights)->references, 1);
  return mha_succeed(error);
}

mha_status mha_weights_create_backed(const mha_config *config, const mha_matrices *matrices,
                                     mha_backing backing, mha_weights **weights, mha_error *error) {
  mha_status status = mha_require(weights, "weights", error);
  if (!status) {
    *weights = NULL;
    status = create(config, matrices, weights, error);
  }
  if (weights && *weights)
    (*weights)->backing = backing;
  else if (backing.release)
    backing.release(backing.state);
  return status;
}

mha_status mha_weights_create(const mha_config *config, const mha_matrices *matrices,
                              mha_weights **weights, mha_error *error) {
  const mha_backing none = {NULL, NULL};
  return mha_weights_create_backed(config, matrices, none, weights, error);
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
  if (weights->backing.release)
    weights->backing.release(weights->backing.state);
  mha_memory_release(&allocator, weights, weights->bytes);
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
