/* Owns the table and the JSON lines of --backward: one line for what one engine's forward and
 * backward passes take. */
#include "report_parts.h"

#include <math.h>
#include <string.h>

/* Times of one thing, round by round. */
typedef struct series {
  int n; /* 0 = there is no such thing */
  double seconds[BENCH_MAX_ROUNDS];
} series;

/* What one engine does with one thread count; NAN = does not apply. */
typedef struct backward_figures {
  const char *engine;
  int threads, rounds;
  bench_summary forward;  /* keeping what backward needs */
  bench_summary keeping;  /* that over a forward pass that keeps nothing */
  bench_summary backward; /* alone */
  bench_summary step;     /* forward and backward */
  bench_summary backward_per_forward;
  double gflops; /* of backward */
  bench_summary percent_sgemm;
  bench_summary speedup_backward;   /* over composed with as many threads */
  bench_summary speedup_step;       /* likewise */
  bench_summary speedup_one_thread; /* of the step */
  double kept_bytes, scratch_bytes;
  double difference; /* of the gradients */
} backward_figures;

/* ---- figures ---- */

/* Each product of the forward pass has two behind it, one for each factor. Scores that are computed
 * once more count as nothing. */
static double backward_flops(const bench_shape *shape) {
  return 2 * bench_flops(shape);
}

static void take(series *result, const bench_row *row) {
  result->n = row ? row->n_samples : 0;
  if (row)
    memcpy(result->seconds, row->samples, (size_t)row->n_samples * sizeof *row->samples);
}

/* A step of training: the forward pass that keeps and the backward pass of the same round. */
static void take_step(series *result, const bench_row *keep, const bench_row *backward) {
  take(result, keep);
  if (!backward)
    result->n = 0;
  for (int i = 0; i < result->n; i++)
    result->seconds[i] += backward->samples[i];
}

/* `above` in units of `below`, round by round. */
static bench_summary ratio(const series *above, const series *below) {
  double ratios[BENCH_MAX_ROUNDS];
  const bench_summary none = {NAN, NAN, NAN, NAN};
  if (above->n == 0 || below->n == 0)
    return none;
  for (int i = 0; i < above->n; i++)
    ratios[i] = above->seconds[i] / below->seconds[i];
  return bench_summarize(ratios, above->n);
}

static void find_step(const bench_measurement *measurement, const char *engine, int threads,
                      series *step) {
  take_step(step, bench_find_pass(measurement, engine, threads, BENCH_KEEP),
            bench_find_pass(measurement, engine, threads, BENCH_BACKWARD));
}

static void compare(const bench_measurement *measurement, const bench_row *row,
                    backward_figures *figures) {
  const bool is_composed = row->engine == &bench_composed_backward;
  const char *composed = bench_composed_backward.name;
  series step, other;
  find_step(measurement, row->engine->name, row->threads, &step);
  figures->step = bench_summarize(step.seconds, step.n);
  find_step(measurement, composed, row->threads, &other);
  if (is_composed)
    other.n = 0;
  figures->speedup_step = ratio(&other, &step);
  find_step(measurement, row->engine->name, 1, &other);
  if (row->threads == 1)
    other.n = 0;
  figures->speedup_one_thread = ratio(&other, &step);
  const bench_row *back = bench_find_pass(measurement, composed, row->threads, BENCH_BACKWARD);
  figures->speedup_backward = bench_ratio(row, is_composed ? NULL : back);
}

/* `row` is that of the backward pass. */
static backward_figures figures_of(const bench_measurement *measurement, const bench_row *row) {
  const bench_engine *engine = row->engine;
  const bench_row *keep = bench_find_pass(measurement, engine->name, row->threads, BENCH_KEEP);
  const bench_row *plain = bench_find_pass(measurement, engine->name, row->threads, BENCH_FORWARD);
  const bench_row *sgemm =
      bench_find_pass(measurement, bench_sgemm.name, row->threads, BENCH_FORWARD);
  const double flops = backward_flops(&measurement->problem.shape);
  const double work = flops / bench_sgemm.flops(&measurement->problem);
  backward_figures figures = {.engine = engine->name,
                              .threads = row->threads,
                              .rounds = row->n_samples,
                              .forward = bench_summarize(keep->samples, keep->n_samples),
                              .backward = bench_summarize(row->samples, row->n_samples),
                              .percent_sgemm = bench_scaled(bench_ratio(row, sgemm), 100 * work),
                              .kept_bytes = (double)engine->kept_bytes(row->state),
                              .scratch_bytes = (double)engine->bytes(row->state, row->thread_index),
                              .difference = row->difference};
  figures.gflops = 1e-9 * flops / figures.backward.median;
  series above, below;
  take(&above, row);
  take(&below, keep);
  figures.backward_per_forward = ratio(&above, &below);
  take(&above, plain);
  figures.keeping = ratio(&below, &above);
  compare(measurement, row, &figures);
  return figures;
}

/* ---- table ---- */

