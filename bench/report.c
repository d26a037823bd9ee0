/* Owns the table and the JSON lines. */
#include "report.h"

#include "blas_threads.h"
#include "engines.h"
#include "machine.h"
#include "mha.h"
#include "report_parts.h"

#include <math.h>
#include <string.h>

/* Beyond this much of the CPUs' time in other hands the table says so. */
#define QUIET_PERCENT 3

/* ---- figures: one line, whoever reads it; NAN = does not apply ---- */

typedef struct line_figures {
  const char *engine;
  const char *type;
  int threads, rounds;
  bool extrapolated, disturbed;
  bench_summary time;
  double flops;
  double gflops;
  bench_summary percent_sgemm; /* of the bare product's rate, same run, same threads */
  double speedup_naive;
  double speedup_composed;     /* at the same threads */
  bench_summary speedup_blas;  /* of xsmm over libmha, likewise */
  bench_summary speedup_float; /* of another type over float32, likewise */
  double speedup_one_thread;   /* of the same engine */
  bench_summary percent_read;  /* of a plain read's speed, same threads */
  double read_bytes;           /* of a set */
  double bytes;                /* workspace or score matrices */
  double difference;
} line_figures;

static double flops_of(const bench_measurement *measurement, const bench_engine *engine) {
  return engine->flops ? engine->flops(&measurement->problem)
                       : bench_flops(&measurement->problem.shape);
}

bench_summary bench_scaled(bench_summary summary, double factor) {
  const bench_summary result = {factor * summary.minimum, factor * summary.quartile1,
                                factor * summary.median, factor * summary.quartile3};
  return result;
}

/* Comparisons are made round by round, between neighbours in time. */
static void compare(const bench_measurement *measurement, const bench_row *row,
                    line_figures *figures) {
  const bench_row *sgemm = bench_find_row(measurement, "sgemm", row->threads, false, NULL);
  const bench_row *read = bench_find_row(measurement, "read", row->threads, false, row->type);
  const bench_row *composed = bench_find_row(measurement, "composed", row->threads, false, NULL);
  const bench_row *blas =
      bench_find_row(measurement, bench_libmha.name, row->threads, row->disturbed, NULL);
  const bench_row *alone =
      bench_find_row(measurement, row->engine->name, 1, row->disturbed, row->type);
  const double work = figures->flops / flops_of(measurement, &bench_sgemm);
  figures->percent_sgemm = bench_scaled(bench_ratio(row, sgemm), 100 * work);
  figures->speedup_one_thread = row->threads == 1 ? NAN : bench_ratio(row, alone).median;
  if (!row->engine->computes_layer)
    return;
  figures->percent_read = bench_scaled(bench_ratio(row, read), 100);
  figures->speedup_composed = bench_ratio(row, composed).median;
  if (row->engine == &bench_xsmm)
    figures->speedup_blas = bench_ratio(row, blas);
  if (!bench_type_is_float(row->type))
    figures->speedup_float = bench_ratio(row, blas);
  if (measurement->has_naive)
    figures->speedup_naive = measurement->naive.seconds / figures->time.median;
}

static line_figures row_figures(const bench_measurement *measurement, const bench_row *row) {
  const bench_engine *engine = row->engine;
  line_figures figures = {.engine = engine->name,
                          .type = row->type->name,
                          .threads = row->threads,
                          .rounds = row->n_samples,
                          .disturbed = row->disturbed,
                          .time = bench_summarize(row->samples, row->n_samples),
                          .flops = flops_of(measurement, engine),
                          .speedup_naive = NAN,
                          .speedup_composed = NAN,
                          .speedup_blas = {NAN, NAN, NAN, NAN},
                          .speedup_float = {NAN, NAN, NAN, NAN},
                          .percent_read = {NAN, NAN, NAN, NAN},
                          .read_bytes =
                              (double)bench_problem_type_bytes(&measurement->problem, row->type),
                          .bytes = NAN,
                          .difference = row->difference};
  figures.gflops = 1e-9 * figures.flops / figures.time.median;
  if (engine->bytes)
    figures.bytes = (double)engine->bytes(row->state, row->thread_index);
  compare(measurement, row, &figures);
  return figures;
}

