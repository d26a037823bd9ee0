/* Owns `mha inspect`: which tensors a path holds and which layers they make. */
#include "commands.h"
#include "terminal.h"

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
} inspection;

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

static mha_status print_parts(const inspection *s, const mha_layer_info *layer, mha_error *error) {
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
  }
  return status;
}

static mha_status print_layer(const inspection *s, const mha_layer_info *layer, mha_error *error) {
  printf("\nlayer \"");
  print_text(layer->prefix);
  printf("\": %s, %s\n", layer->family,
         layer->orientation == MHA_IN_OUT ? "[in][out]" : "[out][in]");
  const mha_status status = print_parts(s, layer, error);
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

int mha_inspect(const mha_options *options, mha_error *error) {
  inspection s = {.prefix = options->values[MHA_OPTION_PREFIX].text};
  const char *path = options->values[MHA_OPTION_PATH].text;
  struct stat info;
  mha_status status = mha_file_open(path, NULL, &s.file, error);
  if (!status)
    status = mha_file_count(s.file, &s.n_tensors, &s.n_layers, error);
  if (!status) {
    print_text(path);
    printf(": %s, %" PRId64 " tensor%s\n",
           stat(path, &info) == 0 && S_ISDIR(info.st_mode) ? "folder" : "safetensors file",
           s.n_tensors, s.n_tensors == 1 ? "" : "s");
    status = print_tensors(&s, error);
  }
  if (!status)
    status = print_layers(&s, error);
  mha_file_destroy(s.file);
  return status ? MHA_EXIT_DATA : MHA_EXIT_OK;
}
