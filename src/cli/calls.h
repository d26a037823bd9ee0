/* Who makes the calls of `mha run`: this process alone, or several together. */
#ifndef MHA_SRC_CLI_CALLS_H
#define MHA_SRC_CLI_CALLS_H

#include "mha.h"

#include <stdbool.h>

/* The calls of a layer, with `user` before what those of mha.h take; every process that makes them
 * gets the whole result. */
typedef struct mha_calls {
  mha_status (*forward)(void *user, mha_context *context, const mha_weights *weights,
                        const mha_forward_args *args, mha_error *error);
  mha_status (*backward)(void *user, mha_context *context, const mha_weights *weights,
                         const mha_forward_args *args, const mha_backward_args *back,
                         mha_error *error);
  /* key heads of a layer of G of which this process has the cache */
  int64_t (*kv_heads)(void *user, int64_t G);
  /* whether all processes are as good as this one is; false on all where one has failed */
  bool (*all_are_good)(void *user, bool good);
  bool writes;      /* this process writes the results and prints */
  bool keeps_types; /* matrices stay as a file has them, whatever --keep-type says */
  void *user;
} mha_calls;

/* This process alone. */
extern const mha_calls mha_calls_alone;

#endif
