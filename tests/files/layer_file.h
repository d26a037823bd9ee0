/* Layers in files, for the tests that load and save them: their sizes, numbers and names, a folder
 * of .npy files, a safetensors file byte by byte, and what a loaded layer must be. */
#ifndef MHA_TESTS_LAYER_FILE_H
#define MHA_TESTS_LAYER_FILE_H

#include "folder.h"

#include "layer/weights.h"

/* A layer whose eight sizes all differ. */
enum { H = 4, G = 2, D = 3, DV = 5, EQ = 7, EK = 11, EV = 13, EO = 17 };

/* ---- A folder to work in --------------------------------------------------------------------- */

/* Setup of a group: with an empty folder `layer` in it. */
int layer_enter_folder(void **state);
/* Teardown of a group. */
int layer_leave_folder(void **state);
/* Teardowns of a test: the parts without a prefix in `layer`, and the file layer.st. */
int layer_remove_folder(void **state);
int layer_remove_file(void **state);

/* ---- Loading --------------------------------------------------------------------------------- */

/* A config with nothing but the counts of heads. */
mha_config layer_heads(int64_t n_heads, int64_t n_kv_heads);

/* Loads layer.st. */
mha_weights *layer_load(const mha_config *config, const char *prefix);
/* The layer of a file that is opened with these flags, and given back at once. */
mha_status layer_load_with(uint32_t flags, const mha_config *config, const char *path,
                           mha_weights **weights, mha_error *error);
/* Expects an error with a message that holds `fragment`, and no layer. */
void layer_expect_refused(const char *path, const char *prefix, const mha_config *config,
                          mha_status status, const char *fragment);

/* ---- A layer in the folder `layer` ----------------------------------------------------------- */

enum { LAYER_PARTS = 8 };                            /* the four matrices, then the four biases */
enum { LAYER_MATRICES = 0x0F, LAYER_BIASES = 0xF0 }; /* as bits */

extern const char *const layer_part_names[LAYER_PARTS];

void layer_part_path(char path[256], const char *prefix, int part);
/* One part with numbers that tell where they stand, in any shape. */
void layer_put_part(const char *prefix, int part, int rank, const int64_t *shape);
/* The parts whose bit is set in `which`, in their shapes. */
void layer_put_parts(const char *prefix, unsigned which);
void layer_remove_part(const char *prefix, int part);
/* The layer that layer_put_parts wrote. */
void layer_check_parts(const mha_weights *weights, unsigned which);

/* ---- The numbers of a layer ------------------------------------------------------------------ */

/* As MHA_IN_OUT: small multiples of 1/8, which every type holds exactly. */
typedef struct layer_numbers {
  int64_t heads, kv_heads, d, dv;
  int64_t in[4], out[4]; /* of the four matrices */
  float matrices[4][20 * 20], biases[4][20];
} layer_numbers;

void layer_make_numbers(layer_numbers *n, const int64_t inputs[3], int64_t dv);

/* Names of the matrices of q, k, v, output and of the three in one; then of the biases. */
typedef struct layer_naming {
  bool out_in;
  const char *matrices[5], *biases[5];
} layer_naming;

enum { LAYER_PACKED = 4 }; /* the three in one, among the names */

enum {
  LAYER_TORCH, /* the first two have a packed matrix */
  LAYER_GPT2,
  LAYER_TORCH_APART,
  LAYER_HUGGING_FACE,
  LAYER_BERT,
  LAYER_ARTICLE,
  LAYER_NAMINGS,
  LAYER_FIRST_SEPARATE = LAYER_TORCH_APART
};

extern const layer_naming layer_namings[LAYER_NAMINGS];

/* A packed matrix has one input; one whose d and dv are not given has them equal. */
void layer_make_fitting(layer_numbers *n, int naming);

/* Every number is in its place, and the layer computes what one from memory does. */
void layer_check_same(const mha_weights *weights, const layer_numbers *n, bool out_in, bool biases);

/* ---- A safetensors file, byte by byte -------------------------------------------------------- */

typedef struct layer_file {
  char header[8192];
  unsigned char data[65536];
  size_t n_data;
} layer_file;

void layer_file_begin(layer_file *file);
void layer_file_put_bytes(layer_file *file, uint64_t bits, int n_bytes);
/* Zero or a normal number that the type holds exactly. */
void layer_file_put_number(layer_file *file, const char *type, float number);
/* Adds the entry of a tensor whose numbers are those put since `begin`. */
void layer_file_put_entry(layer_file *file, const char *prefix, const char *name, const char *type,
                          int rank, int64_t n1, int64_t n2, size_t begin);
void layer_file_put_vector(layer_file *file, const char *prefix, const char *name, const char *type,
                           const float *vector, int64_t n);
/* The layer under the names, without the tensors whose name is `except`. */
void layer_file_put_numbers(layer_file *file, const char *prefix, const layer_naming *as,
                            const char *type, const layer_numbers *n, bool biases,
                            const char *except);
/* Writes layer.st. Spaces bring the length of the header to `offset` modulo 4. */
void layer_file_end(layer_file *file, size_t offset);
/* Writes layer.st with that layer alone. */
void layer_file_write(const char *prefix, const layer_naming *as, const char *type,
                      const layer_numbers *n, bool biases, size_t offset);

#endif
