/* mha-bench: libmha beside naive loops and plain BLAS calls, on the same buffers, with the same
 * clock, taking turns. This file owns the walk through the shapes. */
#include "disturb.h"
#include "measure.h"
#include "progress.h"
#include "report.h"

#include <stdio.h>

static bool measure_shape(const bench_options *options, const bench_shape *shape, FILE *json) {
  bench_measurement measurement;
  const bool good = bench_measure(options, shape, &measurement);
  bench_progress_end();
  if (good) {
    bench_report_table(stdout, &measurement);
    if (json)
      bench_report_json(json, &measurement);
  }
  bench_measurement_destroy(&measurement);
  return good;
}

static bool measure_all(const bench_options *options, FILE *json) {
  bool good = true;
  bench_report_table_head(stdout, options);
  if (json)
    bench_report_json_head(json, options);
  for (int i = 0; i < options->list.n; i++)
    good = measure_shape(options, &options->list.shapes[i], json) && good;
  return good;
}

static bool close_json(FILE *json) {
  const bool failed = ferror(json) != 0;
  return fclose(json) == 0 && !failed;
}

int main(int argc, char **argv) {
  bench_options options;
  FILE *json = NULL;
  if (!bench_options_parse(argc, argv, &options))
    return 2;
  if (options.help) {
    bench_options_help();
    return 0;
  }
  if (options.json && !(json = fopen(options.json, "w"))) {
    perror(options.json);
    return 1;
  }
  bool good = (!options.disturb || bench_disturb_create()) && measure_all(&options, json);
  bench_disturb_destroy();
  if (json && !close_json(json)) {
    fprintf(stderr, "mha-bench: %s could not be written\n", options.json);
    good = false;
  }
  return good ? 0 : 1;
}
