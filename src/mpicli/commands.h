/* The commands of `mha-mpi`: each is entered by all processes and returns an exit status. */
#ifndef MHA_SRC_MPICLI_COMMANDS_H
#define MHA_SRC_MPICLI_COMMANDS_H

#include "mha_mpi.h"

/* Layers of random numbers, spread in each way, beside one process that has all threads. */
int mha_mpi_bench(int n_words, char **words);

/* `mha run`, its layer spread over the processes; the first one writes the results. */
int mha_mpi_run(int n_words, char **words);

#endif
