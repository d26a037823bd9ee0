/* Owns `mha inspect`: which tensors a path holds, which layers they make, and how large those are.
 */
#include "commands.h"
#include "model.h"
#include "terminal.h"

#include "base/arithmetic.h"
#include "files/text.h"

#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

/* The header's letters for the parts. */
static const char *const letters[MHA_N_PARTS] = {
    [MHA_PART_WQ] = "Wq",
    [MHA_PART_WK] = "Wk",
    [MHA_PART_WV] = "Wv",
    [MHA_PART_WQKV] = "Wq Wk Wv",
    [MHA_PART_WO] = "Wo",
    [MHA_PART_BQ] = "bq",
    [MHA_PART_BK] = "bk",
    [MHA_PART_BV] = "bv",
    [MHA_PART_BQKV] = "bq bk bv",
    [MHA_PART_BO] = "bo",
    [MHA_PART_QUERY_NORM] = "norm of Q",
    [MHA_PART_KEY_NORM] = "norm of K",
    [MHA_PART_SINKS] = "sinks",
};

typedef struct inspection {
  mha_file *file;
  int64_t n_tensors, n_layers;
  const char *prefix; /* NULL = any */
  mha_model_info model;
} inspection;

/* What the parts of a layer come to. */
typedef struct extent {
  uint64_t bytes;
  bool has_bytes;     /* those of every part are known */
  int64_t key, value; /* numbers of a token, G·d and G·dv, or 0 */
} extent;

static void print_text(const char *text) {
  (void)mha_terminal_print(text, strlen(text), stdout);
}

/* Type and shape in columns, as far as they fit. */
static void print_kind(const mha_tensor_info *tensor) {
  enum { TYPE_COLUMNS = 5, SHAPE_COLUMNS = 16 };
  char shape[256];
  const int used = mha_terminal_print(tensor->type, strlen(tensor->type), stdout);
  printf("%*s %-*s", used < TYPE_COLUMNS ? TYPE_COLUMNS - used : 0, "", SHAPE_COLUMNS,
         mha_shape_text(tensor->rank, tensor->shape, shape, sizeof shape));
}

static mha_status print_tensors(const inspection *s, mha_error *error) {
  mha_status status = MHA_OK;
  puts("\ntensors");
  for (int64_t i = 0; !status && i < s->n_tensors; i++) {
    mha_tensor_info tensor;
    MHA_INIT(&tensor);
    status = mha_file_tensor(s->file, i, &tensor, error);
    if (status || (s->prefix && strncmp(tensor.name, s->prefix, strlen(s->prefix)) != 0))
      continue;
    printf("  ");
    print_kind(&tensor);
    printf(" %10zu bytes  ", tensor.bytes);
    print_text(tensor.name);
    puts("");
  }
  return status;
}

/* The width that a matrix makes, or 0. */
static int64_t output_width(const mha_tensor_info *matrix, int32_t orientation) {
  return matrix->rank == 2 ? matrix->shape[orientation == MHA_IN_OUT ? 1 : 0] : 0;
}

static void add_part(const mha_layer_info *layer, int part, const mha_tensor_info *tensor,
                     extent *e) {
  e->bytes += tensor->bytes;
  e->has_bytes = e->has_bytes && tensor->rank >= 0;
  if (part == MHA_PART_WK)
    e->key = output_width(tensor, layer->orientation);
  if (part == MHA_PART_WV)
    e->value = output_width(tensor, layer->orientation);
}

static mha_status print_parts(const inspection *s, const mha_layer_info *layer, extent *e,
                              mha_error *error) {
  mha_status status = MHA_OK;
  for (int part = 0; !status && part < MHA_N_PARTS; part++) {
    mha_tensor_info tensor;
    MHA_INIT(&tensor);
    if (layer->parts[part] < 0)
      continue;
    status = mha_file_tensor(s->file, layer->parts[part], &tensor, error);
    if (status)
      continue;
    printf("  %-10s ", letters[part]);
    print_kind(&tensor);
    printf(" ");
    print_text(tensor.name);
    puts(tensor.is_loaded ? "" : "  (a type that is not loaded)");
    add_part(layer, part, &tensor, e);
  }
  return status;
}

/* Of three matrices in one, the shape tells no width of keys, but the model may. */
static void print_extent(const mha_model_info *model, extent *e) {
  if (e->has_bytes)
    printf("  %" PRIu64 " bytes in all\n", e->bytes);
  if (e->key == 0 && !mha_multiply(model->n_kv_heads, model->head_size, &e->key))
    e->key = 0;
  if (e->value == 0 && !mha_multiply(model->n_kv_heads, model->value_head_size, &e->value))
    e->value = 0;
  mha_model_print_cache(e->key, e->value, model->n_kv_heads, stdout);
}

static mha_status print_layer(const inspection *s, const mha_layer_info *layer, mha_error *error) {
  printf("\nlayer \"");
  print_text(layer->prefix);
  printf("\": %s, %s\n", layer->family,
         layer->orientation == MHA_IN_OUT ? "[in][out]" : "[out][in]");
  extent e = {.has_bytes = true};
  const mha_status status = print_parts(s, layer, &e, error);
  if (!status)
    print_extent(&s->model, &e);
  if (!layer->is_complete) {
    printf("  missing: ");
    print_text(layer->missing);
    puts("");
  }
  if (layer->unsupported) {
    printf("  not supported: ");
    print_text(layer->unsupported);
    puts("");
  }
  return status;
}

static mha_status print_layers(const inspection *s, mha_error *error) {
  mha_status status = MHA_OK;
  int64_t shown = 0;
  for (int64_t i = 0; !status && i < s->n_layers; i++) {
    mha_layer_info layer;
    MHA_INIT(&layer);
    status = mha_file_layer(s->file, i, &layer, error);
    if (status || (s->prefix && strcmp(layer.prefix, s->prefix) != 0))
      continue;
    shown++;
    status = print_layer(s, &layer, error);
  }
  if (shown == 0)
    puts("\nno layer");
  return status;
}

/* No safetensors file begins as a GGUF file does: its header would be too long. */
static const char *kind_of(const char *path) {
  struct stat info;
  char magic[4] = {0};
  if (stat(path, &info) == 0 && S_ISDIR(info.st_mode))
    return "folder";
  FILE *file = fopen(path, "rb");
  const size_t n = file ? fread(magic, 1, sizeof magic, file) : 0;
  if (file)
    (void)fclose(file);
  return n == sizeof magic && memcmp(magic, "GGUF", n) == 0 ? "GGUF file" : "safetensors file";
}

int mha_inspect(const mha_options *options, mha_error *error) {
  inspection s = {.prefix = options->values[MHA_OPTION_PREFIX].text};
  const char *path = options->values[MHA_OPTION_PATH].text;
  mha_status status = mha_file_open(path, NULL, &s.file, error);
  if (!status)
    status = mha_file_count(s.file, &s.n_tensors, &s.n_layers, error);
  MHA_INIT(&s.model);
  if (!status)
    status = mha_file_model(s.file, &s.model, error);
  if (!status) {
    print_text(path);
    printf(": %s, %" PRId64 " tensor%s\n", kind_of(path), s.n_tensors, s.n_tensors == 1 ? "" : "s");
    mha_model_print(&s.model, stdout);
    status = print_tensors(&s, error);
  }
  if (!status)
    status = print_layers(&s, error);
  mha_file_destroy(s.file);
  return status ? MHA_EXIT_DATA : MHA_EXIT_OK;
}
