/* Owns the command `mha-mpi`: which command runs in all processes, and their one exit status. */
#include "commands.h"

#include <stdio.h>
#include <string.h>

static int print_help(void) {
  puts("mha-mpi - one layer over several processes: mpiexec -n N mha-mpi COMMAND\n\n"
       "mha-mpi run [options]     one layer over .npy files, with the options of `mha run`, which\n"
       "                          run --help prints\n"
       "  --by-heads=N    so many processes share the heads of the same rows; without it all do,\n"
       "                  and with 1 each has rows of its own\n\n"
       "mha-mpi bench [options]   layers of random numbers, by heads and by positions, beside one\n"
       "                          process with the threads of all\n"
       "  --shape=NAME    bert8, gpt1k, long4k or quick; without it the first three\n"
       "  --threads=N     of each process, 1\n"
       "  --rounds=N      7\n"
       "  --events        where the time goes, of one call of each way\n"
       "  --link          alone: times of messages and sums between the processes\n\n"
       "mha-mpi --help            print this");
  return 0;
}

static int run(int argc, char **argv, int rank) {
  if (argc >= 2 && strcmp(argv[1], "bench") == 0)
    return mha_mpi_bench(argc - 2, argv + 2);
  if (argc >= 2 && strcmp(argv[1], "run") == 0)
    return mha_mpi_run(argc - 2, argv + 2);
  if (argc == 2 && strcmp(argv[1], "--help") == 0)
    return rank == 0 ? print_help() : 0;
  if (rank == 0)
    fputs("mha-mpi: no such command; rule: run or bench, and --help explains them\n", stderr);
  return 2;
}

int main(int argc, char **argv) {
  int provided = 0;
  int rank = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const int status = run(argc, argv, rank);
  MPI_Finalize();
  return status;
}