static line_figures naive_figures(const bench_measurement *measurement) {
  const double seconds = measurement->naive.seconds;
  const line_figures figures = {.engine = "naive",
                                .type = "f32",
                                .threads = 1,
                                .rounds = 1,
                                .extrapolated = measurement->naive.extrapolated,
                                .time = {seconds, seconds, seconds, seconds},
                                .flops = bench_flops(&measurement->problem.shape),
                                .gflops = 1e-9 * bench_flops(&measurement->problem.shape) / seconds,
                                .percent_sgemm = {NAN, NAN, NAN, NAN},
                                .speedup_naive = NAN,
                                .speedup_composed = NAN,
                                .speedup_blas = {NAN, NAN, NAN, NAN},
                                .speedup_float = {NAN, NAN, NAN, NAN},
                                .speedup_one_thread = NAN,
                                .percent_read = {NAN, NAN, NAN, NAN},
                                .bytes = NAN,
                                .difference = measurement->naive_difference};
  return figures;
}

/* ---- table ---- */

void bench_cell(FILE *file, int width, int decimals, double value) {
  if (isfinite(value))
    fprintf(file, " %*.*f", width, decimals, value);
  else
    fprintf(file, " %*s", width, "-");
}

int bench_millisecond_decimals(double milliseconds) {
  const double digits = 3 - floor(log10(fmax(milliseconds, 1e-9)));
  return digits < 0 ? 0 : digits > 4 ? 4 : (int)digits;
}

static void table_line(FILE *file, const char *shape, const line_figures *figures) {
  const double median = 1e3 * figures->time.median;
  const double minimum = 1e3 * figures->time.minimum;
  const bench_summary *percent = &figures->percent_sgemm;
  const bench_summary *read = &figures->percent_read;
  const bool once = figures->rounds == 1;
  fprintf(file, "%-*s %3d %-9s%c %-9s", BENCH_NAME_WIDTH, shape, figures->threads, figures->engine,
          figures->extrapolated ? '~'
          : figures->disturbed  ? '*'
                                : ' ',
          figures->type);
  bench_cell(file, 10, bench_millisecond_decimals(median), median);
  bench_cell(file, 10, bench_millisecond_decimals(minimum), once ? NAN : minimum);
  bench_cell(file, 7, 1, once ? NAN : bench_spread(&figures->time));
  bench_cell(file, 8, figures->gflops < 10 ? 2 : 1, figures->flops > 0 ? figures->gflops : NAN);
  bench_cell(file, 7, 1, figures->flops > 0 ? percent->median : NAN);
  bench_cell(file, 5, 1,
             figures->flops > 0 && !once ? percent->quartile3 - percent->quartile1 : NAN);
  bench_cell(file, 8, 1, figures->speedup_naive);
  bench_cell(file, 7, 2, figures->speedup_composed);
  bench_cell(file, 6, 2, figures->speedup_blas.median);
  bench_cell(file, 5, 2, figures->speedup_blas.quartile3 - figures->speedup_blas.quartile1);
  bench_cell(file, 6, 2, figures->speedup_float.median);
  bench_cell(file, 5, 2, figures->speedup_float.quartile3 - figures->speedup_float.quartile1);
  bench_cell(file, 7, 2, figures->speedup_one_thread);
  bench_cell(file, 7, 1, read->median);
  bench_cell(file, 5, 1, once ? NAN : read->quartile3 - read->quartile1);
  bench_cell(file, 9, 2, figures->bytes / 1048576);
  fputc('\n', file);
}

static void blas_line(FILE *file) {
  char blas[256], threading[64], core[64], instructions[64], xsmm[64];
  bench_machine_build_info("blas", blas, sizeof blas);
  bench_machine_build_info("blas_threading", threading, sizeof threading);
  bench_machine_build_info("blas_core", core, sizeof core);
  bench_machine_build_info("instruction_set", instructions, sizeof instructions);
  bench_machine_build_info("xsmm", xsmm, sizeof xsmm);
  fprintf(file, "BLAS: %s; threading %s; core %s. libmha %s, row kernels %s; xsmm: %s.\n", blas,
          threading, core, mha_version(), instructions, xsmm);
  if (!bench_blas_threads_can_change())
    fputs("The BLAS's thread count cannot be changed: sgemm and composed run with its own.\n",
          file);
}

