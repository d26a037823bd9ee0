/* Owns layers: their making from arrays, and what else is done with one. */
#include "session.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- making one ---- */

typedef struct layer_trial {
  fuzz_trial trial;  /* first */
  fuzz_pool lasting; /* arrays that the layer goes on reading */
  mha_config full;   /* nothing left out */
  const mha_config *config;
  const mha_matrices *matrices;
  mha_weights *made[2];
  int32_t element; /* of the matrices */
  float *borrowed;
  bool no_handle, no_config, no_matrices;
} layer_trial;

/* Puts a layer of the trial's type in the place of one of float32. */
static mha_status convert_layer(const layer_trial *t, mha_weights **layer, mha_error *error) {
  mha_weights *converted = (mha_weights *)(uintptr_t)t; /* to be overwritten */
  mha_matrices matrices;
  const mha_status status =
      mha_weights_convert(*layer, t->element, &t->trial.session->home.mha, &converted, error);
  FUZZ_CHECK((status == MHA_OK) == (converted != NULL));
  mha_weights_destroy(*layer);
  *layer = converted;
  if (status)
    return status;
  MHA_INIT(&matrices);
  FUZZ_CHECK(mha_weights_matrices(converted, &matrices, NULL) == MHA_OK);
  FUZZ_CHECK(!matrices.query || matrices.query_element == t->element);
  FUZZ_CHECK(!matrices.output || matrices.output_element == t->element);
  return status;
}

static mha_status make_layer(fuzz_trial *trial, mha_context *context, bool again,
                             mha_error *error) {
  layer_trial *t = (layer_trial *)trial;
  mha_weights **made = &t->made[again];
  (void)context;
  *made = (mha_weights *)trial; /* to be overwritten */
  mha_status status = mha_weights_create(t->config, t->matrices, t->no_handle ? NULL : made, error);
  FUZZ_CHECK(t->no_handle || (status == MHA_OK) == (*made != NULL));
  if (status || t->no_handle)
    *made = NULL;
  else if (t->element != MHA_F32)
    status = convert_layer(t, made, error);
  return status;
}

/* Sizes that go together, all of them filled in. Which matrices are absent is in `absent`. */
static void choose_sizes(fuzz_reader *r, mha_config *c, bool absent[4]) {
  static const int64_t head_counts[] = {2, 1, 4, 3, 6, 5};
  static const int64_t head_sizes[] = {2, 1, 3, 4, 5, 6, 8, 9};
  const int64_t H = head_counts[fuzz_read(r, 0, 5)];
  const int64_t share = fuzz_read(r, 1, 3);
  for (int k = 0; k < 4; k++)
    absent[k] = fuzz_read_one_in(r, 6);
  c->n_heads = H;
  c->n_kv_heads = H % share == 0 ? H / share : 1;
  c->head_size = head_sizes[fuzz_read(r, 0, 7)];
  c->value_head_size = fuzz_read_one_in(r, 3) ? head_sizes[fuzz_read(r, 0, 7)] : c->head_size;
  c->query_width = absent[0] ? H * c->head_size : fuzz_read(r, 1, 20);
  c->key_width = c->query_width;
  if (absent[1] || fuzz_read_one_in(r, 4))
    c->key_width = absent[1] ? c->n_kv_heads * c->head_size : fuzz_read(r, 1, 9);
  c->value_width = c->key_width;
  if (absent[2] || fuzz_read_one_in(r, 4))
    c->value_width = absent[2] ? c->n_kv_heads * c->value_head_size : fuzz_read(r, 1, 9);
  c->output_width = absent[3] ? H * c->value_head_size : fuzz_read(r, 1, 20);
}

static void choose_tables(layer_trial *t, mha_config *c) {
  c->rope_positions = fuzz_read(t->trial.reader, 1, 80);
  const int64_t n = c->rope_positions * (c->rotary_size / 2);
  float *cosines = fuzz_pool_floats(&t->lasting, n);
  float *sines = fuzz_pool_floats(&t->lasting, n);
  fuzz_read_floats(t->trial.reader, cosines, n);
  fuzz_read_floats(t->trial.reader, sines, n);
  c->rope_cos = cosines;
  c->rope_sin = sines;
}

