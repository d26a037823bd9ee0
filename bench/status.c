/* Owns the message about a call of libmha's that failed. */
#include "status.h"

#include <stdio.h>

bool bench_is_good(mha_status status, const mha_error *error) {
  if (status != MHA_OK)
    fprintf(stderr, "bench: %s: %s\n", mha_status_name(status), error->message);
  return status == MHA_OK;
}
