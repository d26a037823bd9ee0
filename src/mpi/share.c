/* Owns a process's share of a layer: columns of Wq, Wk and Wv and rows of Wo of the whole one,
 * which libmha itself reads and checks, seen through pointers and leading dimensions. */
#include "share.h"

#include "agree.h"
#include "base/arguments.h"
#include "base/error.h"

/* ---- which heads ---- */

/* Heads [r·H/n, (r+1)·H/n), and the key heads g = h/(H/G) that serve them: G/n of them, or one that
 * serves n/G processes. */
static mha_status cut_heads(mha_mpi_weights *w, mha_error *error) {
  const int64_t H = w->whole.n_heads;
  const int64_t G = w->whole.n_kv_heads;
  const int64_t n = w->n;
  if (H % n != 0 || (G % n != 0 && n % G != 0))
    return mha_fail(error, MHA_ERROR_HEADS,
                    "config has %lld heads and %lld key heads for %lld processes; rule: their "
                    "number divides the heads, and the key heads or is a multiple of them",
                    (long long)H, (long long)G, (long long)n);
  if (n > 1 && w->whole.norm == MHA_NORM_FULL)
    return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                    "config.norm is MHA_NORM_FULL with %lld processes; rule: rows that go over all "
                    "heads are not cut",
                    (long long)n);
  w->n_heads = H / n;
  w->n_kv_heads = mha_max(G / n, 1);
  w->sharers = (int32_t)mha_max(n / G, 1);
  w->first_head = w->head * w->n_heads;
  w->first_kv_head = w->first_head / (H / G);
  return MHA_OK;
}

mha_mpi_columns mha_mpi_share_columns(const mha_mpi_weights *w) {
  const int64_t d = w->whole.head_size;
  const int64_t dv = w->whole.value_head_size;
  const mha_mpi_columns at = {w->first_head * d, w->first_kv_head * d, w->first_kv_head * dv,
                              w->first_head * dv};
  return at;
}

/* ---- its numbers ---- */

/* A matrix of which the process has some rows or columns of the dimension that goes over heads. */
typedef struct piece {
  const void **matrix;
  int64_t *ld;
  int32_t element;
  bool heads_are_stored_rows; /* otherwise each stored row has a part of the process's */
  int64_t first, length;      /* of that dimension */
  const char *name;
} piece;

static mha_status cut_matrix(const piece *p, mha_error *error) {
  if (!*p->matrix)
    return MHA_OK;
  const int64_t begin = p->heads_are_stored_rows ? p->first * *p->ld : p->first;
  const int64_t block = mha_element_bytes(p->element, 1) > 0 ? 1 : 32; /* one number, or a block */
  if (begin % block != 0 || (!p->heads_are_stored_rows && p->length % block != 0))
    return mha_fail(error, MHA_ERROR_SIZE,
                    "%s is %s and the process has columns %lld to %lld of its stored rows; rule: "
                    "whole blocks of %lld",
                    p->name, mha_element_name(p->element), (long long)p->first,
                    (long long)(p->first + p->length - 1), (long long)block);
  const char *bytes = *p->matrix;
  *p->matrix = bytes + mha_element_bytes(p->element, begin);
  return MHA_OK;
}

static const float *from(const float *numbers, int64_t first) {
  return numbers ? numbers + first : NULL;
}

static mha_status cut_matrices(const mha_mpi_weights *w, mha_matrices *m, mha_error *error) {
  const mha_mpi_columns at = mha_mpi_share_columns(w);
  const bool out_in = m->orientation == MHA_OUT_IN;
  const int64_t d = w->whole.head_size;
  const int64_t dv = w->whole.value_head_size;
  const piece pieces[] = {
      {&m->query, &m->query_ld, m->query_element, out_in, at.q, w->n_heads * d, "Wq"},
      {&m->key, &m->key_ld, m->key_element, out_in, at.k, w->n_kv_heads * d, "Wk"},
      {&m->value, &m->value_ld, m->value_element, out_in, at.v, w->n_kv_heads * dv, "Wv"},
      {&m->output, &m->output_ld, m->output_element, !out_in, at.concat, w->n_heads * dv, "Wo"}};
  mha_status status = MHA_OK;
  for (size_t i = 0; !status && i < sizeof pieces / sizeof *pieces; i++)
    status = cut_matrix(&pieces[i], error);
  m->query_bias = from(m->query_bias, at.q);
  m->key_bias = from(m->key_bias, at.k);
  m->value_bias = from(m->value_bias, at.v);
  if (w->absent[3]) /* the process has its own columns of the output */
    m->output_bias = from(m->output_bias, at.concat);
  else if (w->head > 0) /* the sum over processes has it once */
    m->output_bias = NULL;
  m->sinks = from(m->sinks, w->first_head);
  return status;
}

