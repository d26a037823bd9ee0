/* Owns `mha run`: one layer over .npy files. Everything is read and computed before anything is
 * written. */
#include "arrays.h"
#include "commands.h"
#include "conflicts.h"
#include "gradients.h"
#include "labels.h"
#include "layer.h"
#include "results.h"
#include "run_rules.h"
#include "shape.h"
#include "signals.h"
#include "steps.h"
#include "svg.h"
#include "view.h"

#include "base/error.h"
#include "files/npy.h"
#include "files/path.h"

#include <inttypes.h>
#include <string.h>

/* Files that may come out: three arrays, a picture of the second, gradients. */
enum {
  RESULT_OUTPUT,
  RESULT_WEIGHTS,
  RESULT_LSE,
  N_ARRAYS,
  RESULT_SVG = N_ARRAYS,
  RESULT_GRADIENTS,
  N_RESULTS = RESULT_GRADIENTS + MHA_N_GRADIENTS
};

typedef struct run {
  const mha_calls *calls;
  const mha_options *options;
  mha_weights *weights;
  mha_context *context;
  mha_config config; /* of the layer, every size derived */
  bool has_batch;    /* the input has a batch dimension, so the results have it too */
  mha_npy_array query, key, value, cosines, sines;
  mha_run_rules run_rules;
  mha_results asked;
  mha_forward_args args;
  mha_labels labels;
  mha_array arrays[N_ARRAYS];
  mha_gradients gradients;
  mha_result results[N_RESULTS]; /* the files */
} run;

static const mha_option_value *option(const run *r, mha_option which) {
  return &r->options->values[which];
}

/* ---- Layer and sequences --------------------------------------------------------------------- */

/* The tables of cosines and sines, [positions][rotary/2] each, which are not copied. */
static mha_status read_tables(run *r, mha_config *config, mha_error *error) {
  const char *cosines = option(r, MHA_OPTION_ROPE_COS)->text;
  const char *sines = option(r, MHA_OPTION_ROPE_SIN)->text;
  if (!cosines)
    return MHA_OK;
  mha_status status = mha_npy_read(cosines, MHA_NPY_FLOATS, NULL, &r->cosines, error);
  if (!status)
    status = mha_npy_read(sines, MHA_NPY_FLOATS, NULL, &r->sines, error);
  if (status)
    return status;
  const int64_t *shape = r->cosines.shape;
  if (r->cosines.rank != 2 || shape[1] < 1 || shape[1] > INT32_MAX)
    return mha_shape_fail(cosines, &r->cosines, "[positions][R/2] with R/2 of at least 1", error);
  if (config->rotary_size == 0)
    config->rotary_size = 2 * shape[1];
  if (config->rotary_size != 2 * shape[1])
    return mha_shape_fail(cosines, &r->cosines, "[positions][R/2] with the R of --rotary", error);
  if (r->sines.rank != 2 || r->sines.shape[0] != shape[0] || r->sines.shape[1] != shape[1])
    return mha_shape_fail(sines, &r->sines, "the shape of --rope-cos", error);
  config->rope_positions = shape[0];
  config->rope_cos = r->cosines.data;
  config->rope_sin = r->sines.data;
  return MHA_OK;
}

static mha_status create(run *r, int *exit_status, mha_error *error) {
  mha_config config;
  mha_context_options context_options;
  MHA_INIT(&config);
  const bool keeps = r->calls->keeps_types || option(r, MHA_OPTION_KEEP_TYPE)->given;
  config.flags = keeps ? MHA_KEEP_TYPE : 0;
  config.norm_epsilon = (float)option(r, MHA_OPTION_NORM_EPSILON)->number;
  config.rope = option(r, MHA_OPTION_ROPE)->rope;
  config.rope_base = option(r, MHA_OPTION_ROPE_BASE)->number;
  config.rotary_size = option(r, MHA_OPTION_ROTARY)->integer;
  mha_status status = read_tables(r, &config, error);
  if (!status)
    status =
        mha_layer_load(r->options, MHA_OPTION_WEIGHTS, &config, &r->weights, exit_status, error);
  MHA_INIT(&r->config);
  if (!status)
    status = mha_weights_config(r->weights, &r->config, error);
  MHA_INIT(&context_options);
  context_options.n_threads = (int32_t)option(r, MHA_OPTION_THREADS)->integer;
  if (!status)
    status = mha_context_create(&context_options, &r->context, error);
  if (!status && r->calls->writes && option(r, MHA_OPTION_TRACE)->given)
    status = mha_context_trace(r->context, mha_view_trace, stdout, error);
  return status;
}

/* Reads [L][width] or [B][L][width]; `letter` names the width. */
static mha_status read_sequence(const run *r, mha_option which, int64_t width, const char *letter,
                                mha_npy_array *array, mha_error *error) {
  const char *path = option(r, which)->text;
  char rule[128];
  const mha_status status = mha_npy_read(path, MHA_NPY_FLOATS, NULL, array, error);
  if (status)
    return status;
  if ((array->rank == 2 || array->rank == 3) && array->shape[array->rank - 1] == width)
    return MHA_OK;
  (void)snprintf(rule, sizeof rule, "[L][%s] or [B][L][%s] with the weights' %s = %" PRId64, letter,
                 letter, letter, width);
  return mha_shape_fail(path, array, rule, error);
}

