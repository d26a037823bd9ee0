/* Owns the order of events for one shape: buffers, one naive pass, a check that all engines agree,
 * then rounds in which each engine has its turn. */
#include "measure.h"

#include "blas_threads.h"
#include "disturb.h"
#include "machine.h"
#include "progress.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FEWEST_ROUNDS 3

/* Calls shorter than this get an untimed one before them in each turn, which fetches what the
 * other engines' turns drove out of the caches and wakes the threads. */
#define WARM_UP_BELOW 0.1

/* ---- comparing ---- */

static double largest(const float *numbers, size_t n) {
  double result = 0;
  for (size_t i = 0; i < n; i++)
    result = fmax(result, fabs((double)numbers[i]));
  return result;
}

/* Largest |a − b|; infinite if there is a NaN. */
static double distance(const float *a, const float *b, size_t n) {
  double result = 0;
  for (size_t i = 0; i < n; i++) {
    const double difference = fabs((double)a[i] - (double)b[i]);
    if (isnan(difference))
      return INFINITY;
    result = fmax(result, difference);
  }
  return result;
}

static bool agrees(const bench_measurement *measurement, const char *name, int threads,
                   const char *what, double difference, double tolerance) {
  if (difference <= tolerance)
    return true;
  fprintf(stderr,
          "mha-bench: %s: %s (threads: %d) differs from the first engine by %.2g of the largest "
          "%s; rule: at most %.0e\n",
          measurement->problem.shape.name, name, threads, difference, what, tolerance);
  return false;
}

/* The first row's output is the reference, the others' are compared with it. */
static bool check_row(bench_measurement *measurement, bench_row *row) {
  const bench_problem *problem = &measurement->problem;
  const size_t n = (size_t)(problem->rows * problem->shape.width);
  if (!measurement->reference) {
    measurement->reference = bench_floats(n);
    if (!measurement->reference)
      return false;
    memcpy(measurement->reference, problem->output, n * sizeof(float));
  }
  const double scale = largest(measurement->reference, n);
  row->difference = distance(problem->output, measurement->reference, n) / scale;
  return agrees(measurement, row->engine->name, row->threads, "output", row->difference,
                row->type->tolerance);
}

/* Largest difference of n numbers in units of `scale`, kept in row->difference if it is the largest
 * so far. */
static void compare_part(const bench_measurement *measurement, bench_row *row, const float *part,
                         size_t n, double scale) {
  const float *block = measurement->problem.gradients.block;
  const float *reference = measurement->gradient_reference + (part - block);
  row->difference = fmax(row->difference, distance(part, reference, n) / scale);
}

/* As check_row. Each matrix is compared in units of its own largest gradient, and so is its bias: a
 * bias is one more row, which meets an input of 1. It has no unit of its own because the gradient
 * of the key bias is 0 but for rounding: it adds the same to all scores of a query. */
static bool check_gradients(bench_measurement *measurement, bench_row *row) {
  const bench_problem *problem = &measurement->problem;
  const bench_gradients *gradients = &problem->gradients;
  const size_t n_input = (size_t)(problem->rows * problem->shape.width);
  if (!measurement->gradient_reference) {
    measurement->gradient_reference = bench_floats(gradients->n);
    if (!measurement->gradient_reference)
      return false;
    memcpy(measurement->gradient_reference, gradients->block, gradients->n * sizeof(float));
  }
  row->difference = 0;
  compare_part(measurement, row, gradients->input, n_input,
               largest(measurement->gradient_reference, n_input));
  for (int i = 0; i < 4; i++) {
    const size_t n = (size_t)bench_projected_width(&problem->shape, i);
    const size_t n_matrix = n * (size_t)problem->shape.width;
    const ptrdiff_t at = gradients->matrices[i] - gradients->block;
    const double scale = largest(measurement->gradient_reference + at, n_matrix);
    compare_part(measurement, row, gradients->matrices[i], n_matrix, scale);
    compare_part(measurement, row, gradients->biases[i], n, scale);
  }
  return agrees(measurement, row->engine->name, row->threads, "gradient", row->difference,
                BENCH_TOLERANCE);
}

