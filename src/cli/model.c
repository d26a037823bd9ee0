/* Owns what `mha inspect` tells of a model beside its tensors: metadata, and what a token costs. */
#include "model.h"

#include "terminal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { LABEL_COLUMNS = 15 };

static void print_label(const char *label, FILE *stream) {
  fprintf(stream, "  %-*s  ", LABEL_COLUMNS, label);
}

static void print_size(const char *label, int64_t size, FILE *stream) {
  if (size <= 0)
    return;
  print_label(label, stream);
  fprintf(stream, "%" PRId64 "\n", size);
}

/* In as few digits as tell the float, which is what files have; nine tell every one. */
static void print_number(const char *label, float number, FILE *stream) {
  enum { FEWEST = 6, MOST = 9 };
  char text[32] = "";
  if (!(number > 0))
    return;
  for (int digits = FEWEST; digits <= MOST && strtof(text, NULL) != number; digits++)
    (void)snprintf(text, sizeof text, "%.*g", digits, (double)number);
  print_label(label, stream);
  fprintf(stream, "%s\n", text);
}

/* Loading turns nothing unless it is told to, whatever the architecture does. The sizes it takes
 * from the file itself, and refuses positions that they do not tell all of: naming them here would
 * hide that. */
static void print_rope(const mha_model_info *m, FILE *stream) {
  print_label("rotary pairs", stream);
  if (m->rope != MHA_ROPE_HALVES && m->rope != MHA_ROPE_INTERLEAVED) {
    fputs("none, or not known of this architecture\n", stream);
    return;
  }
  const char *name = m->rope == MHA_ROPE_HALVES ? "halves" : "interleaved";
  fprintf(stream, "%s, by the architecture's name; nothing turns without --rope %s\n", name, name);
}

void mha_model_print(const mha_model_info *m, FILE *stream) {
  if (!m->architecture)
    return;
  fputs("\nmodel \"", stream);
  (void)mha_terminal_print(m->architecture, strlen(m->architecture), stream);
  fputs("\"\n", stream);
  print_size("layers", m->n_layers, stream);
  print_size("width", m->model_width, stream);
  print_size("heads", m->n_heads, stream);
  print_size("key/value heads", m->n_kv_heads, stream);
  print_size("head size", m->head_size, stream);
  print_size("value head size", m->value_head_size, stream);
  print_size("rotary size", m->rotary_size, stream);
  print_number("rotary base", (float)m->rope_base, stream);
  print_number("norm epsilon", m->norm_epsilon, stream);
  print_rope(m, stream);
}

/* Bytes of a row of heads, 0 = the type cannot hold them. Blocks are cut at each head, so where the
 * heads are not known, or do not divide the row, there are none. */
static uint64_t row_bytes(int32_t element, int64_t width, int64_t n_heads) {
  if (n_heads <= 0 || width % n_heads != 0)
    return element == MHA_Q8_0 ? 0 : mha_element_bytes(element, width);
  return (uint64_t)n_heads * mha_element_bytes(element, width / n_heads);
}

void mha_model_print_cache(int64_t key, int64_t value, int64_t n_kv_heads, FILE *stream) {
  static const struct {
    int32_t element;
    const char *text;
  } rows[] = {{MHA_F32, " bytes as f32"}, {MHA_F16, " as f16 or bf16"}, {MHA_Q8_0, " as q8_0"}};
  const char *before = "  cache: each token takes ";
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    const uint64_t k = row_bytes(rows[i].element, key, n_kv_heads);
    const uint64_t v = row_bytes(rows[i].element, value, n_kv_heads);
    if (k == 0 || v == 0)
      continue;
    fprintf(stream, "%s%" PRIu64 "%s", before, k + v, rows[i].text);
    before = ", ";
  }
  if (*before == ',')
    fputs("\n", stream);
}
