/* Owns the sizes of a layer: which follow from which, for arrays and for files, and what they may
 * be. */
#include "config.h"

#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/error.h"
#include "engine/kernels.h"

#include <math.h>

void mha_config_init_sized(mha_config *config, size_t struct_size, int64_t model_width,
                           int64_t n_heads) {
  if (!config || struct_size < MHA_FIRST_CONFIG)
    return;
  mha_struct_init(config, struct_size);
  config->query_width = model_width;
  config->n_heads = n_heads;
}

float mha_default_scale(int64_t d) {
  return (float)(1.0 / sqrt((double)d));
}

static void derive(int64_t *size, int64_t from) {
  if (*size == 0)
    *size = from;
}

bool mha_config_widths(const mha_config *c, mha_widths *w) {
  return mha_multiply(c->n_heads, c->head_size, &w->q) &&
         mha_multiply(c->n_kv_heads, c->head_size, &w->k) &&
         mha_multiply(c->n_kv_heads, c->value_head_size, &w->v) &&
         mha_multiply(c->n_heads, c->value_head_size, &w->concat) &&
         mha_add(w->q, w->k, &w->packed) && mha_add(w->packed, w->v, &w->packed);
}

/* ---- sizes from the extents of matrices ---- */

/* *size = width / share without remainder; width -1 = it has no value. */
static const char *divide(int64_t width, int64_t share, const char *rule, int64_t *size) {
  if (share <= 0 || width <= 0 || width % share != 0)
    return rule;
  *size = width / share;
  return NULL;
}

/* Matrices of their own tell d and dv on their own. */
static const char *derive_separate(mha_config *c, const mha_extents *e, bool *of_value) {
  const char *broken = NULL;
  if (c->head_size == 0)
    broken = divide(e->q, c->n_heads, "d = output width of q / H", &c->head_size);
  if (!broken && c->value_head_size == 0) {
    broken = divide(e->v, c->n_kv_heads, "dv = output width of v / G", &c->value_head_size);
    *of_value = true;
  }
  return broken;
}

/* a·x + b·y, or -1 if it overflows. */
static int64_t sum_of_products(int64_t a, int64_t x, int64_t b, int64_t y) {
  int64_t left = 0;
  int64_t right = 0;
  int64_t sum = 0;
  return mha_multiply(a, x, &left) && mha_multiply(b, y, &right) && mha_add(left, right, &sum) ? sum
                                                                                               : -1;
}

/* width − used, or -1 if that is not there. */
static int64_t rest_of(int64_t width, int64_t used) {
  return used < 0 || used > width ? -1 : width - used;
}

/* H·d + G·d + G·dv = width tells one of d and dv, or both where they are equal. */
static const char *derive_packed(mha_config *c, const mha_extents *e) {
  const int64_t H = c->n_heads;
  const int64_t G = c->n_kv_heads;
  const char *broken = NULL;
  if (c->head_size == 0 && c->value_head_size == 0) {
    broken = divide(e->packed, sum_of_products(H, 1, G, 2), "d = dv = output width / (H + 2·G)",
                    &c->head_size);
    c->value_head_size = c->head_size;
  } else if (c->head_size == 0) {
    const int64_t rest = rest_of(e->packed, sum_of_products(G, c->value_head_size, 0, 0));
    broken = divide(rest, sum_of_products(H, 1, G, 1), "d = (output width − G·dv) / (H + G)",
                    &c->head_size);
  } else if (c->value_head_size == 0) {
    const int64_t rest = rest_of(e->packed, sum_of_products(H, c->head_size, G, c->head_size));
    broken = divide(rest, G, "dv = (output width − H·d − G·d) / G", &c->value_head_size);
  }
  return broken;
}

const char *mha_config_derive(mha_config *c, const mha_extents *e, bool *of_value) {
  *of_value = false;
  derive(&c->n_kv_heads, c->n_heads);
  derive(&c->query_width, e->query);
  derive(&c->key_width, e->key);
  derive(&c->value_width, e->value);
  derive(&c->output_width, e->output);
  return e->packed > 0 ? derive_packed(c, e) : derive_separate(c, e, of_value);
}

/* ---- sizes from one another ---- */