void bench_report_table_head(FILE *file, const bench_options *options) {
  char cpu[128];
  bench_machine_cpu(cpu, sizeof cpu);
  fprintf(file, "CPU: %s, %d online. Thread counts:", cpu, bench_machine_cpu_count());
  for (int i = 0; i < options->n_threads; i++)
    fprintf(file, " %d", options->threads[i]);
  fputs(".\n", file);
  blas_line(file);
  if (options->backward || options->pages) {
    (options->pages ? bench_report_pages_head : bench_report_backward_head)(file, options);
    return;
  }
  fprintf(file,
          "Matrices [%s]. All engines take turns, round by round. ms: median over the rounds; "
          "spread: distance of its\nquartiles in %% of it. GFLOP/s: only visible pairs counted. "
          "%%sgemm: 100 = a bare %lld³ sgemm in the same rounds\nwith as many threads; iqr: "
          "distance of its quartiles. Ratios are medians of the rounds' ratios. x naive: ~ =\n"
          "extrapolated from sampled rows. x comp: over composed with as many threads. x blas: "
          "xsmm over "
          "libmha with as\nmany threads, with its iqr. type: how matrices and cache are stored; x "
          "f32: over libmha with "
          "float32, likewise.\nx 1thr: over one thread. %%read: of the "
          "speed of a plain read of the weights and of the cached keys and "
          "values, with its iqr. MiB: workspace of\nlibmha, score matrices of composed. *: beside "
          "another process that spins on one\nCPU, ratios to rows of the same kind.\n\n",
          options->out_in ? "out][in" : "in][out", (long long)options->yardstick);
  fprintf(file,
          "%-*s %3s %-10s %-9s %10s %10s %7s %8s %7s %5s %8s %7s %6s %5s %6s %5s %7s %7s %5s %9s\n",
          BENCH_NAME_WIDTH, "shape", "thr", "engine", "type", "ms", "min ms", "spread", "GFLOP/s",
          "%sgemm", "iqr", "x naive", "x comp", "x blas", "iqr", "x f32", "iqr", "x 1thr", "%read",
          "iqr", "MiB");
  fflush(file);
}

static void table_lines(FILE *file, const bench_measurement *measurement) {
  const char *shape = measurement->problem.shape.name;
  if (measurement->has_naive) {
    const line_figures figures = naive_figures(measurement);
    table_line(file, shape, &figures);
  }
  for (int i = 0; i < measurement->n_rows; i++) {
    const line_figures figures = row_figures(measurement, &measurement->rows[i]);
    table_line(file, shape, &figures);
  }
}

void bench_report_table(FILE *file, const bench_measurement *measurement) {
  const char *shape = measurement->problem.shape.name;
  if (measurement->problem.options->backward)
    bench_report_backward_lines(file, measurement);
  else if (measurement->problem.options->pages)
    bench_report_pages_lines(file, measurement);
  else
    table_lines(file, measurement);
  if (measurement->others_percent > QUIET_PERCENT)
    fprintf(file, "%-*s NOT QUIET: other processes took %.0f %% of the CPUs' time\n",
            BENCH_NAME_WIDTH, shape, measurement->others_percent);
  if (measurement->note[0])
    fprintf(file, "%-*s %s\n", BENCH_NAME_WIDTH, shape, measurement->note);
  fputc('\n', file);
  fflush(file);
}

/* ---- JSON ---- */

void bench_json_string(FILE *file, const char *key, const char *value) {
  fprintf(file, "\"%s\":\"", key);
  for (const unsigned char *c = (const unsigned char *)value; *c; c++)
    if (*c == '"' || *c == '\\')
      fprintf(file, "\\%c", *c);
    else if (*c < 0x20)
      fprintf(file, "\\u%04x", *c);
    else
      fputc(*c, file);
  fputc('"', file);
}

void bench_json_number(FILE *file, const char *key, double value) {
  if (isfinite(value))
    fprintf(file, ",\"%s\":%.6g", key, value);
  else
    fprintf(file, ",\"%s\":null", key);
}

void bench_json_integer(FILE *file, const char *key, int64_t value) {
  fprintf(file, ",\"%s\":%lld", key, (long long)value);
}

static void json_boolean(FILE *file, const char *key, bool value) {
  fprintf(file, ",\"%s\":%s", key, value ? "true" : "false");
}

void bench_json_shape(FILE *file, const bench_shape *shape) {
  fputc(',', file);
  bench_json_string(file, "shape", shape->name);
  bench_json_integer(file, "batch", shape->batch);
  bench_json_integer(file, "seq", shape->length);
  bench_json_integer(file, "past", shape->past);
  bench_json_integer(file, "d_model", shape->width);
  bench_json_integer(file, "heads", shape->heads);
  bench_json_integer(file, "kv_heads", shape->kv_heads);
  json_boolean(file, "causal", shape->causal);
}

