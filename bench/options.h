/* The command line. */
#ifndef MHA_BENCH_OPTIONS_H
#define MHA_BENCH_OPTIONS_H

#include "shapes.h"
#include "types.h"

#include <stddef.h>

#define BENCH_MAX_ROUNDS  1000
#define BENCH_MAX_THREADS 8

typedef struct bench_options {
  bench_shape_list list;
  const char *engines; /* comma-separated names, NULL = all */
  const char *json;    /* file for JSON lines, NULL = none */
  int n_threads;       /* entries of threads, each different */
  int threads[BENCH_MAX_THREADS];
  int rounds;            /* at most this many per shape */
  double seconds;        /* no new round after this much time, though never fewer than three */
  double turn_seconds;   /* an engine repeats its call for this long in each of its turns */
  double pause_seconds;  /* after a turn with several threads: lets their pools fall asleep */
  int64_t yardstick;     /* n of the bare n³ sgemm */
  double naive_flops;    /* the naive engine computes sampled rows beyond this */
  size_t rotation_bytes; /* used between two uses of the same weights and cache, where a shape is
                            one row or has a cache */
  bench_type_list types; /* of libmha's rows, float32 first */
  bool out_in;           /* matrices lie [out][in] */
  bool disturb;          /* libmha and xsmm once more, beside another process on one of the CPUs */
  bool backward;         /* the way back too: a table of its own, of composed and libmha */
  bool pages;            /* caches with and without pages: a table of its own */
  bool help;
} bench_options;

/* Fills `options` from the command line. False after a message on stderr. */
bool bench_options_parse(int argc, char **argv, bench_options *options);

void bench_options_help(void);

/* Whether --engines names this one. */
bool bench_options_wants(const bench_options *options, const char *engine);

#endif