static mha_status divide_width(mha_config *c, mha_error *error) {
  if (c->head_size != 0)
    return MHA_OK;
  if (c->query_width % c->n_heads != 0)
    return mha_fail(
        error, MHA_ERROR_HEADS,
        "config.query_width is %lld with %lld heads; rule: without head_size the width is a "
        "multiple of n_heads",
        (long long)c->query_width, (long long)c->n_heads);
  c->head_size = c->query_width / c->n_heads;
  return MHA_OK;
}

static mha_status check_not_negative(const mha_config *c, mha_error *error) {
  const struct {
    int64_t value;
    const char *name;
  } sizes[] = {{c->n_kv_heads, "config.n_kv_heads"},
               {c->head_size, "config.head_size"},
               {c->value_head_size, "config.value_head_size"},
               {c->query_width, "config.query_width"},
               {c->key_width, "config.key_width"},
               {c->value_width, "config.value_width"},
               {c->output_width, "config.output_width"}};
  mha_status status = mha_require_at_least(c->n_heads, 1, "config.n_heads", error);
  for (size_t k = 0; !status && k < sizeof sizes / sizeof *sizes; k++)
    status = mha_require_at_least(sizes[k].value, 0, sizes[k].name, error);
  return status;
}

/* What goes to a product is a dimension of it. */
static mha_status check_inner(const mha_config *c, mha_widths *w, mha_error *error) {
  const struct {
    int64_t heads, size;
    const char *name;
  } products[] = {{c->n_heads, c->head_size, "config.head_size"},
                  {c->n_kv_heads, c->head_size, "config.head_size"},
                  {c->n_kv_heads, c->value_head_size, "config.value_head_size"},
                  {c->n_heads, c->value_head_size, "config.value_head_size"}};
  for (size_t k = 0; k < sizeof products / sizeof *products; k++) {
    int64_t width = 0;
    if (!mha_multiply(products[k].heads, products[k].size, &width) || width > MHA_BLAS_MAX)
      return mha_fail(error, MHA_ERROR_OVERFLOW,
                      "%s is %lld with %lld heads; rule: the product is at most %lld, the BLAS's "
                      "integer",
                      products[k].name, (long long)products[k].size, (long long)products[k].heads,
                      (long long)MHA_BLAS_MAX);
  }
  (void)mha_config_widths(c, w);
  return MHA_OK;
}

static mha_status check_widths(const mha_config *c, mha_error *error) {
  const struct {
    int64_t value;
    const char *name;
  } widths[] = {
      {c->head_size, "config.head_size"},     {c->value_head_size, "config.value_head_size"},
      {c->query_width, "config.query_width"}, {c->key_width, "config.key_width"},
      {c->value_width, "config.value_width"}, {c->output_width, "config.output_width"}};
  mha_status status = MHA_OK;
  for (size_t k = 0; !status && k < sizeof widths / sizeof *widths; k++) {
    status = mha_require_at_least(widths[k].value, 1, widths[k].name, error);
    if (!status && widths[k].value > MHA_BLAS_MAX)
      status =
          mha_fail(error, MHA_ERROR_OVERFLOW, "%s is %lld; rule: at most %lld, the BLAS's integer",
                   widths[k].name, (long long)widths[k].value, (long long)MHA_BLAS_MAX);
  }
  return status;
}

/* Fills in the sizes that were left 0. An absent matrix forces its input and output widths to be
 * equal, which derives what Eq cannot. */
static mha_status complete_sizes(mha_config *c, const mha_matrices *m, mha_widths *w,
                                 mha_error *error) {
  mha_status status = check_not_negative(c, error);
  if (status)
    return status;
  derive(&c->n_kv_heads, c->n_heads);
  if (c->n_heads % c->n_kv_heads != 0)
    return mha_fail(
        error, MHA_ERROR_HEADS,
        "config.n_heads is %lld and config.n_kv_heads %lld; rule: n_heads is a multiple",
        (long long)c->n_heads, (long long)c->n_kv_heads);
  status = divide_width(c, error);
  derive(&c->value_head_size, c->head_size);
  if (!status)
    status = check_inner(c, w, error);
  if (status)
    return status;
  if (!m->query)
    derive(&c->query_width, w->q);
  derive(&c->key_width, m->key ? c->query_width : w->k);
  derive(&c->value_width, m->value ? c->query_width : w->v);
  derive(&c->output_width, m->output ? c->query_width : w->concat);
  return check_widths(c, error);
}

