/* What all processes of a team have to say alike, and what one of them has found wrong. */
#ifndef MHA_SRC_MPI_AGREE_H
#define MHA_SRC_MPI_AGREE_H

#include "team.h"

#include <stdbool.h>

/* The functions that can meet in an agreement, and the moments within them. */
typedef enum mha_mpi_moment {
  MHA_MPI_TEAM = 1,
  MHA_MPI_WEIGHTS,
  MHA_MPI_CALL,  /* a layer call */
  MHA_MPI_CORE,  /* step 3 */
  MHA_MPI_BACK,  /* the way back */
  MHA_MPI_ROWS,  /* the numbers of rows */
  MHA_MPI_READY, /* all memory is there */
  MHA_MPI_DONE   /* everything is computed */
} mha_mpi_moment;

/* Arguments as numbers. Every process adds the same ones in the same order, whatever it has found
 * wrong; names are static. */
enum { MHA_MPI_MOST_FACTS = 96 };
typedef struct mha_mpi_facts {
  int n;
  const char *names[MHA_MPI_MOST_FACTS];
  int64_t values[MHA_MPI_MOST_FACTS];
  unsigned char kinds[MHA_MPI_MOST_FACTS]; /* how a message shows them */
} mha_mpi_facts;

void mha_mpi_fact(mha_mpi_facts *facts, const char *name, int64_t value);
/* A number's bits, and a digest of n numbers or of their absence. */
void mha_mpi_fact_float(mha_mpi_facts *facts, const char *name, double value);
void mha_mpi_fact_list(mha_mpi_facts *facts, const char *name, const int64_t *list, int64_t n);
void mha_mpi_fact_floats(mha_mpi_facts *facts, const char *name, const float *list, int64_t n);

/* Collective: MHA_OK where every process comes with MHA_OK to the same moment with the same facts;
 * otherwise the first process's failure, or VALUE for what is not the same, with one message for
 * all. */
mha_status mha_mpi_agree_over(MPI_Comm communicator, mha_mpi_moment moment, mha_status status,
                              const mha_mpi_facts *facts, mha_error *error);
mha_status mha_mpi_agree(const mha_mpi_team *team, mha_mpi_moment moment, mha_status status,
                         const mha_mpi_facts *facts, mha_error *error);

#endif
