/* Owns the engines of --pages: mha_forward over caches that differ in their pages alone. A call
 * appends the shape's rows to what the cache has and attends to all of it. */
#include "engines.h"
#include "layer.h"

#include <stdlib.h>

/* How a cache keeps its tokens. */
typedef struct page_plan {
  int64_t tokens; /* of a page; 0 = no pages */
  bool scattered; /* neighbours of an entry lie anywhere in the pool, as in one long in use */
} page_plan;

typedef struct pages_state {
  const bench_problem *problem;
  const bench_type *type;
  page_plan plan;
  mha_weights **layers;                     /* [n_sets] */
  mha_cache **caches;                       /* [n_sets] */
  mha_context *contexts[BENCH_MAX_THREADS]; /* one for each thread count */
  size_t workspace[BENCH_MAX_THREADS];
  mha_rules rules;
  mha_forward_args args;
} pages_state;

/* ---- caches ---- */

static int64_t count_pages(const pages_state *state) {
  const bench_shape *shape = &state->problem->shape;
  const int64_t tokens = state->plan.tokens;
  return tokens ? shape->batch * ((shape->past + shape->length + tokens - 1) / tokens) : 0;
}

static int64_t common_divisor(int64_t a, int64_t b) {
  return b == 0 ? a : common_divisor(b, a % b);
}

/* A stride about 0.6 of n that meets all of 0 to n - 1: neighbours end far apart. */
static int64_t scattering_stride(int64_t n) {
  int64_t stride = n * 61 / 100 + 1;
  while (common_divisor(stride, n) != 1)
    stride++;
  return stride;
}

/* The pool hands free pages out in an order that depends on how they came back: each page goes to
 * an entry of its own, and these give theirs back all over the pool. The token's numbers do not
 * matter, the input has enough of them. */
static bool scatter(const pages_state *state, mha_cache *cache) {
  const bench_shape *shape = &state->problem->shape;
  const int64_t n = count_pages(state);
  const int64_t stride = scattering_stride(n);
  mha_error error;
  mha_tensor token = bench_layer_past(shape, state->problem->input);
  token.batch = token.length = 1;
  bool good = true;
  for (int64_t i = 0; good && i < n; i++)
    good = bench_layer_report(mha_cache_append(cache, &token, &token, &i, NULL, &error), &error);
  for (int64_t i = 0; good && i < n; i++)
    good = bench_layer_report(mha_cache_reset(cache, i * stride % n, &error), &error);
  return good;
}

static bool create_cache(const pages_state *state, const bench_weights *set, mha_cache **cache) {
  const bench_shape *shape = &state->problem->shape;
  mha_cache_options options;
  mha_error error;
  MHA_INIT(&options);
  options.page_tokens = state->plan.tokens;
  options.n_pages = count_pages(state);
  options.n_entries = state->plan.scattered ? options.n_pages : shape->batch;
  options.capacity = shape->past + shape->length;
  options.n_kv_heads = shape->kv_heads;
  options.head_size = shape->width / shape->heads;
  options.type = state->type->cache;
  if (!bench_layer_report(mha_cache_create(&options, cache, &error), &error) ||
      (state->plan.scattered && !scatter(state, *cache)))
    return false;
  if (shape->past == 0)
    return true;
  const mha_tensor keys = bench_layer_past(shape, set->keys);
  const mha_tensor values = bench_layer_past(shape, set->values);
  return bench_layer_report(mha_cache_append(*cache, &keys, &values, NULL, NULL, &error), &error);
}

/* ---- the engine ---- */

static bool create_sets(pages_state *state) {
  const bench_problem *problem = state->problem;
  const size_t n = (size_t)problem->n_sets;
  state->layers = bench_zeroed(n * sizeof *state->layers);
  state->caches = bench_zeroed(n * sizeof *state->caches);
  bool good = state->layers && state->caches;
  for (size_t i = 0; good && i < n; i++)
    good = bench_layer_create(problem, &problem->sets[i], state->type, 0, &state->layers[i]) &&
           create_cache(state, &problem->sets[i], &state->caches[i]);
  return good;
}

