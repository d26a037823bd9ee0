/* Owns the way back in `mha run`: dy from a file, a gradient for each thing that the layer and the
 * call have, and a file of its own for each. */
#define _XOPEN_SOURCE 700

#include "gradients.h"

#include "shape.h"
#include "signals.h"

#include "base/error.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
  D_QUERY,
  D_KEY,
  D_VALUE,
  D_WQ,
  D_WK,
  D_WV,
  D_WO,
  D_BQ,
  D_BK,
  D_BV,
  D_BO,
  D_QUERY_NORM,
  D_KEY_NORM,
  D_BIAS,
  D_ALIBI_SLOPES,
  D_SINKS
};

static const char *const names[MHA_N_GRADIENTS] = {
    [D_QUERY] = "d_query",
    [D_KEY] = "d_key",
    [D_VALUE] = "d_value",
    [D_WQ] = "d_wq",
    [D_WK] = "d_wk",
    [D_WV] = "d_wv",
    [D_WO] = "d_wo",
    [D_BQ] = "d_bq",
    [D_BK] = "d_bk",
    [D_BV] = "d_bv",
    [D_BO] = "d_bo",
    [D_QUERY_NORM] = "d_query_norm",
    [D_KEY_NORM] = "d_key_norm",
    [D_BIAS] = "d_bias",
    [D_ALIBI_SLOPES] = "d_alibi_slopes",
    [D_SINKS] = "d_sinks",
};

/* ---- Files ----------------------------------------------------------------------------------- */

mha_status mha_gradients_name(const mha_options *options, mha_gradients *g,
                              mha_result results[MHA_N_GRADIENTS], mha_error *error) {
  const mha_option_value *value = &options->values[MHA_OPTION_GRADIENTS];
  const char *name = mha_option_name(MHA_OPTION_GRADIENTS);
  g->wanted = value->given;
  for (int i = 0; i < MHA_N_GRADIENTS; i++)
    results[i] = (mha_result){name, NULL, NULL};
  if (!g->wanted)
    return MHA_OK;
  size_t length = strlen(value->text);
  while (length > 1 && value->text[length - 1] == '/')
    length--;
  if (length >= sizeof g->folder - 32) /* a slash and the longest of the names behind it */
    return mha_fail_system(value->text, "written", ENAMETOOLONG, error);
  memcpy(g->folder, value->text, length);
  for (int i = 0; i < MHA_N_GRADIENTS; i++) {
    memcpy(g->paths[i], g->folder, length);
    (void)snprintf(g->paths[i] + length, sizeof g->paths[i] - length, "/%s.npy", names[i]);
    results[i] = (mha_result){name, g->paths[i], g->folder};
  }
  return MHA_OK;
}

/* No signal comes between the folder and the note that it is to be removed. */
mha_status mha_gradients_make_folder(mha_gradients *g, mha_error *error) {
  if (!g->wanted)
    return MHA_OK;
  mha_signals_hold();
  const mha_status status = mha_output_make_folder(g->folder, &g->made_folder, error);
  mha_signals_watch_folder(g->made_folder ? g->folder : NULL);
  mha_signals_let_go();
  return status;
}

void mha_gradients_leave_folder(mha_gradients *g, bool failed) {
  mha_signals_watch_folder(NULL);
  if (failed && g->made_folder)
    (void)rmdir(g->folder);
  g->made_folder = false;
}

/* ---- What comes from above ------------------------------------------------------------------- */

/* [Lq][Eo] or [B][Lq][Eo], as the output. */
static mha_status read_dy(const char *path, const mha_npy_array *query, int64_t width,
                          mha_npy_array *dy, mha_error *error) {
  const mha_status status = mha_npy_read(path, MHA_NPY_FLOATS, NULL, dy, error);
  if (status)
    return status;
  const int last = query->rank - 1;
  bool fits = dy->rank == query->rank && dy->shape[last] == width;
  for (int axis = 0; fits && axis < last; axis++)
    fits = dy->shape[axis] == query->shape[axis];
  return fits ? MHA_OK
              : mha_shape_fail(path, dy, "the shape of the output, [Lq][Eo] or [B][Lq][Eo]", error);
}

/* ---- Memory for gradients -------------------------------------------------------------------- */

/* The things that gradients are of, in one place: a first failure stays, and what comes behind it
 * is left out. */
typedef struct makes {
  mha_gradients *gradients;
  mha_status status;
  mha_error *error;
} makes;

static void make(makes *m, int which, const void *thing, int rank, const int64_t *shape,
                 float **gradient) {
  mha_array *array = &m->gradients->arrays[which];
  if (!thing || m->status)
    return;
  m->status = mha_array_make(array, m->gradients->paths[which], rank, shape, m->error);
  *gradient = array->data;
}

