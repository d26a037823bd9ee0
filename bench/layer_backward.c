/* Owns the engine "libmha" of --backward: mha_forward with and without a tape, and mha_backward
 * with it, for all gradients of the layer. */
#include "engines.h"
#include "layer.h"

#include <stdlib.h>

typedef struct backward_state {
  const bench_problem *problem;
  mha_weights *layer;
  mha_tape *tape;
  mha_context *contexts[BENCH_MAX_THREADS]; /* one for each thread count */
  size_t workspace[BENCH_MAX_THREADS];
  size_t tape_bytes;
  mha_rules rules;
  mha_forward_args args; /* without the tape */
  mha_backward_args back;
} backward_state;

static bool create_context(backward_state *state, int index, const mha_shape *shape) {
  mha_context_options options;
  mha_error error;
  MHA_INIT(&options);
  options.n_threads = state->problem->options->threads[index];
  options.engine = MHA_ENGINE_BLAS;
  mha_context **context = &state->contexts[index];
  return bench_is_good(mha_context_create(&options, context, &error), &error) &&
         bench_is_good(
             mha_workspace_bytes(*context, state->layer, shape, &state->workspace[index], &error),
             &error) &&
         bench_is_good(mha_context_reserve(*context, state->layer, shape, &error), &error);
}

static bool create_tape(backward_state *state, const mha_shape *shape) {
  mha_error error;
  return bench_is_good(mha_tape_create(NULL, &state->tape, &error), &error) &&
         bench_is_good(mha_tape_bytes(state->layer, shape, &state->tape_bytes, &error), &error) &&
         bench_is_good(mha_tape_reserve(state->tape, state->layer, shape, &error), &error);
}

static void describe_gradients(backward_state *state) {
  const bench_problem *problem = state->problem;
  const bench_gradients *gradients = &problem->gradients;
  mha_backward_args *back = &state->back;
  MHA_INIT(back);
  back->dy = problem->d_output;
  back->d_query = gradients->input;
  back->d_wq = gradients->matrices[0];
  back->d_wk = gradients->matrices[1];
  back->d_wv = gradients->matrices[2];
  back->d_wo = gradients->matrices[3];
  back->d_bq = gradients->biases[0];
  back->d_bk = gradients->biases[1];
  back->d_bv = gradients->biases[2];
  back->d_bo = gradients->biases[3];
  back->tape = state->tape;
}

static void destroy(void *opaque) {
  backward_state *state = opaque;
  if (!state)
    return;
  for (int i = 0; i < BENCH_MAX_THREADS; i++)
    mha_context_destroy(state->contexts[i]);
  mha_tape_destroy(state->tape);
  mha_weights_destroy(state->layer);
  free(state);
}

static void *create(const bench_problem *problem, const bench_type *type) {
  backward_state *state = bench_zeroed(sizeof *state);
  mha_shape shape;
  if (!state)
    return NULL;
  MHA_INIT(&shape);
  shape.batch = problem->shape.batch;
  shape.query_length = problem->shape.length;
  shape.backward = MHA_BACKWARD_WITH_TAPE;
  state->problem = problem;
  bool good = bench_layer_create(problem, bench_problem_set(problem, 0), type, 0, &state->layer) &&
              create_tape(state, &shape);
  for (int i = 0; good && i < problem->options->n_threads; i++)
    good = create_context(state, i, &shape);
  if (!good) {
    destroy(state);
    return NULL;
  }
  bench_layer_describe(problem, &state->rules, &state->args);
  describe_gradients(state);
  return state;
}

static bool forward(const backward_state *state, int thread_index, mha_tape *tape) {
  mha_forward_args args = state->args;
  mha_error error;
  args.tape = tape;
  return bench_is_good(mha_forward(state->contexts[thread_index], state->layer, &args, &error),
                       &error);
}

static bool run(void *opaque, int thread_index, int64_t call) {
  (void)call;
  return forward(opaque, thread_index, NULL);
}

static bool keep(void *opaque, int thread_index) {
  const backward_state *state = opaque;
  return forward(state, thread_index, state->tape);
}

static bool backward(void *opaque, int thread_index) {
  const backward_state *state = opaque;
  mha_error error;
  return bench_is_good(
      mha_backward(state->contexts[thread_index], state->layer, &state->args, &state->back, &error),
      &error);
}

static size_t bytes(const void *opaque, int thread_index) {
  return ((const backward_state *)opaque)->workspace[thread_index];
}

static size_t kept_bytes(const void *opaque) {
  return ((const backward_state *)opaque)->tape_bytes;
}

const bench_engine bench_libmha_backward = {
    .name = "libmha",
    .computes_layer = true,
    .create = create,
    .run = run,
    .keep = keep,
    .backward = backward,
    .bytes = bytes,
    .kept_bytes = kept_bytes,
    .destroy = destroy,
};