static bool check_naive(bench_measurement *measurement) {
  const bench_problem *problem = &measurement->problem;
  const bench_naive_result *naive = &measurement->naive;
  const size_t width = (size_t)problem->shape.width;
  measurement->naive_difference = NAN;
  if (!measurement->has_naive || !measurement->reference)
    return true;
  const double scale = largest(measurement->reference, (size_t)problem->rows * width);
  double difference = 0;
  for (int64_t i = 0; i < naive->n_rows; i++)
    difference =
        fmax(difference, distance(naive->output + (size_t)i * width,
                                  measurement->reference + (size_t)naive->rows[i] * width, width));
  measurement->naive_difference = difference / scale;
  return agrees(measurement, "naive", 1, "output", measurement->naive_difference, BENCH_TOLERANCE);
}

/* ---- running ---- */

static bool call(bench_row *row) {
  const bench_engine *engine = row->engine;
  if (row->pass == BENCH_KEEP)
    return engine->keep(row->state, row->thread_index);
  if (row->pass == BENCH_BACKWARD)
    return engine->backward(row->state, row->thread_index);
  return engine->run(row->state, row->thread_index, row->next_call++);
}

static int enter_turn(const bench_row *row) {
  if (row->disturbed)
    bench_disturb_begin();
  return row->engine->calls_blas ? bench_blas_threads_set(row->threads) : bench_blas_threads();
}

static void leave_turn(const bench_row *row, const bench_options *options, int blas_threads) {
  if (row->disturbed)
    bench_disturb_end();
  if (row->engine->calls_blas)
    bench_blas_threads_set(blas_threads);
  if (row->threads > 1 && options->pause_seconds > 0)
    bench_sleep(options->pause_seconds);
}

/* One turn: *seconds of a call, averaged over n_calls. */
static bool take_turn(bench_row *row, const bench_options *options, int64_t n_calls, bool warm_up,
                      double *seconds) {
  const int blas_threads = enter_turn(row);
  bool good = !warm_up || call(row);
  const double start = bench_now();
  for (int64_t i = 0; good && i < n_calls; i++)
    good = call(row);
  *seconds = (bench_now() - start) / (double)n_calls;
  leave_turn(row, options, blas_threads);
  return good;
}

/* So that what a call leaves out is found. */
static void spoil(float *numbers, size_t n) {
  for (size_t i = 0; i < n; i++)
    numbers[i] = NAN;
}

static bool check(bench_measurement *measurement, bench_row *row) {
  return row->pass == BENCH_BACKWARD ? check_gradients(measurement, row)
                                     : check_row(measurement, row);
}

/* The first call touches all memory and its results are checked; short ones are timed again. */
static bool prepare_row(bench_measurement *measurement, bench_row *row) {
  const bench_problem *problem = &measurement->problem;
  if (row->pass == BENCH_BACKWARD)
    spoil(problem->gradients.block, problem->gradients.n);
  else if (row->engine->computes_layer)
    spoil(problem->output, (size_t)(problem->rows * problem->shape.width));
  row->difference = NAN;
  if (!take_turn(row, problem->options, 1, false, &row->estimate))
    return false;
  if (row->engine->computes_layer && !check(measurement, row))
    return false;
  return row->estimate > 1 || take_turn(row, problem->options, 1, false, &row->estimate);
}

static int64_t calls_per_turn(const bench_row *row, const bench_options *options) {
  const double calls = options->turn_seconds / fmax(row->estimate, 1e-7);
  return calls > 1 ? (int64_t)ceil(calls) : 1;
}

/* Every row once. Each round begins with another row, so that none always follows the same one's
 * heat and leftovers. */
static bool run_round(bench_measurement *measurement, int round) {
  const bench_options *options = measurement->problem.options;
  bool good = true;
  for (int i = 0; good && i < measurement->n_rows; i++) {
    bench_row *row = &measurement->rows[(round + i) % measurement->n_rows];
    good = take_turn(row, options, calls_per_turn(row, options), row->estimate < WARM_UP_BELOW,
                     &row->samples[row->n_samples]);
    row->n_samples++;
  }
  return good;
}