/* Keys or values: as many batch entries as the input has, and their own length. */
static mha_status read_more(run *r, mha_option which, int64_t width, const char *letter,
                            mha_npy_array *array, mha_error *error) {
  const char *path = option(r, which)->text;
  const mha_status status = read_sequence(r, which, width, letter, array, error);
  if (status)
    return status;
  if (array->rank != r->query.rank || (r->has_batch && array->shape[0] != r->query.shape[0]))
    return mha_shape_fail(path, array,
                          "the batch dimension of --input, or none where that has none", error);
  const int64_t length = array->shape[array->rank - 2];
  if (which == MHA_OPTION_VALUE && length != r->args.key_length)
    return mha_shape_fail(path, array, "as many rows as --key", error);
  r->args.key_length = length;
  return MHA_OK;
}

static mha_status read_sequences(run *r, mha_error *error) {
  mha_forward_args *args = &r->args;
  MHA_INIT(args);
  args->flags = MHA_ALLOW_EMPTY; /* an empty file is meant */
  mha_status status =
      read_sequence(r, MHA_OPTION_INPUT, r->config.query_width, "Eq", &r->query, error);
  if (status)
    return status;
  r->has_batch = r->query.rank == 3;
  args->batch = r->has_batch ? r->query.shape[0] : 1;
  args->query_length = r->query.shape[r->query.rank - 2];
  args->query = r->query.data;
  if (option(r, MHA_OPTION_KEY)->given)
    status = read_more(r, MHA_OPTION_KEY, r->config.key_width, "Ek", &r->key, error);
  if (!status && option(r, MHA_OPTION_VALUE)->given)
    status = read_more(r, MHA_OPTION_VALUE, r->config.value_width, "Ev", &r->value, error);
  args->key = r->key.data;
  args->value = r->value.data;
  return status;
}

/* ---- Results --------------------------------------------------------------------------------- */

/* Memory for [B][n1][n2][n3] or, without a batch, [n1][n2][n3]; the last ones may be missing.
 * `value` is the option that asks for it. */
static mha_status make_result(run *r, int which, const mha_option_value *value, int rank,
                              const int64_t *shape, float **data, mha_error *error) {
  const int first = r->has_batch ? 1 : 0;
  int64_t whole[4] = {r->args.batch};
  if (!value->given)
    return MHA_OK;
  memcpy(whole + first, shape, (size_t)rank * sizeof shape[0]);
  const mha_status status =
      mha_array_make(&r->arrays[which], value->text, rank + first, whole, error);
  *data = r->arrays[which].data;
  return status;
}

/* The picture is of the weights as they are after the softmax. */
static mha_heat_maps maps_of(const run *r) {
  return (mha_heat_maps){.n_entries = r->args.batch,
                         .n_heads = r->config.n_heads,
                         .n_queries = r->args.query_length,
                         .n_keys = r->key.data ? r->args.key_length : r->args.query_length,
                         .weights = r->arrays[RESULT_WEIGHTS].data,
                         .query_labels = r->labels.items,
                         .key_labels = r->labels.items};
}

static mha_status make_results(run *r, mha_error *error) {
  const mha_heat_maps maps = maps_of(r);
  const mha_option_value *svg = option(r, MHA_OPTION_SVG);
  const mha_option_value *asked = option(r, MHA_OPTION_ATTN_WEIGHTS);
  const int64_t output[] = {maps.n_queries, r->config.output_width};
  const int64_t weights[] = {maps.n_heads, maps.n_queries, maps.n_keys};
  MHA_INIT(&r->asked);
  r->asked.stage = option(r, MHA_OPTION_STAGE)->stage;
  r->args.results = &r->asked;
  mha_status status = svg->given ? mha_svg_check(svg->text, &maps, error) : MHA_OK;
  if (!status)
    status = make_result(r, RESULT_OUTPUT, option(r, MHA_OPTION_OUTPUT), 2, output, &r->args.output,
                         error);
  if (!status)
    status = make_result(r, RESULT_WEIGHTS, asked->given ? asked : svg, 3, weights,
                         &r->asked.weights, error);
  if (!status)
    status = make_result(r, RESULT_LSE, option(r, MHA_OPTION_LSE), 2, weights,
                         &r->asked.log_sum_exp, error);
  return status;
}

static mha_status make_gradients(run *r, mha_error *error) {
  const mha_gradient_sources sources = {&r->query, &r->key, &r->value, &r->run_rules.bias};
  return mha_gradients_prepare(r->options, r->weights, &sources, &r->args, &r->gradients, error);
}

/* The array of a file; NULL = it is a picture. */
static mha_array *array_of(run *r, int which) {
  return which < N_ARRAYS            ? &r->arrays[which]
         : which >= RESULT_GRADIENTS ? &r->gradients.arrays[which - RESULT_GRADIENTS]
                                     : NULL;
}

