/* mha-conformance-arrays FOLDER: writes the arrays of a case small enough to solve by hand, for the
 * test of the runner. B = H = 1, Lq = Lk = d = dv = 2: Q = 0 makes every weight 1/2, so that each
 * row of Y is the mean of V's rows (1, 2) and (3, 4). */
#include "files/npy.h"

#include <math.h>
#include <stdio.h>

static int write_array(const char *folder, const char *name, const float numbers[4]) {
  static const int64_t shape[] = {1, 1, 2, 2};
  char path[MHA_PATH_BYTES];
  mha_error error;
  snprintf(path, sizeof path, "%s/%s.npy", folder, name);
  if (mha_npy_write(path, 4, shape, numbers, &error) == MHA_OK)
    return 0;
  fprintf(stderr, "%s\n", error.message);
  return 1;
}

int main(int argc, char **argv) {
  const float q[] = {0, 0, 0, 0};
  const float k[] = {5, 6, 7, 8};
  const float v[] = {1, 2, 3, 4};
  const float right[] = {2, 3, 2, 3};
  const float near[] = {2, 3, 2, 3 + 5e-6F};
  const float far[] = {2, 3, 2, 3 + 2e-5F};
  const float infinite[] = {2, INFINITY, 2, 3};
  const float not_a_number[] = {2, 3, NAN, 3};
  if (argc != 2)
    return 2;
  return write_array(argv[1], "Q", q) | write_array(argv[1], "K", k) |
         write_array(argv[1], "V", v) | write_array(argv[1], "right", right) |
         write_array(argv[1], "near", near) | write_array(argv[1], "far", far) |
         write_array(argv[1], "infinite", infinite) |
         write_array(argv[1], "not_a_number", not_a_number);
}