static void choose_rules(layer_trial *t, mha_config *c) {
  fuzz_reader *r = t->trial.reader;
  if (fuzz_read_one_in(r, 4)) {
    c->flags |= MHA_SCALE;
    c->scale = fuzz_read_finite(r);
  }
  if (fuzz_read_one_in(r, 4))
    c->softcap = fabsf(fuzz_read_finite(r));
  if (fuzz_read_one_in(r, 3)) {
    c->norm = (int32_t)fuzz_read(r, MHA_NORM_PER_HEAD, MHA_NORM_FULL);
    c->norm_epsilon = 1e-5f;
  }
  if (fuzz_read_one_in(r, 2) && c->head_size >= 2) {
    c->rope = (int32_t)fuzz_read(r, MHA_ROPE_HALVES, MHA_ROPE_INTERLEAVED);
    c->rotary_size = fuzz_read(r, 0, c->head_size / 2) * 2;
    if (c->rotary_size == 0)
      c->rotary_size = c->head_size / 2 * 2;
    c->rope_base = fuzz_read_one_in(r, 4) ? 1e-3 : 10000.0;
    if (fuzz_read_one_in(r, 3))
      choose_tables(t, c);
  }
}

/* [rows][columns], `ld` apart. */
static float *choose_matrix(layer_trial *t, fuzz_pool *pool, int64_t in, int64_t out,
                            int32_t orientation, int64_t *ld) {
  fuzz_reader *r = t->trial.reader;
  const int64_t rows = orientation == MHA_IN_OUT ? in : out;
  const int64_t columns = orientation == MHA_IN_OUT ? out : in;
  const int64_t pad = fuzz_read_one_in(r, 4) ? fuzz_read(r, 0, 3) : 0;
  const int64_t n = (rows - 1) * (columns + pad) + columns;
  float *data = fuzz_pool_floats(pool, n);
  *ld = pad > 0 || fuzz_read_one_in(r, 2) ? columns + pad : 0;
  fuzz_read_floats(r, data, n);
  return data;
}

static float *choose_vector(layer_trial *t, fuzz_pool *pool, int64_t n) {
  float *data = NULL;
  if (fuzz_read_one_in(t->trial.reader, 2)) {
    data = fuzz_pool_floats(pool, n);
    fuzz_read_floats(t->trial.reader, data, n);
  }
  return data;
}

static void choose_matrices(layer_trial *t, const mha_config *c, const bool absent[4],
                            mha_matrices *m) {
  fuzz_reader *r = t->trial.reader;
  const int64_t q = c->n_heads * c->head_size;
  const int64_t k = c->n_kv_heads * c->head_size;
  const int64_t v = c->n_kv_heads * c->value_head_size;
  const int64_t concat = c->n_heads * c->value_head_size;
  m->orientation = (int32_t)fuzz_read(r, MHA_IN_OUT, MHA_OUT_IN);
  m->ownership = (int32_t)fuzz_read(r, MHA_COPY, MHA_BORROW);
  fuzz_pool *pool = m->ownership == MHA_BORROW ? &t->lasting : &t->trial.pool;
  const struct {
    const void **matrix;
    const float **bias;
    int64_t *ld;
    int64_t in, out;
  } entries[] = {{&m->query, &m->query_bias, &m->query_ld, c->query_width, q},
                 {&m->key, &m->key_bias, &m->key_ld, c->key_width, k},
                 {&m->value, &m->value_bias, &m->value_ld, c->value_width, v},
                 {&m->output, &m->output_bias, &m->output_ld, concat, c->output_width}};
  for (int e = 0; e < 4; e++) {
    float *data = absent[e] ? NULL
                            : choose_matrix(t, pool, entries[e].in, entries[e].out, m->orientation,
                                            entries[e].ld);
    if (data && m->ownership == MHA_BORROW)
      t->borrowed = data;
    *entries[e].matrix = data;
    *entries[e].bias = choose_vector(t, pool, entries[e].out);
  }
  const bool full = c->norm == MHA_NORM_FULL;
  if (c->norm != MHA_NORM_NONE) {
    m->query_norm = choose_vector(t, pool, full ? q : c->head_size);
    m->key_norm = choose_vector(t, pool, full ? k : c->head_size);
  }
  if (fuzz_read_one_in(r, 4)) {
    float *sinks = fuzz_pool_floats(pool, c->n_heads);
    fuzz_read_finites(r, sinks, c->n_heads);
    if (fuzz_read_one_in(r, 4))
      sinks[0] = -INFINITY;
    m->sinks = sinks;
  }
}

