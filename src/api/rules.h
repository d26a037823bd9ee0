/* The reading of a call's rules: who attends to whom, how scores are made, what is wanted besides.
 */
#ifndef MHA_SRC_API_RULES_H
#define MHA_SRC_API_RULES_H

#include "attention/core.h"
#include "base/arguments.h"

/* A layer's own rules, which hold where a call does not override them. */
typedef struct mha_rules_defaults {
  float scale, softcap;
  const float *sinks; /* [H] or NULL; checked */
} mha_rules_defaults;

/* What a caller asks of step 3. */
typedef struct mha_asked {
  mha_rules rules;
  mha_results results;
} mha_asked;

/* Copies the caller's rules and results; NULL = all zero. */
mha_status mha_rules_read(mha_asked *asked, const mha_rules *rules, const mha_results *results,
                          mha_error *error);

/* Whether the entries are sequences of one packed array. */
bool mha_rules_are_packed(const mha_asked *asked);

/* What a call with a cache does. */
typedef struct mha_cache_use {
  bool appends, attends, key_is_query;
} mha_cache_use;

/* Checks where the sequences of a packed call with a cache begin, and takes that over into a
 * visibility that has its B, its Lq and, as Lk, the rows that are appended. Other calls stay as
 * they are. */
mha_status mha_rules_read_starts(const mha_asked *asked, mha_cache_use use, mha_visibility *v,
                                 mha_error *error);

/* Where nothing is attended to the rules do not matter: they are emptied, but for where packed rows
 * begin. Lengths, which are the cache's, and wanted results are refused. */
mha_status mha_rules_ignore(mha_asked *asked, mha_error *error);

/* Checks the rules and takes them over into a core that has its sizes: G, d, dv, and of its
 * visibility B, H, Lq, Lk and the cache. With a cache Lk is the largest length after the call, and
 * mha_rules_read_starts came first; a query that sees a key that a ring has dropped is
 * MHA_ERROR_LENGTH. key_is_query lets packed keys default to the queries'. Adds the arrays that are
 * read and written to `ranges`. */
mha_status mha_rules_apply(const mha_asked *asked, bool key_is_query,
                           const mha_rules_defaults *defaults, mha_core *core,
                           mha_address_ranges *ranges, mha_error *error);

#endif
