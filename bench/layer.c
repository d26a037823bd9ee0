/* Owns the engine "libmha": mha_forward through the public header, borrowing the same weights. */
#include "engines.h"
#include "mha.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct layer_state {
  const bench_problem *problem;
  mha_weights **layers;                     /* [n_sets] */
  mha_context *contexts[BENCH_MAX_THREADS]; /* one for each thread count */
  size_t workspace[BENCH_MAX_THREADS];
  mha_attention attention;
  mha_forward_args args;
} layer_state;

static bool report(mha_status status, const mha_error *error) {
  if (status != MHA_OK)
    fprintf(stderr, "mha-bench: %s: %s\n", mha_status_name(status), error->message);
  return status == MHA_OK;
}

static bool create_layer(const bench_problem *problem, const bench_weights *set,
                         mha_weights **layer) {
  mha_config config;
  mha_matrices matrices;
  mha_error error;
  mha_config_init(&config, problem->shape.width, problem->shape.heads);
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
  return report(mha_weights_create(&config, &matrices, layer, &error), &error);
}

static bool create_context(layer_state *state, int index) {
  const bench_shape *shape = &state->problem->shape;
  mha_context_options options;
  mha_shape size;
  mha_error error;
  MHA_INIT(&options);
  options.n_threads = state->problem->options->threads[index];
  MHA_INIT(&size);
  size.batch = shape->batch;
  size.query_length = shape->length;
  size.key_length = shape->length;
  const mha_weights *layer = state->layers[0];
  mha_context **context = &state->contexts[index];
  return report(mha_context_create(&options, context, &error), &error) &&
         report(mha_workspace_bytes(*context, layer, &size, &state->workspace[index], &error),
                &error) &&
         report(mha_context_reserve(*context, layer, &size, &error), &error);
}

static void describe_call(layer_state *state) {
  const bench_problem *problem = state->problem;
  MHA_INIT(&state->attention);
  state->attention.causal = problem->shape.causal;
  MHA_INIT(&state->args);
  state->args.batch = problem->shape.batch;
  state->args.query_length = problem->shape.length;
  state->args.query = problem->input;
  state->args.output = problem->output;
  state->args.attention = &state->attention;
}

static void destroy(void *opaque) {
  layer_state *state = opaque;
  if (!state)
    return;
  for (int i = 0; i < BENCH_MAX_THREADS; i++)
    mha_context_destroy(state->contexts[i]);
  for (int64_t i = 0; state->layers && i < state->problem->n_sets; i++)
    mha_weights_destroy(state->layers[i]);
  free(state->layers);
  free(state);
}

static void *create(const bench_problem *problem) {
  layer_state *state = bench_zeroed(sizeof *state);
  if (!state)
    return NULL;
  state->problem = problem;
  state->layers = bench_zeroed((size_t)problem->n_sets * sizeof *state->layers);
  bool good = state->layers != NULL;
  for (int64_t i = 0; good && i < problem->n_sets; i++)
    good = create_layer(problem, &problem->sets[i], &state->layers[i]);
  for (int i = 0; good && i < problem->options->n_threads; i++)
    good = create_context(state, i);
  if (!good) {
    destroy(state);
    return NULL;
  }
  describe_call(state);
  return state;
}

static bool run(void *opaque, int thread_index, int64_t call) {
  const layer_state *state = opaque;
  mha_error error;
  return report(mha_forward(state->contexts[thread_index],
                            state->layers[call % state->problem->n_sets], &state->args, &error),
                &error);
}

static size_t bytes(const void *opaque, int thread_index) {
  return ((const layer_state *)opaque)->workspace[thread_index];
}

const bench_engine bench_libmha = {
    .name = "libmha",
    .computes_layer = true,
    .create = create,
    .run = run,
    .bytes = bytes,
    .destroy = destroy,
};
