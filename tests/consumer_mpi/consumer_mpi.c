/* A user of the installed libmha_mpi: the layer of consumer.c, whose two heads two processes share,
 * and then its two rows. By hand its output is [[14, 28], [16, 32]]. */
#include <mha_mpi.h>

#include <math.h>
#include <stdio.h>

static int compute(int32_t by_heads, float *output, mha_error *error) {
  const float query[] = {1.0986122887F, 0, 0, 0};
  const float key[] = {1, 0, 0, 1};
  const float value[] = {8, 0, 0, 2};
  const float out[] = {1, 2, 10, 20};
  const float x[] = {0, 1, 1, 0};
  mha_mpi_team *team = NULL;
  mha_mpi_weights *weights = NULL;
  mha_context *context = NULL;
  mha_mpi_options options;
  mha_mpi_range rows[2];
  mha_config config;
  mha_matrices matrices;
  mha_forward_args args;
  MHA_INIT(&options);
  options.by_heads = by_heads;
  mha_config_init(&config, 2, 2);
  MHA_INIT(&matrices);
  matrices.orientation = MHA_IN_OUT;
  matrices.query = query;
  matrices.key = key;
  matrices.value = value;
  matrices.output = out;
  MHA_INIT(&args);
  args.batch = 1;
  args.output = output;
  args.query = x;
  args.query_length = 2;
  int failed = mha_mpi_team_create(MPI_COMM_WORLD, &options, &team, error) ||
               mha_mpi_rows(team, 2, MHA_MPI_BLOCKS, rows, error);
  if (!failed && by_heads == 1) { /* this process's row alone */
    args.query_length = rows[0].length;
    args.query += 2 * rows[0].begin;
    args.output += 2 * rows[0].begin;
  }
  failed = failed || mha_mpi_weights_create(team, &config, &matrices, &weights, error) ||
           mha_context_create(NULL, &context, error) ||
           mha_mpi_forward(team, context, weights, &args, NULL, error);
  mha_context_destroy(context);
  mha_mpi_weights_destroy(weights);
  mha_mpi_team_destroy(team);
  return failed;
}

int main(int argc, char **argv) {
  const float expected[] = {14, 28, 16, 32};
  mha_error error;
  int rank = 0;
  int wrong = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int32_t by_heads = 2; by_heads >= 1 && !wrong; by_heads--) {
    float output[4] = {0};
    if (compute(by_heads, output, &error)) {
      fprintf(stderr, "%s: %s\n", mha_status_name(error.status), error.message);
      wrong = 1;
    }
    for (int i = 0; i < 4 && !wrong; i++)
      if (by_heads == 2 || i / 2 == rank)
        wrong = !(fabsf(output[i] - expected[i]) < 1e-4F);
    if (rank == 0 && by_heads == 2)
      for (int i = 0; i < 4; i++)
        printf("%g\n", (double)output[i]);
  }
  MPI_Finalize();
  return wrong;
}
