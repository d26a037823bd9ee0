/* A user of the installed library in C: one tiny layer whose result follows by hand.
 *
 * H = 2, d = 1, E = 2; x = [[0, 1], [1, 0]], every matrix [in][out].
 * Head 0: q = ln 3·x0, k = x0, v = 8·x0. Query 0 has q = 0, so both keys weigh 1/2: 4. Query 1 has
 *         scores 0 and ln 3, so they weigh 1/4 and 3/4: 6.
 * Head 1: q = 0, v = 2·x1, so both queries get the mean of 2 and 0: 1.
 * concat = [[4, 1], [6, 1]], Wo = [[1, 2], [10, 20]]: output = [[14, 28], [16, 32]]. */
#include <mha.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

static int compute(float *output, mha_error *error) {
  const float query[] = {1.0986122887F, 0, 0, 0};
  const float key[] = {1, 0, 0, 1};
  const float value[] = {8, 0, 0, 2};
  const float out[] = {1, 2, 10, 20};
  const float x[] = {0, 1, 1, 0};

  mha_config config;
  mha_config_init(&config, 2, 2);
  mha_matrices matrices;
  MHA_INIT(&matrices);
  matrices.orientation = MHA_IN_OUT;
  matrices.query = query;
  matrices.key = key;
  matrices.value = value;
  matrices.output = out;

  mha_weights *weights = NULL;
  mha_context *context = NULL;
  const int failed = mha_weights_create(&config, &matrices, &weights, error) ||
                     mha_context_create(NULL, &context, error) ||
                     mha_self_attention(context, weights, x, 1, 2, output, error);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  return failed;
}

/* The readers of files are there with all that they need. */
static int refuses_no_file(mha_error *error) {
  mha_config config;
  mha_weights *weights = NULL;
  mha_config_init(&config, 2, 2);
  return mha_weights_load(&config, "no such file", NULL, &weights, error) == MHA_ERROR_IO;
}

int main(void) {
  const float expected[] = {14, 28, 16, 32};
  float output[4] = {0};
  mha_error error;
  if (strcmp(mha_version(), MHA_VERSION_STRING) != 0) {
    fprintf(stderr, "header %s, library %s\n", MHA_VERSION_STRING, mha_version());
    return 1;
  }
  if (compute(output, &error)) {
    fprintf(stderr, "%s: %s\n", mha_status_name(error.status), error.message);
    return 1;
  }
  if (!refuses_no_file(&error)) {
    fprintf(stderr, "%s: %s\n", mha_status_name(error.status), error.message);
    return 1;
  }
  for (int i = 0; i < 4; ++i) {
    printf("%g\n", (double)output[i]);
    if (!(fabsf(output[i] - expected[i]) < 1e-4F))
      return 1;
  }
  return 0;
}