/* Takes back what can be derived. */
static void leave_out(fuzz_reader *r, mha_config *c, const mha_matrices *m) {
  const mha_config full = *c;
  const int64_t k = full.n_kv_heads * full.head_size;
  const int64_t v = full.n_kv_heads * full.value_head_size;
  const int64_t concat = full.n_heads * full.value_head_size;
  const struct {
    int64_t *size;
    bool derivable;
  } sizes[] = {{&c->n_kv_heads, full.n_kv_heads == full.n_heads},
               {&c->head_size, full.query_width == full.n_heads * full.head_size},
               {&c->value_head_size, full.value_head_size == full.head_size},
               {&c->key_width, full.key_width == (m->key ? full.query_width : k)},
               {&c->value_width, full.value_width == (m->value ? full.query_width : v)},
               {&c->output_width, full.output_width == (m->output ? full.query_width : concat)},
               {&c->rotary_size, c->rope != 0 && full.rotary_size == full.head_size}};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    if (sizes[i].derivable && fuzz_read_one_in(r, 2))
      *sizes[i].size = 0;
  if (c->rope_base == 10000.0 && fuzz_read_one_in(r, 2))
    c->rope_base = 0.0;
}

/* ---- what is refused ---- */

static void spoil_sizes(layer_trial *t, mha_config *c) {
  fuzz_reader *r = t->trial.reader;
  int64_t *sizes[] = {&c->n_heads,     &c->n_kv_heads,    &c->head_size,   &c->value_head_size,
                      &c->key_width,   &c->value_width,   &c->query_width, &c->output_width,
                      &c->rotary_size, &c->rope_positions};
  const int64_t which = fuzz_read(r, 0, 9);
  *sizes[which] = fuzz_read_no_size(r);
  if (which < 9) /* tables are looked at only where positions are rotary */
    fuzz_trial_refuse(&t->trial, true);
  else
    fuzz_trial_refuse(&t->trial, c->rope_cos && c->rope_positions < 0);
}

static void spoil_numbers(layer_trial *t, mha_config *c) {
  fuzz_reader *r = t->trial.reader;
  fuzz_trial_refuse(&t->trial, true);
  switch (fuzz_read(r, 0, 7)) {
  case 0:
    c->flags |= MHA_SCALE;
    c->scale = fuzz_read_not_finite(r);
    break;
  case 1:
    c->softcap = fuzz_read_one_in(r, 2) ? fuzz_read_not_finite(r) : -1.0f;
    break;
  case 2:
    c->norm = MHA_NORM_FULL;
    c->norm_epsilon = fuzz_read_one_in(r, 2) ? fuzz_read_not_finite(r) : -0.0f;
    break;
  case 3:
    c->norm = fuzz_read_no_enumerator(r, MHA_NORM_NONE, MHA_NORM_FULL);
    break;
  case 4:
    c->rope = fuzz_read_no_enumerator(r, MHA_ROPE_NONE, MHA_ROPE_INTERLEAVED);
    break;
  case 5:
    c->rope_base = fuzz_read_one_in(r, 2) ? (double)fuzz_read_not_finite(r) : -1.0;
    break;
  case 6:
    c->reserved = fuzz_read_no_enumerator(r, 0, 0);
    break;
  default: { /* MHA_KEEP_TYPE, bit 7, is no mistake */
    const int64_t bit = fuzz_read(r, 5, 31);
    c->flags |= UINT32_C(1) << (bit == 7 ? 8 : bit);
  }
  }
}

/* Rows of a matrix as it lies. */
static int64_t stored_rows(const mha_config *c, int32_t orientation, int64_t which) {
  const int64_t in[] = {c->query_width, c->key_width, c->value_width,
                        c->n_heads * c->value_head_size};
  const int64_t out[] = {c->n_heads * c->head_size, c->n_kv_heads * c->head_size,
                         c->n_kv_heads * c->value_head_size, c->output_width};
  return orientation == MHA_IN_OUT ? in[which] : out[which];
}

static void spoil_matrices(layer_trial *t, const mha_config *c, mha_matrices *m) {
  fuzz_reader *r = t->trial.reader;
  int64_t *lds[] = {&m->query_ld, &m->key_ld, &m->value_ld, &m->output_ld};
  const float *matrices[] = {m->query, m->key, m->value, m->output};
  const int64_t which = fuzz_read(r, 0, 3);
  const bool any = m->query || m->key || m->value || m->output;
  switch (fuzz_read(r, 0, 4)) {
  case 0:
    m->orientation = fuzz_read_no_enumerator(r, MHA_IN_OUT, MHA_OUT_IN);
    fuzz_trial_refuse(&t->trial, any);
    break;
  case 1:
    m->ownership = fuzz_read_no_enumerator(r, MHA_COPY, MHA_BORROW);
    fuzz_trial_refuse(&t->trial, true);
    break;
  case 2:
    *lds[which] = fuzz_read_no_size(r);
    if (matrices[which] && stored_rows(&t->full, m->orientation, which) > 1)
      fuzz_trial_refuse(&t->trial, true);
    break;
  case 3:
    if (m->query && c->head_size != 0 && c->query_width != c->n_heads * c->head_size) {
      m->query = NULL;
      fuzz_trial_refuse(&t->trial, true);
    }
    break;
  default:
    if (m->sinks) {
      float *sinks = fuzz_pool_floats(&t->lasting, c->n_heads);
      memset(sinks, 0, (size_t)c->n_heads * sizeof *sinks);
      sinks[fuzz_read(r, 0, c->n_heads - 1)] = fuzz_read_one_in(r, 2) ? INFINITY : NAN;
      m->sinks = sinks;
      fuzz_trial_refuse(&t->trial, true);
    }
  }
}

