/* Owns the table and the JSON lines of --pages: each cache beside the one without pages. */
#include "report_parts.h"

#include <math.h>

/* What one cache takes with one thread count; NAN = does not apply. */
typedef struct pages_figures {
  const bench_row *row;
  bench_summary time;
  bench_summary percent_sgemm; /* of the bare product's rate, same run, same threads */
  bench_summary per_unpaged;   /* time over that without pages, same type and threads */
  double bytes;                /* workspace */
} pages_figures;

static pages_figures figures_of(const bench_measurement *measurement, const bench_row *row) {
  const bench_problem *problem = &measurement->problem;
  const bench_row *sgemm = bench_find_row(measurement, bench_sgemm.name, row->threads, false, NULL);
  const bench_row *unpaged =
      bench_find_row(measurement, bench_pages[0].name, row->threads, false, row->type);
  const double work = bench_flops(&problem->shape) / bench_sgemm.flops(problem);
  const bench_summary none = bench_ratio(row, NULL);
  const pages_figures figures = {
      .row = row,
      .time = bench_summarize(row->samples, row->n_samples),
      .percent_sgemm = bench_scaled(bench_ratio(row, sgemm), 100 * work),
      .per_unpaged = row == unpaged || !unpaged ? none : bench_ratio(unpaged, row),
      .bytes = (double)row->engine->bytes(row->state, row->thread_index)};
  return figures;
}

/* ---- table ---- */

void bench_report_pages_head(FILE *file, const bench_options *options) {
  fprintf(file,
          "Matrices [%s]. A call appends the shape's rows to the cache and attends to all it has; "
          "caches differ in their pages:\nnone; pages of 16, 64, 256 tokens that lie anywhere in "
          "the pool; the same in order. All take turns, round by round.\nms: median over the "
          "rounds; spread: distance of its quartiles in %% of it. %%sgemm: 100 = a bare %lld³ "
          "sgemm in the\nsame rounds. /no pages: time over that without pages, type and threads "
          "the same, median of the rounds' ratios. iqr:\ndistance of the quartiles of the column "
          "before it. MiB: workspace.\n\n",
          options->out_in ? "out][in" : "in][out", (long long)options->yardstick);
  fprintf(file, "%-*s %3s %-12s %-9s %10s %7s %7s %5s %9s %6s %9s\n", BENCH_NAME_WIDTH, "shape",
          "thr", "engine", "type", "ms", "spread", "%sgemm", "iqr", "/no pages", "iqr", "MiB");
  fflush(file);
}

static void distance(FILE *file, int width, int decimals, const bench_summary *summary,
                     int rounds) {
  bench_cell(file, width, decimals, rounds > 1 ? summary->quartile3 - summary->quartile1 : NAN);
}

static void table_line(FILE *file, const char *shape, const pages_figures *figures) {
  const double median = 1e3 * figures->time.median;
  const int rounds = figures->row->n_samples;
  fprintf(file, "%-*s %3d %-12s %-9s", BENCH_NAME_WIDTH, shape, figures->row->threads,
          figures->row->engine->name, figures->row->type->name);
  bench_cell(file, 10, bench_millisecond_decimals(median), median);
  bench_cell(file, 7, 1, rounds > 1 ? bench_spread(&figures->time) : NAN);
  bench_cell(file, 7, 1, figures->percent_sgemm.median);
  distance(file, 5, 1, &figures->percent_sgemm, rounds);
  bench_cell(file, 9, 3, figures->per_unpaged.median);
  distance(file, 6, 3, &figures->per_unpaged, rounds);
  bench_cell(file, 9, 2, figures->bytes / 1048576);
  fputc('\n', file);
}

void bench_report_pages_lines(FILE *file, const bench_measurement *measurement) {
  for (int i = 0; i < measurement->n_rows; i++)
    if (measurement->rows[i].engine->computes_layer) {
      const pages_figures figures = figures_of(measurement, &measurement->rows[i]);
      table_line(file, measurement->problem.shape.name, &figures);
    }
}

/* ---- JSON ---- */

static void json_line(FILE *file, const bench_measurement *measurement,
                      const pages_figures *figures) {
  const bench_row *row = figures->row;
  fputs("{\"record\":\"pages\"", file);
  bench_json_shape(file, &measurement->problem.shape);
  fputc(',', file);
  bench_json_string(file, "engine", row->engine->name);
  fputc(',', file);
  bench_json_string(file, "type", row->type->name);
  bench_json_integer(file, "threads", row->threads);
  bench_json_integer(file, "rounds", row->n_samples);
  bench_json_number(file, "median_s", figures->time.median);
  bench_json_number(file, "quartile1_s", figures->time.quartile1);
  bench_json_number(file, "quartile3_s", figures->time.quartile3);
  bench_json_number(file, "percent_sgemm", figures->percent_sgemm.median);
  bench_json_number(file, "per_unpaged", figures->per_unpaged.median);
  bench_json_number(file, "per_unpaged_quartile1", figures->per_unpaged.quartile1);
  bench_json_number(file, "per_unpaged_quartile3", figures->per_unpaged.quartile3);
  bench_json_number(file, "bytes", figures->bytes);
  bench_json_number(file, "difference", row->difference);
  bench_json_number(file, "others_percent", measurement->others_percent);
  fputs("}\n", file);
}

void bench_report_pages_json(FILE *file, const bench_measurement *measurement) {
  for (int i = 0; i < measurement->n_rows; i++)
    if (measurement->rows[i].engine->computes_layer) {
      const pages_figures figures = figures_of(measurement, &measurement->rows[i]);
      json_line(file, measurement, &figures);
    }
}