static bool run_rounds(bench_measurement *measurement) {
  const bench_options *options = measurement->problem.options;
  const double others = bench_machine_others_seconds();
  const double start = bench_now();
  bool good = true;
  for (int round = 0; good && round < options->rounds; round++) {
    if (round >= FEWEST_ROUNDS && bench_now() - start > options->seconds)
      break;
    bench_progress("%s: round %d", measurement->problem.shape.name, round + 1);
    good = run_round(measurement, round);
  }
  const double available = (bench_now() - start) * bench_machine_cpu_count();
  measurement->others_percent = 100 * (bench_machine_others_seconds() - others) / available;
  return good;
}

/* ---- engines ---- */

/* Those of shapes without and with a cache, those that go back, and those of pages. */
static const bench_engine *const engines[4][BENCH_MAX_ENGINES] = {
    {&bench_sgemm, &bench_read, &bench_composed, &bench_libmha, &bench_xsmm},
    {&bench_sgemm, &bench_read, &bench_composed_cached, &bench_libmha, &bench_xsmm},
    {&bench_sgemm, &bench_composed_backward, &bench_libmha_backward},
    {&bench_sgemm, &bench_pages[0], &bench_pages[1], &bench_pages[2], &bench_pages[3],
     &bench_pages[4], &bench_pages[5], &bench_pages[6]},
};

static const bench_engine *const *engines_for(const bench_measurement *measurement) {
  const bench_options *options = measurement->problem.options;
  const int of_shape = measurement->problem.shape.past > 0;
  return engines[options->pages ? 3 : options->backward ? 2 : of_shape];
}

static bool takes_part(bench_measurement *measurement, const bench_engine *engine) {
  const bench_problem *problem = &measurement->problem;
  if (!engine)
    return false;
  if (engine->rotating_only && !problem->rotates)
    return false;
  if (engine->is_here && !engine->is_here())
    return false;
  if (engine->computes_layer && !bench_options_wants(problem->options, engine->name))
    return false;
  const double bytes = engine->needs ? engine->needs(problem) : 0;
  const double available = bench_machine_available_bytes();
  if (bytes <= 0.9 * available)
    return true;
  snprintf(measurement->note, sizeof measurement->note,
           "%s left out: it needs %.1f GiB of memory, and %.1f GiB are available", engine->name,
           bytes / 1073741824, available / 1073741824);
  return false;
}

static bool has_pass(const bench_engine *engine, bench_pass pass) {
  return (pass == BENCH_FORWARD && engine->run) || (pass == BENCH_KEEP && engine->keep) ||
         (pass == BENCH_BACKWARD && engine->backward);
}

static void add_row(bench_measurement *measurement, const bench_engine *engine, bench_pass pass,
                    int type, void *state, int thread_index, bool disturbed) {
  bench_row *row = &measurement->rows[measurement->n_rows++];
  row->engine = engine;
  row->pass = pass;
  row->type = &measurement->problem.options->types.types[type];
  row->state = state;
  row->thread_index = thread_index;
  row->threads = measurement->problem.options->threads[thread_index];
  row->disturbed = disturbed;
}

/* Its passes one after the other: the first backward follows a keep. */
static void add_passes(bench_measurement *measurement, const bench_engine *engine, int type,
                       void *state, int thread_index) {
  for (bench_pass pass = BENCH_FORWARD; pass < BENCH_N_PASSES; pass++) {
    if (!has_pass(engine, pass))
      continue;
    add_row(measurement, engine, pass, type, state, thread_index, false);
    if (measurement->problem.options->disturb && engine->can_be_disturbed)
      add_row(measurement, engine, pass, type, state, thread_index, true);
  }
}

/* Rows stand thread count by thread count, so that those to be compared are neighbours. */
static void add_rows(bench_measurement *measurement, void *states[][BENCH_MAX_TYPES]) {
  const bench_options *options = measurement->problem.options;
  for (int t = 0; t < options->n_threads; t++)
    for (int type = 0; type < options->types.n; type++)
      for (int e = 0; e < BENCH_MAX_ENGINES; e++)
        if (states[e][type])
          add_passes(measurement, engines_for(measurement)[e], type, states[e][type], t);
}

