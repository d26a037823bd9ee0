/* Owns the files that the command is given, byte by byte, and the numbers of the odd layer. */
#define _XOPEN_SOURCE 700

#include "inputs.h"

#include "files/npy.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* ---- Files of any content -------------------------------------------------------------------- */

void inputs_put(test_random *random, const char *path, float *numbers, int rank,
                const int64_t *shape) {
  mha_error error;
  int64_t n = 1;
  for (int axis = 0; axis < rank; axis++)
    n *= shape[axis];
  test_fill_normal(random, numbers, n, 0.5);
  test_expect(mha_npy_write(path, rank, shape, numbers, &error), MHA_OK, &error);
}

void inputs_put_mask(const char *path, const uint8_t *bytes, size_t n, const char *shape) {
  char header[118];
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  const int used = snprintf(header, sizeof header,
                            "{'descr': '|u1', 'fortran_order': False, 'shape': %s, }", shape);
  memset(header + used, ' ', sizeof header - (size_t)used);
  assert_int_equal(fwrite("\x93NUMPY\x01\0\x76\0", 1, 10, file), 10);
  assert_int_equal(fwrite(header, 1, sizeof header, file), sizeof header);
  assert_int_equal(fwrite(bytes, 1, n, file), n);
  assert_int_equal(fclose(file), 0);
}

void inputs_put_safetensors(const char *path, const inputs_tensor *tensors, int n) {
  static const char zeros[4096];
  char header[8192] = "{";
  unsigned char length[8] = {0};
  int at = 0;
  size_t used = 1;
  for (int i = 0; i < n; i++) {
    used += (size_t)snprintf(header + used, sizeof header - used,
                             "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%d,%d]}",
                             i > 0 ? "," : "", tensors[i].name, tensors[i].type, tensors[i].shape,
                             at, at + tensors[i].bytes);
    at += tensors[i].bytes;
  }
  used += (size_t)snprintf(header + used, sizeof header - used, "}");
  while (used % 8 != 0)
    header[used++] = ' ';
  length[0] = (unsigned char)(used & 0xFF);
  length[1] = (unsigned char)(used >> 8);
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(length, 1, 8, file), 8);
  assert_int_equal(fwrite(header, 1, used, file), used);
  for (int i = 0; i < n; i++) {
    const void *numbers = tensors[i].numbers ? (const void *)tensors[i].numbers : zeros;
    assert_int_equal(fwrite(numbers, 1, (size_t)tensors[i].bytes, file), tensors[i].bytes);
  }
  assert_int_equal(fclose(file), 0);
}

/* ---- A layer of odd sizes -------------------------------------------------------------------- */

float odd_query[B * LQ * EQ];
float odd_key[B * LK * EK];
float odd_value[B * LK * EV];
float odd_bias[H * LQ * LK];
float odd_slopes[H];
float odd_sinks[H];
uint8_t odd_attend[B * LK];

void inputs_put_odd_layer(void) {
  static float numbers[256];
  test_random random;
  test_random_seed(&random, 2);
  assert_int_equal(mkdir("w", 0700), 0);
  PUT(&random, "w/a.W_Q.npy", numbers, 2, EQ, H * D);
  PUT(&random, "w/a.W_K.npy", numbers, 2, EK, G * D);
  PUT(&random, "w/a.W_V.npy", numbers, 2, EV, G * DV);
  PUT(&random, "w/a.W_O.npy", numbers, 2, H * DV, EO);
  PUT(&random, "w/a.b_K.npy", numbers, 1, G * D);
  PUT(&random, "w/a.b_O.npy", numbers, 1, EO);
  PUT(&random, "q.npy", odd_query, 3, B, LQ, EQ);
  PUT(&random, "k.npy", odd_key, 3, B, LK, EK);
  PUT(&random, "v.npy", odd_value, 3, B, LK, EV);
  PUT(&random, "bias.npy", odd_bias, 3, H, LQ, LK);
  PUT(&random, "slopes.npy", odd_slopes, 1, H);
  PUT(&random, "sinks.npy", odd_sinks, 1, H);
  for (int i = 0; i < B * LK; i++)
    odd_attend[i] = (uint8_t)(i % 3 == 1 ? 0 : 1 + i);
  inputs_put_mask("mask.npy", odd_attend, sizeof odd_attend, "(2, 1, 1, 6)");
}
