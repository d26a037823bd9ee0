/* Measuring one shape: engines take turns, round by round. */
#ifndef MHA_BENCH_MEASURE_H
#define MHA_BENCH_MEASURE_H

#include "engines.h"
#include "statistics.h"

#define BENCH_MAX_ENGINES 8
#define BENCH_MAX_ROWS    (2 * BENCH_MAX_ENGINES * BENCH_MAX_TYPES * BENCH_MAX_THREADS)

/* Largest allowed |difference| between two engines' outputs, in units of the largest |output|, and
 * between their gradients, in units of the largest |gradient| of the same input or matrix. Rounding
 * puts those of composed 2e-6 from what double precision says, and up to 2e-5 where rows have 4096
 * keys or scores deviation 30; a key that all see and should not shows as 5e-2. */
#define BENCH_TOLERANCE 1e-4

/* One engine at one thread count, one of its passes. */
typedef struct bench_row {
  const bench_engine *engine;
  const bench_type *type;
  bench_pass pass;
  void *state; /* shared by the engine's rows of this type */
  int thread_index, threads;
  bool disturbed;    /* another process wants one of the CPUs */
  double estimate;   /* seconds of a call, roughly */
  int64_t next_call; /* walks through the sets of weights */
  double difference; /* from the first engine's output, or gradients, relative; NAN = nothing to
                        compare */
  int n_samples;
  double samples[BENCH_MAX_ROUNDS]; /* seconds of a call in each round */
} bench_row;

typedef struct bench_measurement {
  bench_problem problem;
  bool has_naive;
  bench_naive_result naive;
  double naive_difference;
  int n_rows;
  bench_row *rows;
  float *reference;          /* output of the first row that computes the layer */
  float *gradient_reference; /* gradients of the first row that computes them */
  double others_percent;     /* of all CPUs' time during the rounds; NAN = not known */
  char note[160];            /* what was left out and why; empty if nothing */
} bench_measurement;

/* A round-by-round comparison of two rows, drift of the machine left out: other's time in units of
 * row's. NAN if `other` is NULL. */
bench_summary bench_ratio(const bench_row *row, const bench_row *other);

/* The row of the engine of this name with `threads` threads, undisturbed or not, or NULL; of the
 * given type if the engine has types (NULL = float32). */
const bench_row *bench_find_row(const bench_measurement *measurement, const char *engine,
                                int threads, bool disturbed, const bench_type *type);

/* One pass of the engine of this name with `threads` threads, or NULL. */
const bench_row *bench_find_pass(const bench_measurement *measurement, const char *engine,
                                 int threads, bench_pass pass);

/* Measures one shape. False after a message on stderr if something failed or engines disagree.
 * Destroy the measurement in either case. */
bool bench_measure(const bench_options *options, const bench_shape *shape,
                   bench_measurement *measurement);

void bench_measurement_destroy(bench_measurement *measurement);

#endif
