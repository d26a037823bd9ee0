/* The clock, and what is made of its readings. */
#ifndef MHA_BENCH_STATISTICS_H
#define MHA_BENCH_STATISTICS_H

/* Seconds on a clock that never jumps. */
double bench_now(void);

void bench_sleep(double seconds);

typedef struct bench_summary {
  double minimum, quartile1, median, quartile3;
} bench_summary;

/* n >= 1 values, in any order, unchanged. Quartiles are interpolated between neighbours. */
bench_summary bench_summarize(const double *values, int n);

/* Distance of the quartiles in percent of the median. */
double bench_spread(const bench_summary *summary);

#endif