static void spoil_layer(layer_trial *t, mha_config *c, mha_matrices *m) {
  switch (fuzz_read(t->trial.reader, 0, 7)) {
  case 0:
  case 1:
    spoil_sizes(t, c);
    break;
  case 2:
    spoil_numbers(t, c);
    break;
  case 3:
    spoil_matrices(t, c, m);
    break;
  case 4:
    t->config = fuzz_trial_struct(&t->trial, c, sizeof *c, true);
    fuzz_trial_refuse(&t->trial, true);
    break;
  case 5:
    t->matrices = fuzz_trial_struct(&t->trial, m, sizeof *m, true);
    fuzz_trial_refuse(&t->trial, true);
    break;
  case 6:
    t->no_handle = true;
    fuzz_trial_refuse(&t->trial, true);
    break;
  default:
    t->no_config = fuzz_read_one_in(t->trial.reader, 2);
    t->no_matrices = !t->no_config;
    fuzz_trial_refuse(&t->trial, true);
  }
}

/* ---- the layer ---- */

/* What the library says of the layer is what it was made from. */
static void check_config(const mha_weights *weights, const mha_config *full) {
  mha_config c;
  mha_error error;
  MHA_INIT(&c);
  FUZZ_CHECK(mha_weights_config(weights, &c, &error) == MHA_OK);
  FUZZ_CHECK(c.n_heads == full->n_heads && c.n_kv_heads == full->n_kv_heads);
  FUZZ_CHECK(c.head_size == full->head_size && c.value_head_size == full->value_head_size);
  FUZZ_CHECK(c.query_width == full->query_width && c.key_width == full->key_width);
  FUZZ_CHECK(c.value_width == full->value_width && c.output_width == full->output_width);
  FUZZ_CHECK(c.rope == full->rope && c.rotary_size == full->rotary_size);
  FUZZ_CHECK(c.norm == full->norm && c.softcap == full->softcap && !c.allocator);
}

static void keep_layer(layer_trial *t, const mha_matrices *m, fuzz_layer *layer) {
  const int64_t ld[] = {m->query_ld, m->key_ld, m->value_ld, m->output_ld};
  check_config(t->made[0], &t->full);
  fuzz_end_layer(layer);
  layer->weights = t->made[0];
  layer->references = 1;
  layer->config = t->full;
  memset(layer->ld, 0, sizeof layer->ld);
  if (t->element == MHA_F32)
    memcpy(layer->ld, ld, sizeof layer->ld);
  layer->arrays = t->lasting;
  layer->borrowed = t->element == MHA_F32 ? t->borrowed : NULL;
}

void fuzz_make_layer(fuzz_session *session) {
  layer_trial t = {.config = NULL};
  mha_config c;
  mha_matrices m;
  bool absent[4];
  fuzz_trial_begin(&t.trial, session);
  fuzz_reader *r = t.trial.reader;
  t.trial.make = make_layer;
  t.lasting.shift = t.trial.pool.shift;
  MHA_INIT(&c);
  MHA_INIT(&m);
  choose_sizes(r, &c, absent);
  choose_rules(&t, &c);
  choose_matrices(&t, &c, absent, &m);
  t.full = c;
  /* from what is read already: the inputs there are keep their meaning */
  t.element = (int32_t)((c.n_heads + c.head_size + c.query_width) % (MHA_BF16 + 1));
  leave_out(r, &c, &m);
  const mha_allocator home = session->home.mha;
  c.allocator = &home;
  const bool was_hostile = t.trial.hostile;
  if (t.trial.hostile)
    spoil_layer(&t, &c, &m);
  if (!t.config && !t.no_config)
    t.config = fuzz_trial_struct(&t.trial, &c, sizeof c, false);
  if (!t.matrices && !t.no_matrices)
    t.matrices = fuzz_trial_struct(&t.trial, &m, sizeof m, false);
  const mha_status status = fuzz_trial_run(&t.trial);
  mha_weights_destroy(t.made[1]);
  if (status == MHA_OK && !was_hostile) {
    keep_layer(&t, &m, &session->layers[fuzz_read(r, 0, FUZZ_N_LAYERS - 1)]);
    return;
  }
  mha_weights_destroy(t.made[0]);
  fuzz_pool_free(&t.lasting);
}

