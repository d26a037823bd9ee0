/* Owns mha_mpi_forward by positions: the steps before and after the ring, on the rows that this
 * process has. */
#include "base/error.h"
#include "call.h"
#include "ring.h"

static mha_status refuse(const mha_mpi_call *c, mha_error *error) {
  const mha_forward_args *a = &c->local.given;
  const mha_results *r = &c->local.results;
  const struct {
    const void *given;
    const char *name;
  } things[] = {{a->cache, "args.cache"},
                {a->tape, "args.tape"},
                {r->weights, "results.weights"},
                {r->average, "results.average"}};
  for (size_t i = 0; i < sizeof things / sizeof *things; i++)
    if (things[i].given)
      return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "%s is given where rows are spread; rule: NULL, by positions there is none",
                      things[i].name);
  return MHA_OK;
}

/* The core's rules: what the layer says and the call leaves to it. */
static mha_rules core_rules(const mha_mpi_call *c, mha_error *error, mha_status *status) {
  const mha_config *w = &c->weights->whole;
  mha_rules rules = c->local.rules;
  mha_matrices m;
  MHA_INIT(&m);
  *status = mha_weights_matrices(c->weights->layer, &m, error);
  if (!(rules.flags & MHA_SCALE) && w->flags & MHA_SCALE) {
    rules.flags |= MHA_SCALE;
    rules.scale = w->scale;
  }
  if (!(rules.flags & MHA_SOFTCAP) && rules.softcap == 0)
    rules.softcap = w->softcap;
  if (!rules.sinks)
    rules.sinks = m.sinks;
  return rules;
}

/* A layer call's own scratch, beside the ring's and the output's. */
typedef struct parts {
  size_t at_q, at_query_positions, at_key_positions, at_lists;
  float *q;
  int64_t *query_positions, *key_positions; /* [B][rows] */
  int64_t *query_lengths, *key_lengths;     /* [B] rows of the process within the lengths */
} parts;

static void plan(mha_mpi_call *c, const mha_mpi_ring *r, parts *p, mha_layout *layout) {
  const bool turns = c->weights->whole.rope != MHA_ROPE_NONE;
  p->at_q = mha_layout_add(layout, sizeof(float), r->B, r->queries.rows, r->H * r->d);
  p->at_query_positions =
      mha_layout_add(layout, sizeof(int64_t), turns ? r->B : 0, r->queries.rows, 1);
  p->at_key_positions = mha_layout_add(layout, sizeof(int64_t), turns ? r->B : 0, r->keys.rows, 1);
  p->at_lists = mha_layout_add(layout, sizeof(int64_t), r->B, 2, 1);
  if (c->team->place.by_heads > 1)
    mha_mpi_output_plan(c, layout);
}

static void place(const mha_mpi_call *c, const mha_mpi_ring *r, parts *p) {
  char *scratch = c->team->scratch;
  p->q = (void *)(scratch + p->at_q);
  p->query_positions = (void *)(scratch + p->at_query_positions);
  p->key_positions = (void *)(scratch + p->at_key_positions);
  p->query_lengths = (void *)(scratch + p->at_lists);
  p->key_lengths = p->query_lengths + r->B;
}

/* Rotary positions are counted over the rows of all. */
static void count_positions(const mha_mpi_blocks *blocks, int64_t B, int64_t *positions) {
  for (int64_t b = 0; b < B; b++)
    for (int k = 0; k < MHA_MPI_BLOCKS_OF_ONE; k++)
      for (int64_t i = 0; i < blocks->at[k].length; i++)
        positions[b * blocks->rows + blocks->at[k].row + i] = blocks->at[k].begin + i;
}

static void set_positions(const mha_mpi_call *c, const mha_mpi_ring *r, const parts *p,
                          mha_forward_args *a) {
  if (c->weights->whole.rope == MHA_ROPE_NONE)
    return;
  if (!a->query_positions) {
    count_positions(&r->queries, r->B, p->query_positions);
    a->query_positions = p->query_positions;
  }
  if (a->key && !a->key_positions) {
    count_positions(&r->keys, r->B, p->key_positions);
    a->key_positions = p->key_positions;
  }
}

/* The process's call for its own rows: who sees whom is the ring's. */
static mha_rules own_rules(const mha_mpi_ring *r, const parts *p) {
  mha_rules rules;
  MHA_INIT(&rules);
  for (int64_t b = 0; b < r->B; b++) {
    const int64_t *Lq = r->rules.query_lengths;
    const int64_t *Lk = r->rules.key_lengths;
    p->query_lengths[b] = mha_mpi_blocks_within(&r->queries, Lq ? Lq[b] : r->queries.all);
    p->key_lengths[b] = mha_mpi_blocks_within(&r->keys, Lk ? Lk[b] : r->keys.all);
  }
  rules.query_lengths = p->query_lengths;
  rules.key_lengths = p->key_lengths;
  return rules;
}