static bool create_context(pages_state *state, int index) {
  const bench_shape *shape = &state->problem->shape;
  const mha_weights *layer = state->layers[0];
  mha_context **context = &state->contexts[index];
  mha_context_options options;
  mha_shape size;
  mha_error error;
  MHA_INIT(&options);
  options.n_threads = state->problem->options->threads[index];
  options.engine = MHA_ENGINE_BLAS;
  MHA_INIT(&size);
  size.batch = shape->batch;
  size.query_length = shape->length;
  size.key_length = shape->past + shape->length;
  size.cached = 1;
  size.cache_type = state->type->cache;
  size.cache_page_tokens = state->plan.tokens;
  return bench_layer_report(mha_context_create(&options, context, &error), &error) &&
         bench_layer_report(
             mha_workspace_bytes(*context, layer, &size, &state->workspace[index], &error),
             &error) &&
         bench_layer_report(mha_context_reserve(*context, layer, &size, &error), &error);
}

static void destroy(void *opaque) {
  pages_state *state = opaque;
  if (!state)
    return;
  for (int i = 0; i < BENCH_MAX_THREADS; i++)
    mha_context_destroy(state->contexts[i]);
  for (int64_t i = 0; state->layers && i < state->problem->n_sets; i++)
    mha_weights_destroy(state->layers[i]);
  for (int64_t i = 0; state->caches && i < state->problem->n_sets; i++)
    mha_cache_destroy(state->caches[i]);
  free(state->layers);
  free(state->caches);
  free(state);
}

static void *create(const bench_problem *problem, const bench_type *type, page_plan plan) {
  pages_state *state = bench_zeroed(sizeof *state);
  if (!state)
    return NULL;
  state->problem = problem;
  state->type = type;
  state->plan = plan;
  bool good = create_sets(state);
  for (int i = 0; good && i < problem->options->n_threads; i++)
    good = create_context(state, i);
  if (!good) {
    destroy(state);
    return NULL;
  }
  bench_layer_describe(problem, &state->rules, &state->args);
  return state;
}

/* What the call has appended goes again inside the clock: taking pages and giving them back is a
 * part of what pages cost. */
static bool run(void *opaque, int thread_index, int64_t call) {
  const pages_state *state = opaque;
  const bench_shape *shape = &state->problem->shape;
  const int64_t set = call % state->problem->n_sets;
  mha_forward_args args = state->args;
  mha_error error;
  args.cache = state->caches[set];
  bool good = bench_layer_report(
      mha_forward(state->contexts[thread_index], state->layers[set], &args, &error), &error);
  for (int64_t b = 0; good && b < shape->batch; b++)
    good = bench_layer_report(mha_cache_truncate(args.cache, b, shape->past, &error), &error);
  return good;
}

/* Of the caches, whose last pages may be filled in part, and of layers of other types. */
static double needs(const bench_problem *problem) {
  const bench_shape *shape = &problem->shape;
  const bench_type_list *types = &problem->options->types;
  const double row = 2 * (double)bench_projected_width(shape, 1) * (double)sizeof(float);
  const double tokens = (double)(shape->past + shape->length + 256);
  double bytes = (double)types->n * (double)shape->batch * tokens * row;
  for (int i = 1; i < types->n; i++)
    bytes += (double)bench_problem_type_bytes(problem, &types->types[i]);
  return (double)problem->n_sets * bytes;
}

static size_t bytes(const void *opaque, int thread_index) {
  return ((const pages_state *)opaque)->workspace[thread_index];
}

static void *create_unpaged(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, (page_plan){0, false});
}

static void *create_16(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, (page_plan){16, true});
}

static void *create_64(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, (page_plan){64, true});
}

static void *create_256(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, (page_plan){256, true});
}

static void *create_ordered_16(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, (page_plan){16, false});
}

static void *create_ordered_64(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, (page_plan){64, false});
}

static void *create_ordered_256(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, (page_plan){256, false});
}

#define ENGINE(engine_name, engine_create)                                                         \
  {                                                                                                \
    .name = (engine_name), .has_types = true, .computes_layer = true, .needs = needs,              \
    .create = (engine_create), .run = run, .bytes = bytes, .destroy = destroy                      \
  }

const bench_engine bench_pages[BENCH_N_PAGES] = {
    ENGINE("no pages", create_unpaged),
    ENGINE("pages 16", create_16),
    ENGINE("pages 64", create_64),
    ENGINE("pages 256", create_256),
    ENGINE("in order 16", create_ordered_16),
    ENGINE("in order 64", create_ordered_64),
    ENGINE("in order 256", create_ordered_256),
};
