/* Owns the list of shapes: reading it, selecting from it, and what a shape costs. */
#include "shapes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEPARATORS ", \t\r\n"

/* Sizes beyond this are typing errors; below it no product of three overflows an int64_t. */
#define LARGEST (INT64_C(1) << 20)

/* KIND may be left out, and KV_HEADS before it. */
enum { NAME, BATCH, LENGTH, PAST, WIDTH, HEADS, CAUSAL, KV_HEADS, KIND, N_FIELDS };

static bool refuse(const char *origin, const char *what, const char *text) {
  fprintf(stderr, "mha-bench: %s: %s: '%s'\n", origin, what, text);
  return false;
}

static bool parse_number(const char *text, int64_t smallest, int64_t largest, int64_t *number) {
  char *end = NULL;
  const long long value = strtoll(text, &end, 10);
  if (end == text || *end != '\0' || value < smallest || value > largest)
    return false;
  *number = value;
  return true;
}

static bool parse_name(const char *text, char *name, size_t bytes) {
  const size_t allowed =
      strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.");
  if (text[allowed] != '\0' || allowed >= bytes)
    return false;
  memcpy(name, text, allowed + 1);
  return true;
}

static int split(char *text, char *fields[], int n_fields) {
  int n = 0;
  for (char *field = strtok(text, SEPARATORS); field; field = strtok(NULL, SEPARATORS)) {
    if (n < n_fields)
      fields[n] = field;
    n++;
  }
  return n;
}

/* What the engines can compute: a cache is filled beforehand, then each call brings one token. */
static bool fits(const bench_shape *shape) {
  const bool cached = shape->past > 0;
  return shape->width % shape->heads == 0 && shape->heads % shape->kv_heads == 0 &&
         (cached ? shape->length == 1 : shape->kv_heads == shape->heads) &&
         (!cached || shape->kind == BENCH_PLAIN);
}

static bool parse_kind(const char *text, bench_kind *kind) {
  const bool is_mask = strcmp(text, "mask") == 0;
  *kind = is_mask ? BENCH_MASK : BENCH_GAPS;
  return is_mask || strcmp(text, "gaps") == 0;
}

static bool parse_shape(char *fields[], int n_fields, bench_shape *shape) {
  int64_t causal = 0;
  const bool parsed = parse_name(fields[NAME], shape->name, sizeof shape->name) &&
                      parse_number(fields[BATCH], 1, LARGEST, &shape->batch) &&
                      parse_number(fields[LENGTH], 1, LARGEST, &shape->length) &&
                      parse_number(fields[PAST], 0, LARGEST, &shape->past) &&
                      parse_number(fields[WIDTH], 1, LARGEST, &shape->width) &&
                      parse_number(fields[HEADS], 1, LARGEST, &shape->heads) &&
                      parse_number(fields[CAUSAL], 0, 1, &causal);
  shape->causal = causal != 0;
  shape->kv_heads = shape->heads;
  shape->kind = BENCH_PLAIN;
  return parsed &&
         (n_fields <= KV_HEADS || parse_number(fields[KV_HEADS], 1, LARGEST, &shape->kv_heads)) &&
         (n_fields <= KIND || parse_kind(fields[KIND], &shape->kind)) && fits(shape);
}

bool bench_shapes_add(bench_shape_list *list, const char *text, const char *origin) {
  char copy[256];
  char *fields[N_FIELDS];
  if (strlen(text) >= sizeof copy)
    return refuse(origin, "the line is too long", text);
  memcpy(copy, text, strlen(text) + 1);
  const int n_fields = split(copy, fields, N_FIELDS);
  if (n_fields < KV_HEADS || n_fields > N_FIELDS)
    return refuse(
        origin, "a shape is name,batch,seq,past,d_model,heads,causal[,kv_heads[,mask|gaps]]", text);
  if (list->n == BENCH_MAX_SHAPES)
    return refuse(origin, "there are too many shapes", text);
  if (!parse_shape(fields, n_fields, &list->shapes[list->n]))
    return refuse(
        origin,
        "sizes are whole numbers from 1 to 2^20, past may be 0, causal is 0 or 1, heads "
        "divides d_model, kv_heads divides heads and differs from it only where past is "
        "above 0, where seq is 1 and neither mask nor gaps stands; a name has up to 23 letters",
        text);
  list->n++;
  return true;
}

