/* Owns the names of types. */
#include "types.h"

#include "mha.h"

#include <ctype.h>
#include <string.h>

enum { NAME_BYTES = sizeof(((bench_type *)NULL)->name) };

/* How far a layer whose numbers are rounded so may lie from one of float32: a check that the right
 * numbers are multiplied, no judgement of the type. Scores of deviation 3 enlarge what their
 * factors lose. */
static const double tolerances[] = {
    [MHA_F32] = 1e-4, [MHA_F16] = 0.01, [MHA_BF16] = 0.08, [MHA_Q8_0] = 0.08, [MHA_Q4_0] = 0.8};

static bool find(const char *text, size_t length, int32_t *element) {
  for (int32_t e = MHA_F32; e <= MHA_Q4_0; e++) {
    const char *name = mha_element_name(e);
    size_t k = 0;
    while (k < length && name[k] && tolower((unsigned char)name[k]) == text[k])
      k++;
    *element = e;
    if (k == length && !name[k])
      return true;
  }
  return false;
}

bool bench_types_add(bench_type_list *list, const char *text) {
  bench_type type = {.name = ""};
  const size_t length = strcspn(text, "/");
  if (strlen(text) >= NAME_BYTES || list->n == BENCH_MAX_TYPES ||
      !find(text, length, &type.matrices))
    return false;
  type.cache = type.matrices == MHA_Q4_0 ? MHA_Q8_0 : type.matrices;
  if (text[length] &&
      (!find(text + length + 1, strlen(text + length + 1), &type.cache) || type.cache == MHA_Q4_0))
    return false;
  const double of_matrices = tolerances[type.matrices];
  const double of_cache = tolerances[type.cache];
  type.tolerance = of_matrices > of_cache ? of_matrices : of_cache;
  memcpy(type.name, text, strlen(text) + 1);
  for (int i = 0; i < list->n; i++)
    if (list->types[i].matrices == type.matrices && list->types[i].cache == type.cache)
      return false;
  list->types[list->n++] = type;
  return true;
}

bool bench_type_is_float(const bench_type *type) {
  return type->matrices == MHA_F32 && type->cache == MHA_F32;
}
