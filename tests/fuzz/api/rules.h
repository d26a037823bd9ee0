/* Who attends to whom, and what is asked for besides the output: mha_rules and mha_results for a
 * trial. */
#ifndef MHA_TESTS_FUZZ_RULES_H
#define MHA_TESTS_FUZZ_RULES_H

#include "session.h"

/* The call that the rules are for. */
typedef struct fuzz_rules_for {
  int64_t B, H, Lq, Lk; /* packed: B sequences in Lq and Lk rows */
  int64_t key_rows;     /* packed: of the keys that are given */
  /* packed with a cache: where sequences start in the rows, or NULL; chosen with the entries that
   * they go to */
  int64_t *query_starts, *key_starts;
  bool packed, cached;
  bool append_only;  /* nothing is attended to */
  bool key_is_query; /* packed key_starts may then be left out */
  int64_t window;    /* of a ring, otherwise 0 */
} fuzz_rules_for;

typedef struct fuzz_rules {
  fuzz_rules_for to;
  bool exist; /* false: NULL is given */
  mha_rules rules;
  mha_results results;                                              /* without arrays */
  int64_t *query_lengths, *key_lengths, *query_starts, *key_starts; /* in them, or NULL */
  float *weights, *average, *log_sum_exp; /* results, for the runs that `asks` names */
  int asks;
  const mha_rules *given[2]; /* what the two runs get */
  const mha_results *wanted[2];
} fuzz_rules;

/* n + 1 starts within `rows` rows. */
int64_t *fuzz_choose_starts(fuzz_trial *trial, int64_t n, int64_t rows);

/* Chooses rules that hold, with results that only one of the runs may ask for. */
void fuzz_choose_rules(fuzz_trial *trial, fuzz_rules *rules, const fuzz_rules_for *to);
/* Makes one thing in them wrong. */
void fuzz_spoil_rules(fuzz_trial *trial, fuzz_rules *rules);
/* Makes what is given of them. */
void fuzz_finish_rules(fuzz_trial *trial, fuzz_rules *rules);

#endif