/* A gradient has a name also where there is no such thing. */
static bool is_written(run *r, int which) {
  const mha_array *array = array_of(r, which);
  return r->results[which].path && (!array || array->data);
}

static mha_status stage_result(run *r, int which, mha_output *file, mha_error *error) {
  const char *path = r->results[which].path;
  const mha_heat_maps maps = maps_of(r);
  mha_array *array = array_of(r, which);
  return array ? mha_array_stage(array, path, file, error)
               : mha_svg_stage(path, &maps, file, error);
}

/* All files are complete under temporary names before the first one gets its own. */
static mha_status write_results(run *r, mha_error *error) {
  mha_output files[N_RESULTS];
  for (int i = 0; i < N_RESULTS; i++)
    files[i].has_temporary = 0;
  mha_signals_watch(files, N_RESULTS);
  mha_status status = mha_gradients_make_folder(&r->gradients, error);
  for (int i = 0; !status && i < N_RESULTS; i++)
    if (is_written(r, i))
      status = stage_result(r, i, &files[i], error);
  for (int i = 0; !status && i < N_RESULTS; i++)
    if (is_written(r, i))
      status = mha_output_commit(&files[i], error);
  for (int i = 0; i < N_RESULTS; i++)
    mha_output_discard(&files[i]);
  mha_gradients_leave_folder(&r->gradients, status != MHA_OK);
  mha_signals_watch(NULL, 0);
  return status;
}

static void release(run *r) {
  mha_npy_array *arrays[] = {&r->query, &r->key, &r->value, &r->cosines, &r->sines};
  mha_context_destroy(r->context);
  mha_weights_destroy(r->weights); /* points to the tables */
  for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
    mha_npy_array_release(arrays[i]);
  mha_run_rules_release(&r->run_rules);
  mha_labels_release(&r->labels);
  for (int i = 0; i < N_ARRAYS; i++)
    mha_array_release(&r->arrays[i]);
  mha_gradients_release(&r->gradients);
}

/* ---- The command ----------------------------------------------------------------------------- */

/* What may be written, and whether it may. */
static mha_status check_results(run *r, mha_error *error) {
  static const mha_option options[] = {[RESULT_OUTPUT] = MHA_OPTION_OUTPUT,
                                       [RESULT_WEIGHTS] = MHA_OPTION_ATTN_WEIGHTS,
                                       [RESULT_LSE] = MHA_OPTION_LSE,
                                       [RESULT_SVG] = MHA_OPTION_SVG};
  for (int i = 0; i < RESULT_GRADIENTS; i++)
    r->results[i] = mha_result_of(r->options, options[i]);
  const mha_status status =
      mha_gradients_name(r->options, &r->gradients, &r->results[RESULT_GRADIENTS], error);
  return status ? status : mha_results_check(r->options, r->results, N_RESULTS, error);
}

/* Before anything is computed; what is wrong on the command line in sight of the input is told by
 * `exit_status`. */
static mha_status prepare(run *r, int *exit_status, mha_error *error) {
  mha_status status = mha_conflicts_check(r->options->values, error);
  if (!status)
    status = check_results(r, error);
  if (status && status != MHA_ERROR_IO)
    *exit_status = MHA_EXIT_USAGE;
  if (!status)
    status = create(r, exit_status, error);
  if (!status)
    status = read_sequences(r, error);
  if (status)
    return status;
  status =
      mha_labels_cut(option(r, MHA_OPTION_LABELS)->text, r->args.query_length, &r->labels, error);
  if (!status)
    status = mha_run_rules_read(r->options, r->config.n_heads, &r->run_rules, &r->args, error);
  if (status == MHA_ERROR_LENGTH)
    *exit_status = MHA_EXIT_USAGE;
  if (!status)
    status = make_results(r, error);
  return status ? status : make_gradients(r, error);
}

static mha_status compute(run *r, mha_error *error) {
  const mha_calls *calls = r->calls;
  const mha_steps_cache cache = {option(r, MHA_OPTION_CACHE_TYPE)->element,
                                 option(r, MHA_OPTION_CACHE_PAGES)->integer};
  if (option(r, MHA_OPTION_STEPS)->given)
    return mha_forward_by_steps(calls, r->context, r->weights, &r->config, &cache, &r->args, error);
  const mha_status status = calls->forward(calls->user, r->context, r->weights, &r->args, error);
  return status
             ? status
             : mha_gradients_compute(calls, r->context, r->weights, &r->args, &r->gradients, error);
}

int mha_run_by(const mha_calls *calls, const mha_options *options, mha_error *error) {
  run r = {.calls = calls, .options = options};
  int exit_status = MHA_EXIT_DATA;
  mha_status status = prepare(&r, &exit_status, error);
  const bool good = calls->all_are_good(calls->user, !status);
  if (good)
    status = compute(&r, error);
  if (good && !status && calls->writes)
    status = write_results(&r, error);
  release(&r);
  return good && !status ? MHA_EXIT_OK : exit_status;
}

int mha_run(const mha_options *options, mha_error *error) {
  return mha_run_by(&mha_calls_alone, options, error);
}
