/* Owns `mha-mpi run`: the command `mha run`, of which every process reads the files, all make the
 * calls together, and the first one writes. */
#include "commands.h"

#include "base/error.h"
#include "cli/commands.h"
#include "cli/signals.h"
#include "cli/terminal.h"
#include "spread.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

typedef struct spread_run {
  mha_spread spread;
  int speaker; /* the process that tells what is wrong */
} spread_run;

static mha_status forward(void *user, mha_context *context, const mha_weights *weights,
                          const mha_forward_args *args, mha_error *error) {
  const spread_run *r = user;
  return mha_spread_forward(&r->spread, context, weights, args, error);
}

static mha_status backward(void *user, mha_context *context, const mha_weights *weights,
                           const mha_forward_args *args, const mha_backward_args *back,
                           mha_error *error) {
  const spread_run *r = user;
  return mha_spread_backward(&r->spread, context, weights, args, back, error);
}

static int64_t kv_heads(void *user, int64_t G) {
  const spread_run *r = user;
  return mha_spread_kv_heads(&r->spread, G);
}

static bool all_are_good(void *user, bool good) {
  spread_run *r = user;
  int first = good ? INT_MAX : (int)r->spread.place.rank;
  MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  r->speaker = first == INT_MAX ? 0 : first;
  return first == INT_MAX;
}

/* --by-heads=N among the words, which it leaves; the others are `mha run`'s. -1 = it is wrong. */
static int take_by_heads(int *n_words, char **words) {
  static const char name[] = "--by-heads=";
  int by_heads = 0;
  int kept = 0;
  for (int i = 0; i < *n_words; i++) {
    char *end = NULL;
    if (strncmp(words[i], name, sizeof name - 1) != 0) {
      words[kept++] = words[i];
      continue;
    }
    const long given = strtol(words[i] + sizeof name - 1, &end, 10);
    by_heads = *end || given < 1 || given > INT_MAX ? -1 : (int)given;
  }
  *n_words = kept;
  return by_heads;
}

static int fail(const spread_run *r, int exit_status, const char *message) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == r->speaker) {
    fputs("mha-mpi: ", stderr);
    (void)mha_terminal_print(message, strlen(message), stderr);
    fputc('\n', stderr);
  }
  return exit_status;
}

static int run_options(spread_run *r, const mha_options *options) {
  mha_error error;
  const mha_calls calls = {.forward = forward,
                           .backward = backward,
                           .kv_heads = kv_heads,
                           .all_are_good = all_are_good,
                           .writes = r->spread.place.rank == 0,
                           .keeps_types = true,
                           .user = r};
  if (options->values[MHA_OPTION_HELP].given) {
    if (calls.writes)
      mha_options_help(MHA_COMMAND_RUN, stdout);
    return MHA_EXIT_OK;
  }
  const int status = mha_run_by(&calls, options, &error);
  return status ? fail(r, status, error.message) : status;
}

int mha_mpi_run(int n_words, char **words) {
  spread_run r = {.speaker = 0};
  mha_options options;
  mha_error error;
  const int by_heads = take_by_heads(&n_words, words);
  if (by_heads < 0)
    return fail(&r, MHA_EXIT_USAGE,
                "--by-heads is no count; rule: --by-heads=N, N of the processes");
  if (mha_spread_create(&r.spread, by_heads, &error))
    return fail(&r, MHA_EXIT_USAGE, error.message);
  mha_signals_prepare();
  int exit_status = MHA_EXIT_USAGE;
  if (mha_options_parse(MHA_COMMAND_RUN, n_words, words, &options, &error))
    (void)fail(&r, exit_status, error.message);
  else
    exit_status = run_options(&r, &options);
  mha_options_release(&options);
  mha_spread_destroy(&r.spread);
  return exit_status;
}
