/* Owns mha_mpi_forward and its way by heads: the layer's five steps on this process's heads, then
 * the sum over processes. All writing is into scratch until every process has come to its end. */
#include "base/error.h"
#include "call.h"

/* ---- reading ---- */

static mha_status read_call(mha_mpi_call *c, const mha_forward_args *args,
                            const mha_mpi_spread *spread, mha_error *error) {
  mha_status status = mha_require(c->context, "context", error);
  if (!status)
    status = mha_require(c->weights, "weights", error);
  if (!status)
    status = mha_mpi_spread_read(spread, &c->spread, error);
  if (!status)
    status = mha_mpi_local_read(c->weights, args, &c->local, error);
  if (!status && c->weights->n != c->team->place.by_heads)
    status =
        mha_fail(error, MHA_ERROR_WEIGHTS,
                 "weights are one of %d shares in a team where %d processes share heads; rule: "
                 "as many",
                 (int)c->weights->n, (int)c->team->place.by_heads);
  return status ? status : mha_mpi_output_read(c, error);
}

static void add_facts(mha_mpi_facts *facts, const mha_mpi_call *c) {
  mha_mpi_fact(facts, "spread.order", c->spread.order);
  mha_mpi_fact(facts, "spread.output", c->spread.output);
  mha_mpi_fact(facts, "the heads of weights", c->weights->whole.n_heads);
  mha_mpi_fact(facts, "the width of weights", c->weights->whole.output_width);
  mha_mpi_local_facts(facts, &c->local, c->weights, c->team->place.by_positions == 1);
}

/* ---- scratch ---- */

static int64_t entry_of(const mha_forward_args *a, int64_t b) {
  return a->cache_entries ? a->cache_entries[b] : b;
}

/* The most tokens that an entry will have, as far as the cache has room at all. */
static int64_t cached_span(const mha_forward_args *a, const mha_tensor *keys, int64_t rows) {
  int64_t longest = 0;
  int64_t length = 0;
  int64_t room = 0;
  for (int64_t b = 0; b < a->batch; b++)
    if (!mha_cache_length(a->cache, entry_of(a, b), &length, NULL))
      longest = mha_max(longest, length);
  if (!mha_multiply(keys->batch, keys->length, &room))
    room = 0;
  return mha_min(longest, room) + rows;
}

/* Of a cache without pages the view tells no page, but a page's scratch is no more than it needs.
 */
mha_status mha_mpi_call_reserve(const mha_mpi_call *c, int32_t backward, mha_error *error) {
  const mha_forward_args *a = &c->local.args;
  const int64_t rows = a->key ? a->key_length : a->query_length;
  mha_tensor k = {0};
  mha_tensor v = {0};
  mha_shape shape;
  MHA_INIT(&shape);
  shape.packed = c->local.rules.query_starts != NULL;
  shape.batch = a->batch;
  shape.query_length = a->query_length;
  shape.key_length = a->key_length;
  shape.backward = backward;
  if (a->cache && !mha_cache_view(a->cache, &k, &v, NULL)) {
    const bool may_be_page = k.length >= 16 && (k.length & (k.length - 1)) == 0;
    shape.cached = 1;
    shape.query_length = mha_max(a->query_length, rows);
    shape.key_length = cached_span(a, &k, rows);
    shape.cache_type = k.element;
    shape.cache_page_tokens = may_be_page ? k.length : 0;
  }
  return mha_context_reserve(c->context, c->weights->layer, &shape, error);
}

/* ---- by heads ---- */

static bool appends(const mha_forward_args *a) {
  return a->cache && a->cache_mode != MHA_CACHE_ATTEND;
}

static void note_lengths(const mha_forward_args *a, int64_t *before) {
  for (int64_t b = 0; appends(a) && b < a->batch; b++)
    if (mha_cache_length(a->cache, entry_of(a, b), &before[b], NULL))
      before[b] = 0; /* the call itself will refuse it */
}

/* What a cache has got of a call that failed in another process leaves it again. */
static void take_back(const mha_forward_args *a, const int64_t *before) {
  for (int64_t b = 0; appends(a) && b < a->batch; b++)
    if (mha_cache_truncate(a->cache, entry_of(a, b), before[b], NULL))
      continue; /* a ring that has no rollback so far */
}

mha_status mha_mpi_forward_by_heads(mha_mpi_call *c, mha_error *error) {
  mha_forward_args *a = &c->local.args;
  mha_layout layout = {0};
  mha_mpi_output_plan(c, &layout);
  const size_t at = mha_layout_add(&layout, sizeof(int64_t), appends(a) ? a->batch : 0, 1, 1);
  mha_status status = mha_mpi_team_provide(c->team, &layout, error);
  if (!status)
    status = mha_mpi_call_reserve(c, a->tape ? MHA_BACKWARD_WITH_TAPE : 0, error);
  status = mha_mpi_agree(c->team, MHA_MPI_READY, status, NULL, error);
  if (status)
    return status;
  int64_t *before = (void *)(c->team->scratch + at);
  note_lengths(a, before);
  mha_mpi_output_place(c, a);
  if (c->n_average > 0)
    c->local.results.average = c->sum + c->n;
  const double begin = mha_mpi_now(c->team);
  const mha_status computed = mha_forward(c->context, c->weights->layer, a, error);
  mha_mpi_tell(c->team, MHA_MPI_COMPUTE, 0, begin, 0);
  status = mha_mpi_output_finish(c, computed, error);
  if (status && !computed)
    take_back(a, before);
  return status;
}

/* ---- the call ---- */

static mha_status forward(mha_mpi_team *team, mha_context *context, const mha_mpi_weights *weights,
                          const mha_forward_args *args, const mha_mpi_spread *spread,
                          mha_error *error) {
  mha_mpi_call c = {.team = team, .context = context, .weights = weights};
  mha_mpi_facts facts = {.n = 0};
  mha_status status = read_call(&c, args, spread, error);
  if (!status)
    add_facts(&facts, &c);
  status = mha_mpi_agree(team, MHA_MPI_CALL, status, &facts, error);
  if (status)
    return status;
  return team->place.by_positions > 1 ? mha_mpi_forward_by_positions(&c, error)
                                      : mha_mpi_forward_by_heads(&c, error);
}

mha_status mha_mpi_forward(mha_mpi_team *team, mha_context *context, const mha_mpi_weights *weights,
                           const mha_forward_args *args, const mha_mpi_spread *spread,
                           mha_error *error) {
  mha_error unwanted = {.status = MHA_OK};
  mha_error *told = error ? error : &unwanted;
  mha_status status = mha_require(team, "team", told);
  if (!status)
    status = forward(team, context, weights, args, spread, told);
  return status ? status : mha_succeed(told);
}
