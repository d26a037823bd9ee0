/* compare GOT EXPECTED BOUND: whether two float32 .npy files have one shape and numbers that differ
 * by at most the bound. */
#include "files/npy.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
  mha_npy_array got = {0};
  mha_npy_array expected = {0};
  mha_error error;
  if (argc != 4 || mha_npy_read(argv[1], MHA_NPY_FLOATS, NULL, &got, &error) ||
      mha_npy_read(argv[2], MHA_NPY_FLOATS, NULL, &expected, &error)) {
    fprintf(stderr, "%s\n", argc == 4 ? error.message : "compare GOT EXPECTED BOUND");
    return 2;
  }
  const float *x = got.data;
  const float *y = expected.data;
  int64_t n = 1;
  int wrong = got.rank != expected.rank;
  for (int i = 0; i < expected.rank && !wrong; i++) {
    wrong = got.shape[i] != expected.shape[i];
    n *= expected.shape[i];
  }
  double most = 0;
  for (int64_t i = 0; i < n && !wrong; i++)
    most = fmax(most, isnan(x[i]) ? (double)INFINITY : fabs((double)x[i] - (double)y[i]));
  printf("%lld numbers, at most %g apart\n", (long long)n, most);
  wrong = wrong || n == 0 || most > strtod(argv[3], NULL);
  mha_npy_array_release(&got);
  mha_npy_array_release(&expected);
  return wrong;
}
