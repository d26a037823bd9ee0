/* mha-conformance-arrays FOLDER: writes the arrays of a case small enough to solve by hand, for the
 * tests of the runners. B = H = 1, Lq = Lk = d = dv = 2: Q = 0 makes every weight 1/2, so that each
 * row of Y is the mean of V's rows (1, 2) and (3, 4).
 *
 * The gradients of that, with dy the unit matrix and a scale of 1: dV has the rows (1/2, 1/2);
 * dP = dy·Vᵀ has the rows (1, 3) and (2, 4), so dS = P∘(dP − D) has twice (−1/2, 1/2), dQ twice
 * (K_1 − K_0)/2 = (1, 1), and dK = dSᵀ·Q is 0. */
#include "files/npy.h"

#include <math.h>
#include <stdio.h>

static int write_array(const char *folder, const char *name, int rank, const float numbers[4]) {
  static const int64_t shape[] = {1, 1, 2, 2}; /* its last ones */
  char path[MHA_PATH_BYTES];
  mha_error error;
  snprintf(path, sizeof path, "%s/%s.npy", folder, name);
  if (mha_npy_write(path, rank, shape + 4 - rank, numbers, &error) == MHA_OK)
    return 0;
  fprintf(stderr, "%s\n", error.message);
  return 1;
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    int rank;
    float numbers[4];
  } arrays[] = {{"Q", 4, {0, 0, 0, 0}},
                {"K", 4, {5, 6, 7, 8}},
                {"V", 4, {1, 2, 3, 4}},
                {"right", 4, {2, 3, 2, 3}},
                {"near", 4, {2, 3, 2, 3 + 5e-6F}},
                {"far", 4, {2, 3, 2, 3 + 2e-5F}},
                {"infinite", 4, {2, INFINITY, 2, 3}},
                {"not_a_number", 4, {2, 3, NAN, 3}},
                {"query", 3, {0, 0, 0, 0}},
                {"key", 3, {5, 6, 7, 8}},
                {"value", 3, {1, 2, 3, 4}},
                {"dy", 3, {1, 0, 0, 1}},
                {"y", 3, {2, 3, 2, 3}},
                {"d_query", 3, {1, 1, 1, 1}},
                {"d_key", 3, {0, 0, 0, 0}},
                {"d_value", 3, {0.5F, 0.5F, 0.5F, 0.5F}},
                {"d_value_far", 3, {0.5F, 0.5F, 0.5F, 0.5F + 2e-5F}},
                {"d_value_nan", 3, {0.5F, NAN, 0.5F, 0.5F}}};
  int failed = argc != 2;
  for (size_t i = 0; !failed && i < sizeof arrays / sizeof *arrays; i++)
    failed = write_array(argv[1], arrays[i].name, arrays[i].rank, arrays[i].numbers);
  return failed;
}
