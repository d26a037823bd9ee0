/* Owns mha_forward as an engine, through the public header: "libmha" and "xsmm" borrow the same
 * weights, which xsmm packs; each set has a cache of its own where there is one. */
#include "layer.h"
#include "engines.h"
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool bench_layer_create(const bench_problem *problem, const bench_weights *set,
                        const bench_type *type, uint32_t flags, mha_weights **layer) {
  mha_config config;
  mha_matrices matrices;
  mha_error error;
  mha_config_init(&config, problem->shape.width, problem->shape.heads);
  config.n_kv_heads = problem->shape.kv_heads;
  config.flags = flags;
  MHA_INIT(&matrices);
  matrices.orientation = problem->options->out_in ? MHA_OUT_IN : MHA_IN_OUT;
  matrices.ownership = MHA_BORROW;
  matrices.query = set->matrices[0];
  matrices.key = set->matrices[1];
  matrices.value = set->matrices[2];
  matrices.output = set->matrices[3];
  matrices.query_bias = set->biases[0];
  matrices.key_bias = set->biases[1];
  matrices.value_bias = set->biases[2];
  matrices.output_bias = set->biases[3];
  if (!bench_is_good(mha_weights_create(&config, &matrices, layer, &error), &error))
    return false;
  mha_weights *given = *layer;
  if (type->matrices == MHA_F32)
    return true;
  const mha_status status = mha_weights_convert(given, type->matrices, NULL, layer, &error);
  mha_weights_destroy(given);
  return bench_is_good(status, &error);
}

mha_tensor bench_layer_past(const bench_shape *shape, const float *rows) {
  const int64_t size = shape->width / shape->heads;
  const int64_t row = shape->kv_heads * size;
  return (mha_tensor){.data = rows,
                      .batch = shape->batch,
                      .length = shape->past,
                      .heads = shape->kv_heads,
                      .size = size,
                      .batch_stride = (shape->past + shape->length) * row,
                      .row_stride = row,
                      .head_stride = size,
                      .size_stride = 1};
}

static bool create_cache(const bench_layer *state, const bench_weights *set, mha_cache **cache) {
  const bench_shape *shape = &state->problem->shape;
  mha_error error;
  if (!bench_layer_create_pages(state, cache))
    return false;
  if (shape->past == 0)
    return true;
  const mha_tensor keys = bench_layer_past(shape, set->keys);
  const mha_tensor values = bench_layer_past(shape, set->values);
  return bench_is_good(mha_cache_append(*cache, &keys, &values, NULL, NULL, &error), &error);
}

static bool create_sets(bench_layer *state) {
  const bench_problem *problem = state->problem;
  const size_t n = (size_t)problem->n_sets;
  const bool cached = state->plan.cached;
  const uint32_t flags = state->plan.choice == MHA_ENGINE_XSMM ? MHA_PACK_WEIGHTS : 0;
  state->layers = bench_zeroed(n * sizeof *state->layers);
  state->caches = cached ? bench_zeroed(n * sizeof *state->caches) : NULL;
  bool good = state->layers && (state->caches || !cached);
  for (size_t i = 0; good && i < n; i++)
    good = bench_layer_create(problem, &problem->sets[i], state->type, flags, &state->layers[i]) &&
           (!cached || create_cache(state, &problem->sets[i], &state->caches[i]));
  return good;
}

static bool create_context(bench_layer *state, int index) {
  const bench_shape *shape = &state->problem->shape;
  mha_context_options options;
  mha_shape size;
  mha_error error;
  MHA_INIT(&options);
  options.n_threads = state->problem->options->threads[index];
  options.engine = (int32_t)state->plan.choice;
  MHA_INIT(&size);
  size.batch = shape->batch;
  size.query_length = shape->length;
  size.key_length = shape->past + shape->length;
  size.cached = state->plan.cached;
  size.cache_type = state->type->cache;
  size.cache_page_tokens = state->plan.page_tokens;
  const mha_weights *layer = state->layers[0];
  mha_context **context = &state->contexts[index];
  return bench_is_good(mha_context_create(&options, context, &error), &error) &&
         bench_is_good(
             mha_workspace_bytes(*context, layer, &size, &state->workspace[index], &error),
             &error) &&
         bench_is_good(mha_context_reserve(*context, layer, &size, &error), &error);
}