/* The share's sizes: an absent matrix is the identity on the process's columns. */
static mha_config cut_config(const mha_mpi_weights *w, uint32_t flags) {
  mha_config c = w->whole;
  c.struct_size = sizeof c;
  c.flags = flags;
  c.n_heads = w->n_heads;
  c.n_kv_heads = w->n_kv_heads;
  if (w->absent[0])
    c.query_width = w->n_heads * c.head_size;
  if (w->absent[1])
    c.key_width = w->n_kv_heads * c.head_size;
  if (w->absent[2])
    c.value_width = w->n_kv_heads * c.value_head_size;
  if (w->absent[3])
    c.output_width = w->n_heads * c.value_head_size;
  c.allocator = &w->allocator;
  return c;
}

static void release_whole(void *user) {
  mha_weights_destroy(user);
}

/* What becomes of the whole layer: it goes at once, or when the share does; and in which type the
 * share's matrices are kept. */
typedef struct keeping {
  int32_t ownership; /* of the share */
  uint32_t flags;    /* of the share's config */
  bool widen;        /* to float32 */
} keeping;

static bool is_stored(const mha_matrices *m) {
  const int32_t elements[] = {m->query_element, m->key_element, m->value_element,
                              m->output_element};
  for (size_t i = 0; i < sizeof elements / sizeof *elements; i++)
    if (elements[i] != MHA_F32)
      return true;
  return false;
}

static void note_ld(mha_mpi_weights *w, const mha_matrices *m) {
  const int64_t ld[] = {m->query_ld, m->key_ld, m->value_ld, m->output_ld};
  for (int i = 0; i < 4; i++)
    w->ld[i] = ld[i];
}

static mha_status widen(mha_mpi_weights *w, mha_error *error) {
  mha_weights *stored = w->layer;
  mha_matrices m;
  MHA_INIT(&m);
  mha_status status = mha_weights_convert(stored, MHA_F32, &w->allocator, &w->layer, error);
  mha_weights_destroy(stored);
  if (!status)
    status = mha_weights_matrices(w->layer, &m, error);
  note_ld(w, &m);
  return status;
}

/* Makes w->layer of the whole one, whose reference it takes, also on failure. */
static mha_status cut_layer(mha_mpi_weights *w, mha_weights *whole, keeping keep,
                            mha_error *error) {
  mha_matrices m;
  MHA_INIT(&m);
  MHA_INIT(&w->whole);
  mha_status status = mha_weights_config(whole, &w->whole, error);
  if (!status)
    status = mha_weights_matrices(whole, &m, error);
  const bool absent[] = {!m.query, !m.key, !m.value, !m.output};
  for (int i = 0; i < 4; i++)
    w->absent[i] = absent[i];
  w->has_output_bias = m.output_bias != NULL;
  if (!status)
    status = cut_heads(w, error);
  if (!status)
    status = cut_matrices(w, &m, error);
  const bool stored = is_stored(&m);
  note_ld(w, &m);
  m.ownership = keep.ownership;
  if (m.ownership == MHA_BORROW) {
    m.release = release_whole;
    m.release_user = whole;
  }
  const mha_config config = cut_config(w, keep.flags);
  if (!status)
    status = mha_weights_create(&config, &m, &w->layer, error);
  if (status || m.ownership == MHA_COPY)
    mha_weights_destroy(whole);
  return status || !keep.widen || !stored ? status : widen(w, error);
}

/* ---- making ---- */

static void add_facts(mha_mpi_facts *facts, const mha_mpi_weights *w) {
  const mha_config *c = &w->whole;
  mha_mpi_fact(facts, "config.n_heads", c->n_heads);
  mha_mpi_fact(facts, "config.n_kv_heads", c->n_kv_heads);
  mha_mpi_fact(facts, "config.head_size", c->head_size);
  mha_mpi_fact(facts, "config.value_head_size", c->value_head_size);
  mha_mpi_fact(facts, "config.query_width", c->query_width);
  mha_mpi_fact(facts, "config.key_width", c->key_width);
  mha_mpi_fact(facts, "config.value_width", c->value_width);
  mha_mpi_fact(facts, "config.output_width", c->output_width);
  mha_mpi_fact(facts, "config.flags", (int64_t)c->flags);
  mha_mpi_fact_float(facts, "config.scale", (double)c->scale);
  mha_mpi_fact_float(facts, "config.softcap", (double)c->softcap);
  mha_mpi_fact(facts, "config.norm", c->norm);
  mha_mpi_fact_float(facts, "config.norm_epsilon", (double)c->norm_epsilon);
  mha_mpi_fact(facts, "config.rope", c->rope);
  mha_mpi_fact(facts, "config.rotary_size", c->rotary_size);
  mha_mpi_fact_float(facts, "config.rope_base", c->rope_base);
  mha_mpi_fact(facts, "config.rope_positions", c->rope_positions);
  mha_mpi_fact(facts, "the absence of Wq", w->absent[0]);
  mha_mpi_fact(facts, "the absence of Wk", w->absent[1]);
  mha_mpi_fact(facts, "the absence of Wv", w->absent[2]);
  mha_mpi_fact(facts, "the absence of Wo", w->absent[3]);
}

