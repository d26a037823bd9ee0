/* Owns how the caches of mha-bench are made, and the engines of --pages: mha_forward over caches
 * that differ in their pages alone. A call appends the shape's rows to what the cache has and
 * attends to all of it. */
#include "layer.h"

/* ---- caches ---- */

static int64_t count_pages(const bench_layer *state) {
  const bench_shape *shape = &state->problem->shape;
  const int64_t tokens = state->plan.page_tokens;
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
static bool scatter(const bench_layer *state, mha_cache *cache) {
  const bench_shape *shape = &state->problem->shape;
  const int64_t n = count_pages(state);
  const int64_t stride = scattering_stride(n);
  mha_error error;
  mha_tensor token = bench_layer_past(shape, state->problem->input);
  token.batch = token.length = 1;
  bool good = true;
  for (int64_t i = 0; good && i < n; i++)
    good = bench_is_good(mha_cache_append(cache, &token, &token, &i, NULL, &error), &error);
  for (int64_t i = 0; good && i < n; i++)
    good = bench_is_good(mha_cache_reset(cache, i * stride % n, &error), &error);
  return good;
}

bool bench_layer_create_pages(const bench_layer *state, mha_cache **cache) {
  const bench_shape *shape = &state->problem->shape;
  mha_cache_options options;
  mha_error error;
  MHA_INIT(&options);
  options.page_tokens = state->plan.page_tokens;
  options.n_pages = count_pages(state);
  options.n_entries = state->plan.scattered ? options.n_pages : shape->batch;
  options.capacity = shape->past + shape->length;
  options.n_kv_heads = shape->kv_heads;
  options.head_size = shape->width / shape->heads;
  options.type = state->type->cache;
  return bench_is_good(mha_cache_create(&options, cache, &error), &error) &&
         (!state->plan.scattered || scatter(state, *cache));
}

/* ---- the engines ---- */

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

static void *create(const bench_problem *problem, const bench_type *type, int64_t page_tokens,
                    bool scattered) {
  const bench_layer_plan plan = {MHA_ENGINE_BLAS, true, page_tokens, scattered};
  return bench_layer_start(problem, type, plan);
}

static void *create_unpaged(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, 0, false);
}

static void *create_16(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, 16, true);
}

static void *create_64(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, 64, true);
}

static void *create_256(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, 256, true);
}

static void *create_ordered_16(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, 16, false);
}

static void *create_ordered_64(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, 64, false);
}

static void *create_ordered_256(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, 256, false);
}

#define ENGINE(engine_name, engine_create)                                                         \
  {                                                                                                \
    .name = (engine_name), .has_types = true, .computes_layer = true, .needs = needs,              \
    .create = (engine_create), .run = bench_layer_run, .bytes = bench_layer_bytes,                 \
    .destroy = bench_layer_destroy                                                                 \
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
