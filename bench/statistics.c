/* Owns the clock and the statistics. */
#define _POSIX_C_SOURCE 200809L
#include "statistics.h"

#include "options.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

double bench_now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

void bench_sleep(double seconds) {
  const time_t whole = (time_t)seconds;
  const struct timespec time = {whole, (long)((seconds - (double)whole) * 1e9)};
  nanosleep(&time, NULL);
}

static int compare(const void *left, const void *right) {
  const double a = *(const double *)left;
  const double b = *(const double *)right;
  return (a > b) - (a < b);
}

static double quantile(const double *sorted, int n, double share) {
  const double position = share * (n - 1);
  const int below = (int)position;
  const int above = below + 1 < n ? below + 1 : below;
  return sorted[below] + (position - below) * (sorted[above] - sorted[below]);
}

bench_summary bench_summarize(const double *values, int n) {
  double sorted[BENCH_MAX_ROUNDS];
  memcpy(sorted, values, (size_t)n * sizeof *values);
  qsort(sorted, (size_t)n, sizeof *sorted, compare);
  const bench_summary summary = {sorted[0], quantile(sorted, n, 0.25), quantile(sorted, n, 0.5),
                                 quantile(sorted, n, 0.75)};
  return summary;
}

double bench_spread(const bench_summary *summary) {
  return 100 * (summary->quartile3 - summary->quartile1) / summary->median;
}
