/* Owns what the tests of several processes have in common. */
#include "processes.h"

#include <stdlib.h>
#include <string.h>

static bool is_good = true;

/* After a test that did not come to its end the processes do not stand at the same place any more.
 */
int test_mpi_still_good(void **state) {
  (void)state;
  if (!is_good)
    MPI_Abort(MPI_COMM_WORLD, 1);
  is_good = false;
  return 0;
}

void test_mpi_passed(void) {
  is_good = true;
}

int test_mpi_run(int argc, char **argv, const struct CMUnitTest *tests, size_t n) {
  int provided = 0;
  int failed = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  for (size_t i = 0; i < n && !failed; i++) {
    const struct CMUnitTest one[] = {tests[i]};
    failed = cmocka_run_group_tests(one, NULL, NULL);
  }
  if (failed)
    MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Finalize();
  return 0;
}

mha_mpi_team *test_mpi_team(int32_t by_heads, const mha_allocator *allocator) {
  mha_mpi_options options;
  mha_mpi_team *team = NULL;
  mha_error error;
  int n = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  if (n % by_heads != 0)
    return NULL;
  MHA_INIT(&options);
  options.by_heads = by_heads;
  options.allocator = allocator;
  test_expect(mha_mpi_team_create(MPI_COMM_WORLD, &options, &team, &error), MHA_OK, &error);
  return team;
}

mha_mpi_place test_mpi_place(const mha_mpi_team *team) {
  mha_mpi_place place;
  MHA_INIT(&place);
  test_expect(mha_mpi_team_place(team, &place, NULL), MHA_OK, NULL);
  return place;
}

void test_mpi_expect(mha_status status, mha_status expected, const mha_error *error) {
  char first[MHA_ERROR_MESSAGE_BYTES];
  test_expect(status, expected, error);
  memcpy(first, error->message, sizeof first);
  MPI_Bcast(first, sizeof first, MPI_CHAR, 0, MPI_COMM_WORLD);
  assert_string_equal(error->message, first);
}

void test_mpi_same(const char *what, const float *numbers, int64_t n) {
  float *first = test_allocate((size_t)n, sizeof *first);
  if (n > 0)
    memcpy(first, numbers, (size_t)n * sizeof *first);
  MPI_Bcast(first, (int)n, MPI_FLOAT, 0, MPI_COMM_WORLD);
  test_same_bits(what, (test_shape){{1, 1, 1, n}}, numbers, first);
  free(first);
}

mha_mpi_weights *test_mpi_share(mha_mpi_team *team, const test_fixture *f) {
  mha_mpi_weights *weights = NULL;
  mha_error error;
  test_expect(mha_mpi_weights_create(team, &f->config, &f->matrices, &weights, &error), MHA_OK,
              &error);
  return weights;
}