static void json_line(FILE *file, const bench_measurement *measurement,
                      const line_figures *figures) {
  fputs("{\"record\":\"row\"", file);
  bench_json_shape(file, &measurement->problem.shape);
  fputc(',', file);
  bench_json_string(file, "engine", figures->engine);
  fputc(',', file);
  bench_json_string(file, "type", figures->type);
  bench_json_integer(file, "threads", figures->threads);
  bench_json_integer(file, "rounds", figures->rounds);
  json_boolean(file, "extrapolated", figures->extrapolated);
  json_boolean(file, "disturbed", figures->disturbed);
  bench_json_number(file, "median_s", figures->time.median);
  bench_json_number(file, "min_s", figures->time.minimum);
  bench_json_number(file, "quartile1_s", figures->time.quartile1);
  bench_json_number(file, "quartile3_s", figures->time.quartile3);
  bench_json_number(file, "spread_percent",
                    figures->rounds > 1 ? bench_spread(&figures->time) : NAN);
  bench_json_number(file, "gflops", figures->flops > 0 ? figures->gflops : NAN);
  const bench_summary *percent = &figures->percent_sgemm;
  bench_json_number(file, "percent_sgemm", figures->flops > 0 ? percent->median : NAN);
  bench_json_number(file, "percent_sgemm_quartile1", figures->flops > 0 ? percent->quartile1 : NAN);
  bench_json_number(file, "percent_sgemm_quartile3", figures->flops > 0 ? percent->quartile3 : NAN);
  bench_json_number(file, "speedup_naive", figures->speedup_naive);
  bench_json_number(file, "speedup_composed", figures->speedup_composed);
  bench_json_number(file, "speedup_blas", figures->speedup_blas.median);
  bench_json_number(file, "speedup_blas_quartile1", figures->speedup_blas.quartile1);
  bench_json_number(file, "speedup_blas_quartile3", figures->speedup_blas.quartile3);
  bench_json_number(file, "speedup_f32", figures->speedup_float.median);
  bench_json_number(file, "speedup_f32_quartile1", figures->speedup_float.quartile1);
  bench_json_number(file, "speedup_f32_quartile3", figures->speedup_float.quartile3);
  bench_json_number(file, "speedup_one_thread", figures->speedup_one_thread);
  const bench_summary *read = &figures->percent_read;
  bench_json_number(file, "percent_read", read->median);
  bench_json_number(file, "percent_read_quartile1", read->quartile1);
  bench_json_number(file, "percent_read_quartile3", read->quartile3);
  const bench_problem *problem = &measurement->problem;
  bench_json_number(file, "read_bytes", problem->rotates ? figures->read_bytes : NAN);
  bench_json_number(file, "bytes", figures->bytes);
  bench_json_number(file, "difference", figures->difference);
  bench_json_number(file, "others_percent", measurement->others_percent);
  fputs("}\n", file);
}

void bench_report_json_head(FILE *file, const bench_options *options) {
  char text[256];
  fputs("{\"record\":\"machine\",", file);
  bench_machine_cpu(text, sizeof text);
  bench_json_string(file, "cpu", text);
  bench_json_integer(file, "cpus", bench_machine_cpu_count());
  bench_json_integer(file, "cache_bytes", (int64_t)bench_machine_cache_bytes());
  static const char *const keys[] = {
      "version", "blas", "blas_threading", "blas_core", "instruction_set", "engines", "xsmm"};
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    bench_machine_build_info(keys[i], text, sizeof text);
    fputc(',', file);
    bench_json_string(file, keys[i], text);
  }
  fputc(',', file);
  bench_json_string(file, "orientation", options->out_in ? "out-in" : "in-out");
  bench_json_integer(file, "yardstick", options->yardstick);
  fputs("}\n", file);
}

static void json_lines(FILE *file, const bench_measurement *measurement) {
  if (measurement->has_naive) {
    const line_figures figures = naive_figures(measurement);
    json_line(file, measurement, &figures);
  }
  for (int i = 0; i < measurement->n_rows; i++) {
    const line_figures figures = row_figures(measurement, &measurement->rows[i]);
    json_line(file, measurement, &figures);
  }
}

void bench_report_json(FILE *file, const bench_measurement *measurement) {
  if (measurement->problem.options->backward)
    bench_report_backward_json(file, measurement);
  else if (measurement->problem.options->pages)
    bench_report_pages_json(file, measurement);
  else
    json_lines(file, measurement);
  fflush(file);
}
