/* Owns `mha inspect`: which tensors a path holds and which layers they make. */
#include "commands.h"
#include "terminal.h"

#include "../files/names.h"
#include "../files/tensors.h"
#include "../files/text.h"

#include <inttypes.h>
#include <string.h>

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
  mha_file_tensors tensors;
  const char *prefix; /* NULL = any */
  int64_t n_layers;   /* shown so far */
} inspection;

static void print_text(const char *text) {
  (void)mha_terminal_print(text, strlen(text), stdout);
}

/* Type and shape in columns, as far as they fit. */
static void print_kind(const mha_file_tensor *tensor) {
  enum { TYPE_COLUMNS = 5, SHAPE_COLUMNS = 16 };
  char shape[256];
  const int used = mha_terminal_print(tensor->type, strlen(tensor->type), stdout);
  printf("%*s %-*s", used < TYPE_COLUMNS ? TYPE_COLUMNS - used : 0, "", SHAPE_COLUMNS,
         mha_shape_text(tensor->rank, tensor->shape, shape, sizeof shape));
}

static bool is_under_prefix(const inspection *s, const mha_file_tensor *tensor) {
  return !s->prefix || strncmp(tensor->name, s->prefix, strlen(s->prefix)) == 0;
}

static void print_tensors(const inspection *s) {
  puts("\ntensors");
  for (int64_t i = 0; i < s->tensors.n; i++) {
    const mha_file_tensor *tensor = &s->tensors.items[i];
    if (!is_under_prefix(s, tensor))
      continue;
    printf("  ");
    print_kind(tensor);
    printf(" %10zu bytes  ", tensor->bytes);
    print_text(tensor->name);
    puts("");
  }
}

static void print_parts(const mha_layer_names *layer) {
  for (int part = 0; part < MHA_N_PARTS; part++) {
    const mha_file_tensor *tensor = layer->parts[part];
    if (!tensor)
      continue;
    printf("  %-10s ", letters[part]);
    print_kind(tensor);
    printf(" ");
    print_text(tensor->name);
    puts(tensor->element == MHA_FILE_OTHER ? "  (a type that is not loaded)" : "");
  }
}

/* An mha_layer_visitor. */
static void print_layer(void *user, const mha_layer_names *layer) {
  inspection *s = user;
  const size_t bytes = (size_t)layer->prefix_bytes;
  const mha_file_tensor *unsupported = mha_names_unsupported(&s->tensors, layer);
  char missing[1024];
  if (s->prefix && (strlen(s->prefix) != bytes || memcmp(s->prefix, layer->prefix, bytes) != 0))
    return;
  s->n_layers++;
  printf("\nlayer \"");
  (void)mha_terminal_print(layer->prefix, bytes, stdout);
  printf("\": %s, %s\n", layer->family_name,
         layer->orientation == MHA_IN_OUT ? "[in][out]" : "[out][in]");
  print_parts(layer);
  if (!layer->complete) {
    printf("  missing: ");
    print_text(mha_names_missing(layer, missing, sizeof missing));
    puts("");
  }
  if (unsupported) {
    printf("  not supported: ");
    print_text(unsupported->name);
    puts("");
  }
}

int mha_inspect(const mha_options *options, mha_error *error) {
  inspection s = {.prefix = options->values[MHA_OPTION_PREFIX].text};
  const char *path = options->values[MHA_OPTION_PATH].text;
  const mha_status status = mha_tensors_open(path, false, NULL, &s.tensors, error);
  if (status)
    return MHA_EXIT_DATA;
  print_text(path);
  printf(": %s, %" PRId64 " tensor%s\n", s.tensors.is_folder ? "folder" : "safetensors file",
         s.tensors.n, s.tensors.n == 1 ? "" : "s");
  print_tensors(&s);
  (void)mha_names_visit(&s.tensors, print_layer, &s);
  if (s.n_layers == 0)
    puts("\nno layer");
  mha_tensors_close(&s.tensors);
  return MHA_EXIT_OK;
}