void fuzz_end_layer(fuzz_layer *layer) {
  for (; layer->references > 0; layer->references--)
    mha_weights_destroy(layer->weights);
  fuzz_pool_free(&layer->arrays);
  layer->weights = NULL;
  layer->borrowed = NULL;
}

/* ---- what else is done with one ---- */

typedef struct config_trial {
  fuzz_trial trial; /* first */
  const mha_weights *weights;
  mha_config *into;
} config_trial;

static mha_status ask_for_config(fuzz_trial *trial, mha_context *context, bool again,
                                 mha_error *error) {
  const config_trial *t = (const config_trial *)trial;
  (void)context, (void)again;
  return mha_weights_config(t->weights, t->into, error);
}

static void try_config(fuzz_session *session, const fuzz_layer *layer) {
  config_trial t = {.weights = layer->weights};
  mha_config c;
  fuzz_trial_begin(&t.trial, session);
  t.trial.make = ask_for_config;
  MHA_INIT(&c);
  const bool hostile = t.trial.hostile;
  const int64_t kind = hostile ? fuzz_read(t.trial.reader, 0, 2) : 3;
  if (hostile)
    fuzz_trial_refuse(&t.trial, true);
  if (kind != 0)
    t.into = fuzz_trial_struct(&t.trial, &c, sizeof c, kind == 2);
  if (kind == 1)
    t.weights = NULL;
  if (!hostile) { /* all but the size is written */
    t.trial.pool.first->runs = FUZZ_BOTH_RUNS;
    fuzz_pool_allow(&t.trial.pool, (char *)t.into + sizeof(size_t), sizeof c - sizeof(size_t));
  }
  (void)fuzz_trial_run(&t.trial);
}

void fuzz_try_layer(fuzz_session *session) {
  fuzz_layer *layer = &session->layers[fuzz_read(session->reader, 0, FUZZ_N_LAYERS - 1)];
  const int64_t kind = fuzz_read(session->reader, 0, 2);
  if (!layer->weights)
    return;
  if (kind == 0) {
    try_config(session, layer);
  } else if (kind == 1) {
    FUZZ_CHECK(mha_weights_retain(layer->weights) == layer->weights);
    layer->references++;
  } else if (layer->references > 1) {
    mha_weights_destroy(layer->weights);
    layer->references--;
  }
}

/* ---- files, as far as they are never there ---- */

typedef struct file_trial {
  fuzz_trial trial; /* first */
  const mha_config *config;
  const mha_weights *weights;
  const char *path;
  bool save, no_handle;
} file_trial;

static mha_status use_file(fuzz_trial *trial, mha_context *context, bool again, mha_error *error) {
  const file_trial *t = (const file_trial *)trial;
  mha_weights *made = (mha_weights *)trial;
  (void)context, (void)again;
  if (t->save)
    return mha_weights_save(t->weights, t->path, "a.", error);
  const mha_status status =
      mha_weights_load(t->config, t->path, NULL, t->no_handle ? NULL : &made, error);
  FUZZ_CHECK(t->no_handle || !made);
  return status;
}

void fuzz_try_files(fuzz_session *session) {
  file_trial t = {.weights = session->layers[0].weights, .path = "/dev/null/fuzz"};
  mha_config c;
  fuzz_trial_begin(&t.trial, session);
  fuzz_reader *r = t.trial.reader;
  t.trial.make = use_file;
  mha_config_init(&c, fuzz_read(r, 0, 9), fuzz_read(r, 0, 4));
  t.save = fuzz_read_one_in(r, 2);
  t.config = fuzz_trial_struct(&t.trial, &c, sizeof c, false);
  if (t.trial.hostile) {
    const int64_t kind = fuzz_read(r, 0, 3);
    t.path = kind == 0 ? NULL : t.path;
    t.config = kind == 1 ? NULL : t.config;
    t.weights = kind == 2 ? NULL : t.weights;
    t.no_handle = kind == 3;
  }
  t.trial.expect = FUZZ_FAILURE;
  (void)fuzz_trial_run(&t.trial);
}
