/* What both tables are put together from. */
#ifndef MHA_BENCH_REPORT_PARTS_H
#define MHA_BENCH_REPORT_PARTS_H

#include "measure.h"

#include <stdio.h>

/* Columns of the shape's name. */
#define BENCH_NAME_WIDTH 18

/* A number right-aligned in `width` columns, '-' where there is none. */
void bench_cell(FILE *file, int width, int decimals, double value);

/* Four significant digits, from microseconds to minutes. */
int bench_millisecond_decimals(double milliseconds);

bench_summary bench_scaled(bench_summary summary, double factor);

void bench_json_string(FILE *file, const char *key, const char *value);
void bench_json_number(FILE *file, const char *key, double value); /* null if not finite */
void bench_json_integer(FILE *file, const char *key, int64_t value);
void bench_json_shape(FILE *file, const bench_shape *shape);

/* The table and the JSON lines of --pages. */
void bench_report_pages_head(FILE *file, const bench_options *options);
void bench_report_pages_lines(FILE *file, const bench_measurement *measurement);
void bench_report_pages_json(FILE *file, const bench_measurement *measurement);

/* The table and the JSON lines of --backward. */
void bench_report_backward_head(FILE *file, const bench_options *options);
void bench_report_backward_lines(FILE *file, const bench_measurement *measurement);
void bench_report_backward_json(FILE *file, const bench_measurement *measurement);

#endif
