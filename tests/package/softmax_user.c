/* A user of libmha who looks at what options that loosen arithmetic would spoil: a softmax of two
 * scores, a NaN, and the program's own subnormals. One head of size 1: q = 3·x, k = v = x. */
#include <mha.h>

#include <math.h>
#include <stdio.h>

static int attend(float x0, float *output) {
  const float one = 1;
  const float three = 3;
  const float x[] = {x0, 0};
  mha_config config;
  mha_config_init(&config, 1, 1);
  mha_matrices matrices;
  MHA_INIT(&matrices);
  matrices.orientation = MHA_IN_OUT;
  matrices.query = &three;
  matrices.key = matrices.value = matrices.output = &one;

  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  const int failed = mha_weights_create(&config, &matrices, &weights, &error) ||
                     mha_context_create(NULL, &context, &error) ||
                     mha_self_attention(context, weights, x, 1, 2, output, &error);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  if (failed)
    printf("%s\n", error.message);
  return !failed;
}

int main(void) {
  volatile float tiny = 1e-40f;
  volatile float half = tiny * 0.5f;
  float y[2] = {0};
  if (half == 0.0f)
    printf("the program flushes subnormals to 0\n");
  if (!attend(1, y))
    return 1;
  const double expected = 1 / (1 + exp(-3)); /* scores 3 and 0 */
  const int is_close = fabs((double)y[0] - expected) < 1e-6;
  if (!is_close)
    printf("softmax: %.6f instead of %.6f\n", (double)y[0], expected);
  if (!attend(NAN, y))
    return 1;
  if (!isnan(y[0]))
    printf("a NaN in the query became %g\n", (double)y[0]);
  return half == 0.0f || !is_close || !isnan(y[0]);
}