void bench_layer_describe(const bench_problem *problem, mha_rules *rules, mha_forward_args *args) {
  MHA_INIT(rules);
  rules->causal = problem->shape.causal;
  rules->attend.data = problem->mask;
  rules->attend.batch = rules->attend.heads = 1;
  rules->attend.rows = rules->attend.columns = problem->shape.length;
  MHA_INIT(args);
  args->batch = problem->shape.batch;
  args->query_length = problem->shape.length;
  args->query = problem->input;
  args->output = problem->output;
  args->rules = rules;
}

void bench_layer_destroy(void *opaque) {
  bench_layer *state = opaque;
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

void *bench_layer_start(const bench_problem *problem, const bench_type *type,
                        bench_layer_plan plan) {
  bench_layer *state = bench_zeroed(sizeof *state);
  if (!state)
    return NULL;
  state->problem = problem;
  state->type = type;
  state->plan = plan;
  bool good = create_sets(state);
  for (int i = 0; good && i < problem->options->n_threads; i++)
    good = create_context(state, i);
  if (!good) {
    bench_layer_destroy(state);
    return NULL;
  }
  bench_layer_describe(problem, &state->rules, &state->args);
  return state;
}

/* A cache where the shape has a past. */
static void *create(const bench_problem *problem, const bench_type *type,
                    mha_engine_choice choice) {
  const bench_layer_plan plan = {.choice = choice, .cached = problem->shape.past > 0};
  return bench_layer_start(problem, type, plan);
}

static void *create_blas(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, MHA_ENGINE_BLAS);
}

static void *create_xsmm(const bench_problem *problem, const bench_type *type) {
  return create(problem, type, MHA_ENGINE_XSMM);
}

static bool has_xsmm(void) {
  char engines[64];
  bench_machine_build_info("engines", engines, sizeof engines);
  return strstr(engines, "xsmm") != NULL;
}

/* Makes room for the next call's tokens, inside the clock: a few stores per entry, and the giving
 * back of pages is a part of what they cost. */
static bool forget_tokens(const bench_layer *state, mha_cache *cache) {
  mha_error error;
  bool good = true;
  for (int64_t b = 0; good && cache && b < state->problem->shape.batch; b++)
    good = bench_is_good(mha_cache_truncate(cache, b, state->problem->shape.past, &error), &error);
  return good;
}

bool bench_layer_run(void *opaque, int thread_index, int64_t call) {
  const bench_layer *state = opaque;
  const int64_t set = call % state->problem->n_sets;
  mha_forward_args args = state->args;
  mha_error error;
  args.cache = state->caches ? state->caches[set] : NULL;
  return bench_is_good(
             mha_forward(state->contexts[thread_index], state->layers[set], &args, &error),
             &error) &&
         forget_tokens(state, args.cache);
}

static double needs(const bench_problem *problem) {
  const bench_shape *shape = &problem->shape;
  const double tokens = shape->past > 0 ? (double)(shape->past + shape->length) : 0;
  const double row = 2 * (double)bench_projected_width(shape, 1) * (double)sizeof(float);
  double bytes = (double)(problem->n_sets * shape->batch) * tokens * row;
  for (int i = 1; i < problem->options->types.n; i++)
    bytes += (double)problem->n_sets *
             (double)bench_problem_type_bytes(problem, &problem->options->types.types[i]);
  return bytes;
}

static double needs_packed(const bench_problem *problem) {
  return needs(problem) + (double)problem->n_sets * (double)problem->set_bytes;
}

size_t bench_layer_bytes(const void *opaque, int thread_index) {
  return ((const bench_layer *)opaque)->workspace[thread_index];
}

const bench_engine bench_libmha = {
    .name = "libmha",
    .has_types = true,
    .computes_layer = true,
    .can_be_disturbed = true,
    .needs = needs,
    .create = create_blas,
    .run = bench_layer_run,
    .bytes = bench_layer_bytes,
    .destroy = bench_layer_destroy,
};

const bench_engine bench_xsmm = {
    .name = "xsmm",
    .computes_layer = true,
    .can_be_disturbed = true,
    .is_here = has_xsmm,
    .needs = needs_packed,
    .create = create_xsmm,
    .run = bench_layer_run,
    .bytes = bench_layer_bytes,
    .destroy = bench_layer_destroy,
};