static mha_status ready(mha_mpi_call *c, mha_mpi_ring *r, parts *p, mha_error *error) {
  mha_layout layout = {0};
  mha_status status = refuse(c, error);
  if (!status)
    status = mha_mpi_ring_check(r, error);
  if (status)
    return status;
  mha_mpi_ring_plan(r, &layout);
  plan(c, r, p, &layout);
  status = mha_mpi_team_provide(c->team, &layout, error);
  if (!status)
    status = mha_mpi_call_reserve(c, MHA_BACKWARD_NONE, error);
  return status ? status : mha_mpi_ring_reserve(r, error);
}

/* Steps 1 to 4. */
static mha_status attend(mha_mpi_call *c, mha_mpi_ring *r, const parts *p,
                         const mha_forward_args *a, mha_error *error) {
  const mha_tensor q = {
      p->q, r->B, r->queries.rows, r->H, r->d, r->queries.rows * r->H * r->d, r->H * r->d,
      r->d, 1,    MHA_F32,         0};
  float *k = r->traveller[0];
  float *v = k + r->B * r->keys.rows * r->G * r->d;
  mha_error unsaid;
  const double begin = mha_mpi_now(c->team);
  const mha_status projected =
      mha_project_inputs(c->context, c->weights->layer, a, p->q, k, v, error);
  mha_mpi_tell(c->team, MHA_MPI_COMPUTE, 0, begin, 0);
  mha_status status = mha_mpi_ring_run(r, &q, projected ? &unsaid : error);
  if (!status && !projected)
    status = mha_mpi_ring_finish(r, error);
  return projected ? projected : status;
}

/* Step 5: with shared heads a partial output, and the sum, which those of other rows do not see:
 * what fails is agreed upon before. */
static mha_status project_output(mha_mpi_call *c, const mha_mpi_ring *r, mha_forward_args *a,
                                 mha_error *error) {
  const bool shared = c->team->place.by_heads > 1;
  if (shared)
    mha_mpi_output_place(c, a);
  const double begin = mha_mpi_now(c->team);
  mha_status status = mha_project_output(c->context, c->weights->layer, a, r->concat, error);
  mha_mpi_tell(c->team, MHA_MPI_COMPUTE, 0, begin, 0);
  status = mha_mpi_agree(c->team, MHA_MPI_DONE, status, NULL, error);
  return status || !shared ? status : mha_mpi_output_finish(c, MHA_OK, error);
}

/* Processes that share heads have the same rows. */
static mha_status agree_on_rows(const mha_mpi_call *c, int64_t Lq, int64_t Lk, mha_error *error) {
  mha_mpi_facts facts = {.n = 0};
  mha_mpi_fact(&facts, "args.query_length", Lq);
  mha_mpi_fact(&facts, "args.key_length", Lk);
  return mha_mpi_agree_over(c->team->heads, MHA_MPI_ROWS, MHA_OK, &facts, error);
}

mha_status mha_mpi_forward_by_positions(mha_mpi_call *c, mha_error *error) {
  const mha_mpi_weights *w = c->weights;
  mha_forward_args *a = &c->local.args;
  parts p = {0};
  mha_status status = MHA_OK;
  mha_mpi_ring r = {.team = c->team,
                    .context = c->context,
                    .B = a->batch,
                    .H = w->n_heads,
                    .G = w->n_kv_heads,
                    .d = w->whole.head_size,
                    .dv = w->whole.value_head_size,
                    .order = c->spread.order,
                    .rules = core_rules(c, error, &status)};
  const int64_t Lk = a->key ? a->key_length : a->query_length;
  const mha_status same = agree_on_rows(c, a->query_length, Lk, error);
  const mha_status gathered = mha_mpi_ring_gather(&r, a->query_length, Lk, error);
  if (!status)
    status = same ? same : gathered;
  if (!status)
    status = ready(c, &r, &p, error);
  status = mha_mpi_agree(c->team, MHA_MPI_READY, status, NULL, error);
  if (status)
    return status;
  mha_mpi_ring_place(&r);
  place(c, &r, &p);
  set_positions(c, &r, &p, a);
  const mha_rules own = own_rules(&r, &p);
  a->rules = &own;
  a->results = NULL;
  status = attend(c, &r, &p, a, error);
  status = mha_mpi_agree(c->team, MHA_MPI_DONE, status, NULL, error);
  if (!status)
    status = project_output(c, &r, a, error);
  if (!status)
    mha_mpi_ring_show(&r, c->local.results.log_sum_exp);
  return status;
}
