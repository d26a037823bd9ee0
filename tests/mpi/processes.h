/* Tests that several processes run side by side: teams, what all of them found, and an end for all
 * when one fails. */
#ifndef MHA_TESTS_MPI_PROCESSES_H
#define MHA_TESTS_MPI_PROCESSES_H

#include "fixture.h"

#include "mha_mpi.h"

/* MPI_Init, the tests on every process, MPI_Finalize. A process in which one fails ends all. */
int test_mpi_run(int argc, char **argv, const struct CMUnitTest *tests, size_t n);
#define TEST_MPI(function) cmocka_unit_test_setup(function, test_mpi_still_good)
int test_mpi_still_good(void **state);
/* To be called at each test's end: what the others of the process look at. */
void test_mpi_passed(void);

/* A team in which so many share heads; NULL where that does not divide the processes. */
mha_mpi_team *test_mpi_team(int32_t by_heads, const mha_allocator *allocator);
mha_mpi_place test_mpi_place(const mha_mpi_team *team);

/* Fails unless `status` is `expected` on this process, and the message is that of process 0. */
void test_mpi_expect(mha_status status, mha_status expected, const mha_error *error);
/* Fails unless n numbers have the same bits on all processes. */
void test_mpi_same(const char *what, const float *numbers, int64_t n);

/* The share of a fixture's layer. */
mha_mpi_weights *test_mpi_share(mha_mpi_team *team, const test_fixture *fixture);

#endif
