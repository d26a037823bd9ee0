/* What becomes of a status of libmha's in the programs of bench/. */
#ifndef MHA_BENCH_STATUS_H
#define MHA_BENCH_STATUS_H

#include "mha.h"

#include <stdbool.h>

/* Whether the status is MHA_OK; otherwise a message goes to stderr. */
bool bench_is_good(mha_status status, const mha_error *error);

#endif
