/* What people and machines get to see. */
#ifndef MHA_BENCH_REPORT_H
#define MHA_BENCH_REPORT_H

#include "measure.h"

#include <stdio.h>

/* Machine, BLAS, statistic, what 100 percent is, and the columns' names. */
void bench_report_table_head(FILE *file, const bench_options *options);

/* One line per engine and thread count. With --backward or --pages both have other
 * columns. */
void bench_report_table(FILE *file, const bench_measurement *measurement);

/* JSON lines: first {"record":"machine", …}, then {"record":"row", …} for each line of the table,
 * with --backward {"record":"backward", …}, with --pages
 * {"record":"pages", …}.
 * Times are seconds, null stands for what does not apply. */
void bench_report_json_head(FILE *file, const bench_options *options);
void bench_report_json(FILE *file, const bench_measurement *measurement);

#endif
