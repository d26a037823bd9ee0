/* Statuses and messages: the only place where an mha_error is written. */
#ifndef MHA_SRC_BASE_ERROR_H
#define MHA_SRC_BASE_ERROR_H

#include "mha.h"

#if defined(__GNUC__)
#define MHA_PRINTF(format_index, first_argument)                                                   \
  __attribute__((format(printf, format_index, first_argument)))
#else
#define MHA_PRINTF(format_index, first_argument)
#endif

/* Stores `status` and the formatted message in `error`, which may be NULL, and returns `status`,
 * so that a check reads: return mha_fail(error, MHA_ERROR_SIZE, "batch is %lld; rule: ...", b).
 * A message is one sentence: the argument, the value received, "; rule: " and the rule. */
mha_status mha_fail(mha_error *error, mha_status status, const char *format, ...) MHA_PRINTF(3, 4);

/* The sentence for a status that came out of computing, not of reading the arguments; MHA_OK
 * passes. */
mha_status mha_explain(mha_status status, mha_error *error);

/* Stores MHA_OK and an empty message; returns MHA_OK. */
mha_status mha_succeed(mha_error *error);

#endif