void bench_report_backward_head(FILE *file, const bench_options *options) {
  fprintf(
      file,
      "Matrices [%s]. All passes of all engines take turns, round by round; ms are medians over "
      "the rounds, ratios\nmedians of the rounds' ratios, iqr the distance of their quartiles. "
      "fwd: forward pass that keeps what the way back needs;\n/plain: over one that keeps "
      "nothing. bwd: gradients of input, matrices and biases; spread: distance of its "
      "quartiles in\n%% of it; GFLOP/s and %%sgemm of bwd, twice the operations of fwd, 100 = a "
      "bare %lld³ sgemm in the same rounds. step: fwd\nand bwd. x comp: over composed with as "
      "many threads, bwd and step. x 1thr: of the step, over one thread. MiB kept: from\nfwd "
      "to bwd; scratch: workspace of libmha, gradients between the products of composed.\n\n",
      options->out_in ? "out][in" : "in][out", (long long)options->yardstick);
  fprintf(file, "%*s%29s\n", BENCH_NAME_WIDTH + 110, "x comp", "MiB");
  fprintf(file,
          "%-*s %3s %-9s %10s %6s %10s %7s %8s %7s %5s %7s %5s %10s %6s %6s %5s %6s %9s %9s\n",
          BENCH_NAME_WIDTH, "shape", "thr", "engine", "fwd ms", "/plain", "bwd ms", "spread",
          "GFLOP/s", "%sgemm", "iqr", "bwd/fwd", "iqr", "step ms", "bwd", "step", "iqr", "x 1thr",
          "kept", "scratch");
  fflush(file);
}

static void milliseconds(FILE *file, const bench_summary *time) {
  bench_cell(file, 10, bench_millisecond_decimals(1e3 * time->median), 1e3 * time->median);
}

/* The distance of the quartiles, where there are rounds to have any. */
static void distance(FILE *file, int decimals, const bench_summary *summary, int rounds) {
  bench_cell(file, 5, decimals, rounds > 1 ? summary->quartile3 - summary->quartile1 : NAN);
}

static void table_line(FILE *file, const char *shape, const backward_figures *figures) {
  const int rounds = figures->rounds;
  fprintf(file, "%-*s %3d %-9s", BENCH_NAME_WIDTH, shape, figures->threads, figures->engine);
  milliseconds(file, &figures->forward);
  bench_cell(file, 6, 2, figures->keeping.median);
  milliseconds(file, &figures->backward);
  bench_cell(file, 7, 1, rounds > 1 ? bench_spread(&figures->backward) : NAN);
  bench_cell(file, 8, figures->gflops < 10 ? 2 : 1, figures->gflops);
  bench_cell(file, 7, 1, figures->percent_sgemm.median);
  distance(file, 1, &figures->percent_sgemm, rounds);
  bench_cell(file, 7, 2, figures->backward_per_forward.median);
  distance(file, 2, &figures->backward_per_forward, rounds);
  milliseconds(file, &figures->step);
  bench_cell(file, 6, 2, figures->speedup_backward.median);
  bench_cell(file, 6, 2, figures->speedup_step.median);
  distance(file, 2, &figures->speedup_step, rounds);
  bench_cell(file, 6, 2, figures->speedup_one_thread.median);
  bench_cell(file, 9, 2, figures->kept_bytes / 1048576);
  bench_cell(file, 9, 2, figures->scratch_bytes / 1048576);
  fputc('\n', file);
}

void bench_report_backward_lines(FILE *file, const bench_measurement *measurement) {
  for (int i = 0; i < measurement->n_rows; i++)
    if (measurement->rows[i].pass == BENCH_BACKWARD) {
      const backward_figures figures = figures_of(measurement, &measurement->rows[i]);
      table_line(file, measurement->problem.shape.name, &figures);
    }
}

/* ---- JSON ---- */

static void json_summary(FILE *file, const char *name, const char *unit,
                         const bench_summary *summary) {
  static const char *const parts[] = {"median", "quartile1", "quartile3"};
  const double values[] = {summary->median, summary->quartile1, summary->quartile3};
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
    char key[64];
    snprintf(key, sizeof key, "%s_%s%s", name, parts[i], unit);
    bench_json_number(file, key, values[i]);
  }
}

static void json_line(FILE *file, const bench_measurement *measurement,
                      const backward_figures *figures) {
  fputs("{\"record\":\"backward\"", file);
  bench_json_shape(file, &measurement->problem.shape);
  fputc(',', file);
  bench_json_string(file, "engine", figures->engine);
  bench_json_integer(file, "threads", figures->threads);
  bench_json_integer(file, "rounds", figures->rounds);
  json_summary(file, "forward", "_s", &figures->forward);
  json_summary(file, "backward", "_s", &figures->backward);
  json_summary(file, "step", "_s", &figures->step);
  json_summary(file, "keeping", "", &figures->keeping);
  json_summary(file, "backward_per_forward", "", &figures->backward_per_forward);
  bench_json_number(file, "gflops", figures->gflops);
  json_summary(file, "percent_sgemm", "", &figures->percent_sgemm);
  json_summary(file, "speedup_composed_backward", "", &figures->speedup_backward);
  json_summary(file, "speedup_composed_step", "", &figures->speedup_step);
  json_summary(file, "speedup_one_thread", "", &figures->speedup_one_thread);
  bench_json_number(file, "kept_bytes", figures->kept_bytes);
  bench_json_number(file, "scratch_bytes", figures->scratch_bytes);
  bench_json_number(file, "difference", figures->difference);
  bench_json_number(file, "others_percent", measurement->others_percent);
  fputs("}\n", file);
}

void bench_report_backward_json(FILE *file, const bench_measurement *measurement) {
  for (int i = 0; i < measurement->n_rows; i++)
    if (measurement->rows[i].pass == BENCH_BACKWARD) {
      const backward_figures figures = figures_of(measurement, &measurement->rows[i]);
      json_line(file, measurement, &figures);
    }
}