static mha_status allocate(const mha_mpi_team *team, const mha_config *config,
                           mha_mpi_weights **weights, mha_error *error) {
  const mha_allocator allocator = mha_memory_allocator(config->allocator);
  *weights = mha_memory_allocate(&allocator, sizeof **weights);
  if (!*weights)
    return mha_fail(error, MHA_ERROR_MEMORY, "the share needs %zu bytes; rule: they must be there",
                    sizeof **weights);
  **weights = (mha_mpi_weights){
      .allocator = allocator, .n = team->place.by_heads, .head = team->place.head};
  return MHA_OK;
}

void mha_mpi_weights_destroy(mha_mpi_weights *weights) {
  if (!weights)
    return;
  const mha_mpi_weights w = *weights;
  mha_weights_destroy(w.layer);
  mha_memory_release(&w.allocator, weights, sizeof w);
  if (w.release)
    w.release(w.release_user);
}

/* Takes the share of a layer that this process has made, if status is MHA_OK, and agrees. */
static mha_status share(mha_mpi_team *team, const mha_config *config, mha_weights *whole,
                        keeping keep, mha_status status, mha_mpi_weights **weights,
                        mha_error *error) {
  mha_mpi_weights *made = NULL;
  mha_mpi_facts facts = {.n = 0};
  if (!status) {
    status = allocate(team, config, &made, error);
    if (status)
      mha_weights_destroy(whole);
  }
  if (!status)
    status = cut_layer(made, whole, keep, error);
  if (!status)
    add_facts(&facts, made);
  status = mha_mpi_agree(team, MHA_MPI_WEIGHTS, status, &facts, error);
  if (status) {
    mha_mpi_weights_destroy(made);
    return status;
  }
  *weights = made;
  return mha_succeed(error);
}

/* The place of the share, and the whole layer's config. */
static mha_status read_config(mha_mpi_weights **weights, const mha_config *given,
                              mha_config *config, mha_error *error) {
  mha_status status = mha_require(weights, "weights", error);
  if (!status)
    status = mha_read_struct(config, sizeof *config, MHA_FIRST_CONFIG, given, "config", error);
  config->struct_size = sizeof *config;
  return status;
}

mha_status mha_mpi_weights_create(mha_mpi_team *team, const mha_config *config,
                                  const mha_matrices *matrices, mha_mpi_weights **weights,
                                  mha_error *error) {
  mha_error local = {.status = MHA_OK};
  mha_error *told = error ? error : &local;
  mha_config c = {0};
  mha_matrices m = {0};
  mha_weights *whole = NULL;
  if (weights)
    *weights = NULL;
  mha_status status = mha_require(team, "team", told);
  if (status)
    return status;
  status = read_config(weights, config, &c, told);
  if (!status)
    status = mha_read_struct(&m, sizeof m, MHA_FIRST_MATRICES, matrices, "matrices", told);
  const mha_matrices given = m;
  const keeping keep = {.ownership = m.ownership, .flags = c.flags};
  c.flags &= ~MHA_PACK_WEIGHTS;
  m.struct_size = sizeof m;
  m.release = NULL;            /* called only if all processes succeed */
  if (m.ownership == MHA_COPY) /* the share copies, the whole looks */
    m.ownership = MHA_BORROW;
  if (!status)
    status = mha_weights_create(&c, &m, &whole, told);
  status = share(team, &c, whole, keep, status, weights, told);
  if (!status && given.ownership == MHA_BORROW) {
    (*weights)->release = given.release;
    (*weights)->release_user = given.release_user;
  }
  return status;
}

mha_status mha_mpi_weights_load(mha_mpi_team *team, const mha_config *config, const char *path,
                                const char *prefix, mha_mpi_weights **weights, mha_error *error) {
  mha_error local = {.status = MHA_OK};
  mha_error *told = error ? error : &local;
  mha_config c = {0};
  mha_weights *whole = NULL;
  if (weights)
    *weights = NULL;
  mha_status status = mha_require(team, "team", told);
  if (status)
    return status;
  status = read_config(weights, config, &c, told);
  const keeping keep = {.ownership = MHA_BORROW,
                        .flags = c.flags & ~MHA_KEEP_TYPE,
                        .widen = !(c.flags & MHA_KEEP_TYPE)};
  c.flags = (c.flags & ~MHA_PACK_WEIGHTS) | MHA_KEEP_TYPE;
  if (!status)
    status = mha_weights_load(&c, path, prefix, &whole, told);
  status = share(team, &c, whole, keep, status, weights, told);
  if (!status)
    (*weights)->is_loaded = true;
  return status;
}

const mha_weights *mha_mpi_weights_layer(const mha_mpi_weights *weights) {
  return weights ? weights->layer : NULL;
}
