/* Owns the search for a name in a sorted list of tensors. */
#include "lookup.h"

#include <string.h>

/* Compares as strcmp does `name` with the prefix and `rest` behind each other. */
static int compare_name(const char *name, const char *prefix, int prefix_bytes, const char *rest) {
  const int order = strncmp(name, prefix, (size_t)prefix_bytes);
  return order ? order : strcmp(name + prefix_bytes, rest);
}

/* The first tensor whose name is not below prefix + rest; n if there is none. */
int64_t mha_lookup_lower_bound(const mha_raw_tensors *tensors, const char *prefix, int prefix_bytes,
                               const char *rest) {
  int64_t low = 0;
  int64_t high = tensors->n;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (compare_name(tensors->items[middle].name, prefix, prefix_bytes, rest) < 0)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

const mha_raw_tensor *mha_lookup_find(const mha_raw_tensors *tensors, const char *prefix,
                                      int prefix_bytes, const char *rest) {
  const int64_t at = mha_lookup_lower_bound(tensors, prefix, prefix_bytes, rest);
  return at < tensors->n && compare_name(tensors->items[at].name, prefix, prefix_bytes, rest) == 0
             ? &tensors->items[at]
             : NULL;
}
