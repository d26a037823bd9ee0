/* What the translators share: sizes, views of heads, past keys, masks, and the call of the core. */
#ifndef MHA_TESTS_CONFORMANCE_CORE_H
#define MHA_TESTS_CONFORMANCE_CORE_H

#include "case.h"

/* Keys are `past` ones, then `fresh` ones; Lk = past + fresh. */
typedef struct conf_sizes {
  int64_t B, Lq, Lk, H, G, d, dv;
  int64_t past, fresh;
} conf_sizes;

/* Reads "dims", where the numbers of heads have these names. */
bool conf_read_sizes(conf_case *c, const char *query_heads, const char *kv_heads,
                     conf_sizes *sizes);

/* How an array of heads lies. */
typedef enum conf_layout {
  CONF_TOKENS_FIRST, /* [B][L][heads·size] */
  CONF_HEADS_FIRST   /* [B][heads][L][size] */
} conf_layout;

/* A view of numbers that lie so. */
mha_tensor conf_tensor(const float *data, conf_layout layout, int64_t batch, int64_t length,
                       int64_t heads, int64_t size);
/* A view of an array; fails unless it has that shape. */
bool conf_view(conf_case *c, const conf_array *array, conf_layout layout, int64_t batch,
               int64_t length, int64_t heads, int64_t size, mha_tensor *view);

/* Copies past, [B][G][past][size] or NULL, and fresh behind one another: [B][G][past + n][size]. */
bool conf_concatenate(conf_case *c, const conf_array *past, int64_t past_length,
                      const mha_tensor *fresh, mha_tensor *all);

/* Gives `rules` a mask that broadcasts to [B][H][Lq][Lk] from the right: bytes are a boolean mask
 * (nonzero = attend), floats are added. One with fewer columns than there are keys hides the rest.
 */
bool conf_apply_mask(conf_case *c, const conf_array *mask, const conf_sizes *sizes,
                     mha_rules *rules);

/* Fails unless `array` holds integers of this shape (rank 1 or 2, columns 0 = rank 1). */
bool conf_check_integers(conf_case *c, const conf_array *array, int64_t rows, int64_t columns);

/* mha_attend, with results or NULL, its output in `layout` compared with the case's output of that
 * name. */
bool conf_attend(conf_case *c, mha_context *context, const mha_tensor *q, const mha_tensor *k,
                 const mha_tensor *v, const mha_rules *rules, const mha_results *results,
                 conf_layout layout, const char *output_name);

#endif
