/* Shares out of files: each process has its own rows and columns of every kind of file and type, as
 * it is stored or widened, and no copy of the whole. */
#include "processes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static test_fixture fixture;
static int rank, n_processes;
static char path[64]; /* one for each number of processes */

static test_case make_case(int32_t type, bool out_in) {
  return (test_case){.seed = 3,
                     .B = 2,
                     .Lq = 9,
                     .H = 2 * n_processes,
                     .G = n_processes,
                     .d = 32,
                     .Eq = 64,
                     .out_in = out_in,
                     .source = TEST_SELF,
                     .causal = true,
                     .query_type = type,
                     .key_type = type,
                     .value_type = type,
                     .output_type = type,
                     .biases = TEST_ALL};
}

/* The output of a share agrees with the judge, who has what the stored numbers widen to. */
static void check_share(mha_mpi_team *team, const mha_mpi_weights *share) {
  mha_context *context = NULL;
  mha_error error;
  test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
  test_poison_results(&fixture);
  test_expect(mha_mpi_forward(team, context, share, &fixture.args, NULL, &error), MHA_OK, &error);
  test_judge_now(&fixture);
  mha_context_destroy(context);
}

/* A share's matrices are of the type, and what they take of the allocator is at most a share. */
static void check_kept(const mha_mpi_weights *share, int32_t type, size_t bytes, size_t most) {
  mha_matrices m;
  MHA_INIT(&m);
  test_expect(mha_weights_matrices(mha_mpi_weights_layer(share), &m, NULL), MHA_OK, NULL);
  assert_int_equal(m.query_element, type);
  assert_int_equal(m.output_element, type);
  if (bytes > most)
    test_failed("the share takes %zu bytes; at most %zu are allowed", bytes, most);
}

static void load(mha_mpi_team *team, int32_t type, bool keep) {
  mha_mpi_weights *share = NULL;
  mha_config config = fixture.config;
  mha_error error;
  const size_t whole = sizeof(float) * (size_t)(64 * 32 * (4 * fixture.c.H)); /* at most */
  config.query_width = config.key_width = config.value_width = config.output_width = 0;
  config.flags |= keep ? MHA_KEEP_TYPE : 0;
  const size_t before = fixture.allocator.live_bytes;
  config.allocator = &fixture.allocator.mha;
  test_expect(mha_mpi_weights_load(team, &config, path, NULL, &share, &error), MHA_OK, &error);
  const bool widened = type != MHA_F32 && !keep;
  check_kept(share, keep ? type : MHA_F32, fixture.allocator.live_bytes - before,
             (widened ? whole / (size_t)n_processes : 0) + 8192);
  check_share(team, share);
  mha_mpi_weights_destroy(share);
}

static void every_type(void **state) {
  static const int32_t types[] = {MHA_F32, MHA_F16, MHA_BF16};
  mha_error error;
  (void)state;
  mha_mpi_team *team = test_mpi_team(n_processes, NULL);
  for (size_t t = 0; t < sizeof types / sizeof *types; t++)
    for (int out_in = 0; out_in < 2; out_in++) {
      const test_case c = make_case(types[t], out_in);
      mha_weights *whole = NULL;
      test_note("type %d, out_in %d", (int)types[t], out_in);
      test_build(&fixture, &c);
      test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &whole, &error), MHA_OK,
                  &error);
      if (rank == 0)
        test_expect(mha_weights_save(whole, path, NULL, &error), MHA_OK, &error);
      mha_weights_destroy(whole);
      MPI_Barrier(MPI_COMM_WORLD);
      load(team, types[t], true);
      load(team, types[t], false);
      MPI_Barrier(MPI_COMM_WORLD);
      test_release(&fixture);
    }
  if (rank == 0)
    assert_int_equal(remove(path), 0);
  mha_mpi_team_destroy(team);
  test_mpi_passed();
}

/* Blocks of 32 numbers are not cut: heads of 32 leave them whole, heads of 16 do not. */
static void blocks_of_a_stored_type(void **state) {
  mha_error error;
  (void)state;
  mha_mpi_team *team = test_mpi_team(n_processes, NULL);
  for (int32_t type = MHA_Q8_0; type <= MHA_Q4_0; type++)
    for (int out_in = 0; out_in < 2; out_in++) {
      const test_case c = make_case(type, out_in);
      test_build(&fixture, &c);
      mha_mpi_weights *share = test_mpi_share(team, &fixture);
      check_share(team, share);
      mha_mpi_weights_destroy(share);
      test_release(&fixture);
    }
  if (n_processes % 2 == 0) { /* a share's 16 columns of Wo end within a block */
    const test_case c = {
        .H = 2 * n_processes, .d = 8, .Eq = 32, .out_in = true, .output_type = MHA_Q8_0};
    mha_mpi_weights *share = NULL;
    test_build(&fixture, &c);
    test_mpi_expect(
        mha_mpi_weights_create(team, &fixture.config, &fixture.matrices, &share, &error),
        MHA_ERROR_SIZE, &error);
    assert_null(share);
    test_release(&fixture);
  }
  mha_mpi_team_destroy(team);
  test_mpi_passed();
}

static int enter_folder(void **state) {
  MPI_Comm_size(MPI_COMM_WORLD, &n_processes);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  (void)snprintf(path, sizeof path, "test_mpi_load_%d.safetensors", n_processes);
  return test_mpi_still_good(state);
}

#define LOAD(function) cmocka_unit_test_setup(function, enter_folder)

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {LOAD(every_type), LOAD(blocks_of_a_stored_type)};
  return test_mpi_run(argc, argv, tests, sizeof tests / sizeof *tests);
}
