/* Sequences that arrive at a server and leave it: which rows each step of it has. The same options
 * give the same traffic, whoever serves it. */
#ifndef MHA_BENCH_TRAFFIC_H
#define MHA_BENCH_TRAFFIC_H

#include <stdbool.h>
#include <stdint.h>

/* Lengths are drawn log-uniformly from low to high: short ones are as frequent as long ones. */
typedef struct traffic_range {
  int64_t low, high;
} traffic_range;

typedef struct traffic_options {
  uint64_t seed;
  int64_t requests;  /* sequences in all */
  int64_t sequences; /* at a time, at most */
  traffic_range prompt, generated;
  int64_t chunk;       /* rows of a prompt in one step, at most */
  int64_t prefix;      /* tokens that many prompts have in common before their own; 0 = none */
  double prefix_share; /* how many of them */
  int64_t page_tokens, n_pages;
} traffic_options;

enum { TRAFFIC_MOST_SEQUENCES = 256 };

/* A sequence that is being served. */
typedef struct traffic_sequence {
  int64_t request; /* its number, or -1: nobody is served here */
  bool has_prefix;
  bool begins;    /* in this step: its entry is made empty or, with a prefix, its copy */
  bool ends;      /* with this step */
  int64_t length; /* tokens before the step, the prefix included */
  int64_t rows;   /* of the step */
  int64_t prompt_left, generated_left; /* before the step */
  int64_t pages;                       /* that it may need altogether */
} traffic_sequence;

typedef struct traffic {
  const traffic_options *options;
  traffic_sequence sequences[TRAFFIC_MOST_SEQUENCES];
  int64_t next_request, finished;
  int64_t pages_free;   /* that nobody served may need */
  int64_t waits;        /* steps in which a sequence could not begin for want of pages */
  int64_t rows, tokens; /* of the step: all rows, and those that end with a token generated */
} traffic;

void traffic_begin(traffic *t, const traffic_options *options);

/* The next step; false when all sequences have left. */
bool traffic_step(traffic *t);

/* The fewest pages with which every sequence begins some day: those of the prefix, and those of one
 * sequence of the most tokens. */
int64_t traffic_least_pages(const traffic_options *options);

/* The most tokens that a sequence may have. */
int64_t traffic_longest(const traffic_options *options);

#endif