static mha_status check_flags(const mha_config *c, mha_error *error) {
  mha_status status = mha_require_flags(c->flags, MHA_SCALE | MHA_PACK_WEIGHTS | MHA_KEEP_TYPE,
                                        "config.flags", error);
  if (!status && c->flags & MHA_PACK_WEIGHTS && mha_kernels_missing())
    status = mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "config.flags has MHA_PACK_WEIGHTS, but %s; rule: only where "
                      "MHA_ENGINE_XSMM can be had",
                      mha_kernels_missing());
  return status;
}

static mha_status check_score_rule(mha_config *c, mha_error *error) {
  mha_status status =
      c->flags & MHA_SCALE ? mha_require_finite(c->scale, "config.scale", error) : MHA_OK;
  if (!status)
    status = mha_require_finite(c->softcap, "config.softcap", error);
  if (!status && c->softcap < 0.0f)
    status = mha_fail(error, MHA_ERROR_VALUE, "config.softcap is %g; rule: at least 0",
                      (double)c->softcap);
  return status;
}

/* ---- normalisation, positions, sinks ---- */

static mha_status check_norm(const mha_config *c, const mha_matrices *m, mha_error *error) {
  if (c->norm < MHA_NORM_NONE || c->norm > MHA_NORM_FULL)
    return mha_fail(error, MHA_ERROR_VALUE, "config.norm is %d; rule: a value of mha_norm",
                    (int)c->norm);
  if (c->norm == MHA_NORM_NONE && (m->query_norm || m->key_norm))
    return mha_fail(error, MHA_ERROR_WEIGHTS,
                    "matrices.%s is given without config.norm; rule: norm says over what it runs",
                    m->query_norm ? "query_norm" : "key_norm");
  const mha_status status = mha_require_finite(c->norm_epsilon, "config.norm_epsilon", error);
  if (!status && c->norm != MHA_NORM_NONE && !(c->norm_epsilon > 0.0f))
    return mha_fail(error, MHA_ERROR_VALUE,
                    "config.norm_epsilon is %g; rule: greater than 0 where norm is set",
                    (double)c->norm_epsilon);
  return status;
}

static mha_status check_tables(const mha_config *c, mha_error *error) {
  if (!c->rope_cos != !c->rope_sin)
    return mha_fail(error, MHA_ERROR_NULL, "config.rope_%s is NULL; rule: both tables or none",
                    c->rope_cos ? "sin" : "cos");
  if (c->rope == MHA_ROPE_NONE || !c->rope_cos)
    return MHA_OK;
  int64_t elements = 0;
  const mha_status status =
      mha_require_at_least(c->rope_positions, 1, "config.rope_positions", error);
  if (!status && !mha_multiply(c->rope_positions, c->rotary_size / 2, &elements))
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "config.rope_positions is %lld with rotary_size %lld; rule: the tables' size "
                    "must not overflow",
                    (long long)c->rope_positions, (long long)c->rotary_size);
  return status;
}

/* Fills in rotary_size and rope_base; d is known. */
static mha_status derive_rope(mha_config *c, mha_error *error) {
  if (c->rope < MHA_ROPE_NONE || c->rope > MHA_ROPE_INTERLEAVED)
    return mha_fail(error, MHA_ERROR_VALUE, "config.rope is %d; rule: a value of mha_rope",
                    (int)c->rope);
  if (!isfinite(c->rope_base) || c->rope_base < 0.0)
    return mha_fail(error, MHA_ERROR_VALUE,
                    "config.rope_base is %g; rule: finite and greater than 0, or 0 = 10000",
                    c->rope_base);
  if (c->rope != MHA_ROPE_NONE) {
    derive(&c->rotary_size, c->head_size);
    if (c->rope_base == 0.0)
      c->rope_base = 10000.0;
  }
  if (c->rotary_size < 0 || c->rotary_size > c->head_size || c->rotary_size % 2 != 0)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "config.rotary_size is %lld; rule: even and at most the head size, %lld",
                    (long long)c->rotary_size, (long long)c->head_size);
  return check_tables(c, error);
}

/* ---- all of it ---- */

mha_status mha_config_complete(mha_config *c, const mha_matrices *m, mha_widths *w,
                               mha_error *error) {
  mha_status status = check_flags(c, error);
  if (!status)
    status = check_score_rule(c, error);
  if (!status)
    status = mha_require_reserved(c->reserved, "config.reserved", error);
  if (!status)
    status = complete_sizes(c, m, w, error);
  if (!status)
    status = derive_rope(c, error);
  return status ? status : check_norm(c, m, error);
}