bool bench_shapes_read(bench_shape_list *list, const char *path) {
  FILE *file = fopen(path, "r");
  if (!file)
    return refuse(path, "the file cannot be opened", path);
  char line[256];
  bool good = true;
  while (good && fgets(line, sizeof line, file)) {
    line[strcspn(line, "\r\n")] = '\0';
    if (line[0] != '#' && line[strspn(line, SEPARATORS)] != '\0')
      good = bench_shapes_add(list, line, path);
  }
  if (ferror(file))
    good = refuse(path, "the file cannot be read", path);
  fclose(file);
  return good;
}

void bench_shapes_add_quick(bench_shape_list *list) {
  static const bench_shape quick[] = {
      {"quick-batch", 2, 17, 0, 32, 4, 4, false, BENCH_PLAIN},
      {"quick-causal", 1, 40, 0, 64, 2, 2, true, BENCH_PLAIN},
      {"quick-mask", 2, 20, 0, 32, 2, 2, false, BENCH_MASK},
      {"quick-gaps", 1, 20, 0, 32, 2, 2, false, BENCH_GAPS},
      {"quick-row", 1, 1, 0, 128, 4, 4, false, BENCH_PLAIN},
      {"quick-decode", 1, 1, 7, 32, 4, 4, true, BENCH_PLAIN},
      {"quick-decode_gqa", 3, 1, 21, 32, 4, 2, true, BENCH_PLAIN},
  };
  for (size_t i = 0; i < sizeof quick / sizeof quick[0]; i++)
    list->shapes[list->n++] = quick[i];
}

void bench_shapes_add_pages(bench_shape_list *list, bool quick) {
  static const bench_shape shapes[] = {
      {"prefill512", 1, 512, 0, 768, 12, 12, true, BENCH_PLAIN},
      {"prefill1k", 1, 1024, 0, 768, 12, 12, true, BENCH_PLAIN},
      {"prefill2k", 1, 2048, 0, 768, 12, 12, true, BENCH_PLAIN},
      {"prefill1k_gqa", 1, 1024, 0, 768, 12, 3, true, BENCH_PLAIN},
      {"chunk64", 1, 64, 1984, 768, 12, 12, true, BENCH_PLAIN},
      {"decode2000", 1, 1, 2000, 768, 12, 12, true, BENCH_PLAIN},
      {"decode2000_gqa", 1, 1, 2000, 768, 12, 3, true, BENCH_PLAIN},
  };
  static const bench_shape quick_shapes[] = {
      {"quick-prefill", 2, 70, 0, 32, 4, 2, true, BENCH_PLAIN},
      {"quick-chunk", 2, 5, 300, 32, 4, 4, true, BENCH_PLAIN},
      {"quick-decode", 3, 1, 37, 32, 4, 2, true, BENCH_PLAIN},
  };
  const size_t n_quick = sizeof quick_shapes / sizeof quick_shapes[0];
  const size_t n = quick ? n_quick : sizeof shapes / sizeof shapes[0];
  for (size_t i = 0; i < n; i++)
    list->shapes[list->n++] = quick ? quick_shapes[i] : shapes[i];
}

static int find(const bench_shape_list *list, const char *name) {
  for (int i = 0; i < list->n; i++)
    if (strcmp(list->shapes[i].name, name) == 0)
      return i;
  return -1;
}

bool bench_shapes_select(bench_shape_list *list, const char *names) {
  char copy[1024];
  bench_shape_list selected = {.n = 0};
  if (strlen(names) >= sizeof copy)
    return refuse("--only", "the list is too long", names);
  memcpy(copy, names, strlen(names) + 1);
  for (char *name = strtok(copy, SEPARATORS); name; name = strtok(NULL, SEPARATORS)) {
    const int index = find(list, name);
    if (index < 0)
      return refuse("--only", "no shape has this name", name);
    if (find(&selected, name) < 0)
      selected.shapes[selected.n++] = list->shapes[index];
  }
  *list = selected;
  return true;
}

int64_t bench_projected_width(const bench_shape *shape, int which) {
  const int64_t kv_width = shape->width / shape->heads * shape->kv_heads;
  return which == 1 || which == 2 ? kv_width : shape->width;
}

double bench_visible_pairs(const bench_shape *shape) {
  const double queries = (double)shape->length;
  const double past = (double)shape->past;
  if (shape->causal)
    return queries * past + queries * (queries + 1) / 2;
  return queries * (past + queries);
}

double bench_flops(const bench_shape *shape) {
  const double batch = (double)shape->batch;
  const double width = (double)shape->width;
  const double kv_width = (double)bench_projected_width(shape, 1);
  const double projections = 4 * batch * (double)shape->length * width * (width + kv_width);
  return projections + 4 * batch * bench_visible_pairs(shape) * width;
}