static bool create_states(bench_measurement *measurement, const bench_engine *engine,
                          void *states[BENCH_MAX_TYPES]) {
  const bench_options *options = measurement->problem.options;
  const int n = engine->has_types ? options->types.n : 1;
  for (int type = 0; type < n; type++) {
    states[type] = engine->create(&measurement->problem, &options->types.types[type]);
    if (!states[type])
      return false;
  }
  return true;
}

static bool create_rows(bench_measurement *measurement) {
  void *states[BENCH_MAX_ENGINES][BENCH_MAX_TYPES] = {{NULL}};
  bool good = true;
  measurement->rows = bench_zeroed((size_t)BENCH_MAX_ROWS * sizeof *measurement->rows);
  if (!measurement->rows)
    return false;
  for (int e = 0; good && e < BENCH_MAX_ENGINES; e++)
    if (takes_part(measurement, engines_for(measurement)[e]))
      good = create_states(measurement, engines_for(measurement)[e], states[e]);
  add_rows(measurement, states); /* also after a failure: destroying walks the rows */
  return good;
}

static bool run_naive(bench_measurement *measurement) {
  const bench_options *options = measurement->problem.options;
  if (!bench_options_wants(options, "naive") || options->out_in || options->backward ||
      options->pages || measurement->problem.shape.past > 0)
    return true;
  bench_progress("%s: naive", measurement->problem.shape.name);
  measurement->has_naive = true;
  return bench_naive_run(&measurement->problem, &measurement->naive);
}

bool bench_measure(const bench_options *options, const bench_shape *shape,
                   bench_measurement *measurement) {
  memset(measurement, 0, sizeof *measurement);
  bench_progress("%s: filling buffers%s", shape->name, shape->past > 0 ? " and caches" : "");
  if (!bench_problem_create(options, shape, &measurement->problem) || !run_naive(measurement) ||
      !create_rows(measurement))
    return false;
  for (int i = 0; i < measurement->n_rows; i++) {
    bench_progress("%s: checking %s", shape->name, measurement->rows[i].engine->name);
    if (!prepare_row(measurement, &measurement->rows[i]))
      return false;
  }
  return check_naive(measurement) && run_rounds(measurement);
}

/* Of the rows of the first thread count, where those of one state are neighbours. */
static bool is_last_of_state(const bench_measurement *measurement, int i) {
  const bench_row *row = &measurement->rows[i];
  const bool last = i + 1 == measurement->n_rows || row[1].thread_index > 0;
  return row->thread_index == 0 && (last || row[1].state != row->state);
}

void bench_measurement_destroy(bench_measurement *measurement) {
  for (int i = 0; i < measurement->n_rows; i++)
    if (is_last_of_state(measurement, i))
      measurement->rows[i].engine->destroy(measurement->rows[i].state);
  free(measurement->rows);
  free(measurement->reference);
  free(measurement->gradient_reference);
  if (measurement->has_naive)
    bench_naive_destroy(&measurement->naive);
  bench_problem_destroy(&measurement->problem);
}

/* ---- comparing times ---- */

bench_summary bench_ratio(const bench_row *row, const bench_row *other) {
  double ratios[BENCH_MAX_ROUNDS];
  const bench_summary none = {NAN, NAN, NAN, NAN};
  if (!other)
    return none;
  for (int i = 0; i < row->n_samples; i++)
    ratios[i] = other->samples[i] / row->samples[i];
  return bench_summarize(ratios, row->n_samples);
}

const bench_row *bench_find_row(const bench_measurement *measurement, const char *engine,
                                int threads, bool disturbed, const bench_type *type) {
  for (int i = 0; i < measurement->n_rows; i++) {
    const bench_row *row = &measurement->rows[i];
    const bool same_type =
        !row->engine->has_types || (type ? row->type == type : bench_type_is_float(row->type));
    if (strcmp(row->engine->name, engine) == 0 && row->threads == threads &&
        row->disturbed == disturbed && same_type)
      return row;
  }
  return NULL;
}

const bench_row *bench_find_pass(const bench_measurement *measurement, const char *engine,
                                 int threads, bench_pass pass) {
  for (int i = 0; i < measurement->n_rows; i++) {
    const bench_row *row = &measurement->rows[i];
    if (strcmp(row->engine->name, engine) == 0 && row->threads == threads && row->pass == pass)
      return row;
  }
  return NULL;
}