static void make_like(makes *m, int which, const mha_npy_array *thing, float **gradient) {
  make(m, which, thing->data, thing->rank, thing->shape, gradient);
}

static void make_vector(makes *m, int which, const float *thing, int64_t n, float **gradient) {
  make(m, which, thing, 1, &n, gradient);
}

/* W is [in][out] or [out][in], and its gradient has the same leading dimension. */
static void make_matrix(makes *m, int which, const mha_matrices *w, const void *thing, int64_t ld,
                        int64_t in, int64_t out, float **gradient) {
  mha_array *array = &m->gradients->arrays[which];
  const bool in_out = w->orientation == MHA_IN_OUT;
  const int64_t rows = in_out ? in : out;
  const int64_t columns = in_out ? out : in;
  if (!thing || m->status)
    return;
  m->status = mha_array_make_matrix(array, m->gradients->paths[which], rows, columns,
                                    ld > columns ? ld : columns, m->error);
  *gradient = array->data;
}

static void make_of_layer(makes *m, const mha_config *c, const mha_matrices *w,
                          mha_backward_args *a) {
  const int64_t q = c->n_heads * c->head_size;
  const int64_t k = c->n_kv_heads * c->head_size;
  const int64_t v = c->n_kv_heads * c->value_head_size;
  const int64_t concat = c->n_heads * c->value_head_size;
  const bool full = c->norm == MHA_NORM_FULL;
  make_matrix(m, D_WQ, w, w->query, w->query_ld, c->query_width, q, &a->d_wq);
  make_matrix(m, D_WK, w, w->key, w->key_ld, c->key_width, k, &a->d_wk);
  make_matrix(m, D_WV, w, w->value, w->value_ld, c->value_width, v, &a->d_wv);
  make_matrix(m, D_WO, w, w->output, w->output_ld, concat, c->output_width, &a->d_wo);
  make_vector(m, D_BQ, w->query_bias, q, &a->d_bq);
  make_vector(m, D_BK, w->key_bias, k, &a->d_bk);
  make_vector(m, D_BV, w->value_bias, v, &a->d_bv);
  make_vector(m, D_BO, w->output_bias, c->output_width, &a->d_bo);
  make_vector(m, D_QUERY_NORM, w->query_norm, full ? q : c->head_size, &a->d_query_norm);
  make_vector(m, D_KEY_NORM, w->key_norm, full ? k : c->head_size, &a->d_key_norm);
}

static void make_of_call(makes *m, const mha_config *c, const mha_matrices *w,
                         const mha_gradient_sources *s, const mha_rules *r, mha_backward_args *a) {
  make_like(m, D_QUERY, s->query, &a->d_query);
  make_like(m, D_KEY, s->key, &a->d_key);
  make_like(m, D_VALUE, s->value, &a->d_value);
  make_like(m, D_BIAS, s->bias, &a->d_bias);
  make_vector(m, D_ALIBI_SLOPES, r->alibi_slopes, c->n_heads, &a->d_alibi_slopes);
  make_vector(m, D_SINKS, r->sinks ? r->sinks : w->sinks, c->n_heads, &a->d_sinks);
}

/* ---- The way back ---------------------------------------------------------------------------- */

mha_status mha_gradients_prepare(const mha_options *options, const mha_weights *weights,
                                 const mha_gradient_sources *sources, mha_forward_args *args,
                                 mha_gradients *g, mha_error *error) {
  mha_config config;
  mha_matrices matrices;
  makes m = {.gradients = g, .error = error};
  if (!g->wanted)
    return MHA_OK;
  MHA_INIT(&config);
  MHA_INIT(&matrices);
  MHA_INIT(&g->args);
  mha_status status = mha_weights_config(weights, &config, error);
  if (!status)
    status = mha_weights_matrices(weights, &matrices, error);
  if (!status)
    status = read_dy(options->values[MHA_OPTION_BACKWARD].text, sources->query, config.output_width,
                     &g->dy, error);
  if (!status)
    status = mha_tape_create(NULL, &g->tape, error);
  if (status)
    return status;
  args->tape = g->tape;
  g->args.tape = g->tape;
  g->args.dy = g->dy.data;
  make_of_layer(&m, &config, &matrices, &g->args);
  make_of_call(&m, &config, &matrices, sources, args->rules, &g->args);
  return m.status;
}

mha_status mha_gradients_compute(const mha_calls *calls, mha_context *context,
                                 const mha_weights *weights, const mha_forward_args *args,
                                 const mha_gradients *g, mha_error *error) {
  return g->wanted ? calls->backward(calls->user, context, weights, args, &g->args, error) : MHA_OK;
}

void mha_gradients_release(mha_gradients *g) {
  mha_npy_array_release(&g->dy);
  mha_tape_destroy(g->tape);
  for (int i = 0; i < MHA_N_GRADIENTS; i++)
    mha_array_release(&g->arrays[i]);
}
