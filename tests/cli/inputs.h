/* What the command is given in its tests: arrays, masks, safetensors files, and a layer of odd
 * sizes that lies in the folder from the beginning. */
#ifndef MHA_TESTS_INPUTS_H
#define MHA_TESTS_INPUTS_H

#include "support.h"

/* ---- Files of any content -------------------------------------------------------------------- */

/* Fills the numbers at random and writes them. */
void inputs_put(test_random *random, const char *path, float *numbers, int rank,
                const int64_t *shape);

#define PUT(random, path, numbers, rank, ...)                                                      \
  inputs_put(random, path, numbers, rank, (const int64_t[]){__VA_ARGS__})

/* An array of uint8, with the shape as .npy files spell it; the writer knows floats alone. */
void inputs_put_mask(const char *path, const uint8_t *bytes, size_t n, const char *shape);

/* One tensor of a file that a test makes, with zeros for numbers unless some are given. */
typedef struct inputs_tensor {
  const char *name, *type, *shape; /* as JSON has them, without the outer quotes or brackets */
  int bytes;
  const float *numbers;
} inputs_tensor;

/* Writes the format by hand. */
void inputs_put_safetensors(const char *path, const inputs_tensor *tensors, int n);

#define N_TENSORS(tensors) ((int)(sizeof(tensors) / sizeof(tensors)[0]))

/* ---- A layer of odd sizes -------------------------------------------------------------------- */

enum { B = 2, LQ = 5, LK = 6, H = 4, G = 2, D = 5, DV = 2, EQ = 8, EK = 6, EV = 5, EO = 7 };

/* The numbers of the files q.npy, k.npy, v.npy, bias.npy, slopes.npy, sinks.npy and mask.npy. */
extern float odd_query[B * LQ * EQ];
extern float odd_key[B * LK * EK];
extern float odd_value[B * LK * EV];
extern float odd_bias[H * LQ * LK];
extern float odd_slopes[H];
extern float odd_sinks[H];
extern uint8_t odd_attend[B * LK]; /* [B][1][1][Lk] */

/* Writes them, and the layer's own tensors as w/a.*.npy. */
void inputs_put_odd_layer(void);

#define ODD_INPUTS                                                                                 \
  "run", "--heads", "4", "--kv-heads", "2", "--input", "q.npy", "--key", "k.npy", "--value",       \
      "v.npy", "--output", "y.npy"
#define ODD_RUN ODD_INPUTS, "--weights", "w", "--prefix", "a."

#endif
