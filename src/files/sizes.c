/* Owns which shape each part of a layer has, and what its shapes tell of the sizes. */
#include "sizes.h"

#include "base/arguments.h"
#include "base/error.h"
#include "layer/config.h"
#include "path.h"
#include "text.h"

#include <string.h>

#define SHAPE_BYTES 128

/* ---- Shapes from sizes ----------------------------------------------------------------------- */

/* In the letters of mha.h; a matrix as MHA_IN_OUT and as MHA_OUT_IN, a vector twice the same. */
static const char *const letters[MHA_N_PARTS][2] = {
    [MHA_PART_WQ] = {"[Eq][H·d]", "[H·d][Eq]"},
    [MHA_PART_WK] = {"[Ek][G·d]", "[G·d][Ek]"},
    [MHA_PART_WV] = {"[Ev][G·dv]", "[G·dv][Ev]"},
    [MHA_PART_WQKV] = {"[Eq][H·d + G·d + G·dv]", "[H·d + G·d + G·dv][Eq]"},
    [MHA_PART_WO] = {"[H·dv][Eo]", "[Eo][H·dv]"},
    [MHA_PART_BQ] = {"[H·d]", "[H·d]"},
    [MHA_PART_BK] = {"[G·d]", "[G·d]"},
    [MHA_PART_BV] = {"[G·dv]", "[G·dv]"},
    [MHA_PART_BQKV] = {"[H·d + G·d + G·dv]", "[H·d + G·d + G·dv]"},
    [MHA_PART_BO] = {"[Eo]", "[Eo]"},
    [MHA_PART_QUERY_NORM] = {"[d] per head or [H·d] in full", "[d] per head or [H·d] in full"},
    [MHA_PART_KEY_NORM] = {"[d] per head or [G·d] in full", "[d] per head or [G·d] in full"},
    [MHA_PART_SINKS] = {"[H]", "[H]"},
};

static const char *part_letters(const mha_layer_names *layer, mha_part part) {
  return letters[part][layer->orientation == MHA_IN_OUT ? 0 : 1];
}

static int part_rank(mha_part part) {
  return part <= MHA_PART_WO ? 2 : 1;
}

/* Input and output width of a matrix; of a vector its length is in *out. */
static void part_widths(mha_part part, const mha_config *c, const mha_widths *w, int64_t *in,
                        int64_t *out) {
  const bool full = c->norm == MHA_NORM_FULL;
  const struct {
    int64_t in, out;
  } widths[MHA_N_PARTS] = {
      [MHA_PART_WQ] = {c->query_width, w->q},
      [MHA_PART_WK] = {c->key_width, w->k},
      [MHA_PART_WV] = {c->value_width, w->v},
      [MHA_PART_WQKV] = {c->query_width, w->packed},
      [MHA_PART_WO] = {w->concat, c->output_width},
      [MHA_PART_BQ] = {0, w->q},
      [MHA_PART_BK] = {0, w->k},
      [MHA_PART_BV] = {0, w->v},
      [MHA_PART_BQKV] = {0, w->packed},
      [MHA_PART_BO] = {0, c->output_width},
      [MHA_PART_QUERY_NORM] = {0, full ? w->q : c->head_size},
      [MHA_PART_KEY_NORM] = {0, full ? w->k : c->head_size},
      [MHA_PART_SINKS] = {0, c->n_heads},
  };
  *in = widths[part].in;
  *out = widths[part].out;
}

static void part_shape(const mha_layer_names *layer, mha_part part, const mha_config *c,
                       const mha_widths *w, int64_t shape[2]) {
  int64_t in = 0;
  int64_t out = 0;
  part_widths(part, c, w, &in, &out);
  const bool in_first = part_rank(part) == 2 && layer->orientation == MHA_IN_OUT;
  shape[0] = in_first ? in : out;
  shape[1] = in_first ? out : in;
}

/* ---- Checks ---------------------------------------------------------------------------------- */

static char *found_shape(const mha_raw_tensor *tensor, char text[SHAPE_BYTES]) {
  return mha_shape_text(tensor->rank, tensor->shape, text, SHAPE_BYTES);
}

/* An empty tensor would leave sizes 0, which stands for "derive". */
static mha_status check_rank(const mha_layer_names *layer, const char *path, mha_part part,
                             mha_error *error) {
  char found[SHAPE_BYTES];
  const mha_raw_tensor *tensor = layer->parts[part];
  if (!tensor || (tensor->rank == part_rank(part) && tensor->n_elements > 0))
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_WEIGHTS, "%s: %s has shape %s; rule: it is %s, none of them 0",
                  mha_shown_path(path), mha_shown_path(tensor->name), found_shape(tensor, found),
                  part_letters(layer, part));
}

static mha_status check_shape(const mha_layer_names *layer, const char *path, mha_part part,
                              const mha_config *c, const mha_widths *w, mha_error *error) {
  char found[SHAPE_BYTES];
  char expected[SHAPE_BYTES];
  int64_t shape[2] = {0, 0};
  const mha_raw_tensor *tensor = layer->parts[part];
  if (!tensor)
    return MHA_OK;
  const int rank = part_rank(part);
  part_shape(layer, part, c, w, shape);
  if (memcmp(shape, tensor->shape, (size_t)rank * sizeof shape[0]) == 0)
    return MHA_OK;
  return mha_fail(
      error, MHA_ERROR_WEIGHTS,
      "%s: %s has shape %s, but %s is expected; rule: it is %s with H = %lld, G = %lld, d = %lld, "
      "dv = %lld",
      mha_shown_path(path), mha_shown_path(tensor->name), found_shape(tensor, found),
      mha_shape_text(rank, shape, expected, sizeof expected), part_letters(layer, part),
      (long long)c->n_heads, (long long)c->n_kv_heads, (long long)c->head_size,
      (long long)c->value_head_size);
}

static mha_status check_config(const mha_config *c, mha_error *error) {
  const struct {
    int64_t value;
    const char *name;
  } sizes[] = {
      {c->n_kv_heads, "config.n_kv_heads (G)"},
      {c->head_size, "config.head_size (d)"},
      {c->value_head_size, "config.value_head_size (dv)"},
      {c->query_width, "config.query_width (Eq)"},
      {c->key_width, "config.key_width (Ek)"},
      {c->value_width, "config.value_width (Ev)"},
      {c->output_width, "config.output_width (Eo)"},
  };
  mha_status status = mha_require_at_least(c->n_heads, 1, "config.n_heads (H)", error);
  for (size_t i = 0; !status && i < sizeof sizes / sizeof sizes[0]; i++)
    status = mha_require_at_least(sizes[i].value, 0, sizes[i].name, error);
  if (!status && (c->norm < MHA_NORM_NONE || c->norm > MHA_NORM_FULL))
    status = mha_fail(error, MHA_ERROR_VALUE, "config.norm is %d; rule: a value of mha_norm",
                      (int)c->norm);
  return status;
}

/* ---- Sizes from shapes ----------------------------------------------------------------------- */

static int64_t input_width(const mha_layer_names *layer, mha_part part) {
  return layer->parts[part]->shape[layer->orientation == MHA_IN_OUT ? 0 : 1];
}

static int64_t output_width(const mha_layer_names *layer, mha_part part) {
  return layer->parts[part]->shape[layer->orientation == MHA_IN_OUT ? 1 : 0];
}

static mha_extents collect_extents(const mha_layer_names *layer) {
  const bool packed = layer->parts[MHA_PART_WQKV] != NULL;
  const mha_extents extents = {
      .query = input_width(layer, packed ? MHA_PART_WQKV : MHA_PART_WQ),
      .key = input_width(layer, packed ? MHA_PART_WQKV : MHA_PART_WK),
      .value = input_width(layer, packed ? MHA_PART_WQKV : MHA_PART_WV),
      .output = output_width(layer, MHA_PART_WO),
      .q = packed ? 0 : output_width(layer, MHA_PART_WQ),
      .v = packed ? 0 : output_width(layer, MHA_PART_WV),
      .packed = packed ? output_width(layer, MHA_PART_WQKV) : 0,
  };
  return extents;
}

static mha_status derive_sizes(const mha_layer_names *layer, const char *path, mha_config *c,
                               mha_error *error) {
  char found[SHAPE_BYTES];
  const mha_extents extents = collect_extents(layer);
  bool of_value = false;
  const char *broken = mha_config_derive(c, &extents, &of_value);
  if (!broken)
    return MHA_OK;
  const mha_part part = extents.packed > 0 ? MHA_PART_WQKV : of_value ? MHA_PART_WV : MHA_PART_WQ;
  return mha_fail(error, MHA_ERROR_HEADS,
                  "%s: %s has shape %s, for H = %lld and G = %lld heads; rule: %s, without "
                  "remainder",
                  mha_shown_path(path), mha_shown_path(layer->parts[part]->name),
                  found_shape(layer->parts[part], found), (long long)c->n_heads,
                  (long long)c->n_kv_heads, broken);
}

/* One matrix multiplies all three inputs. */
static mha_status check_packed_inputs(const mha_layer_names *layer, const char *path,
                                      const mha_config *c, mha_error *error) {
  const mha_raw_tensor *tensor = layer->parts[MHA_PART_WQKV];
  char found[SHAPE_BYTES];
  if (!tensor || (c->key_width == c->query_width && c->value_width == c->query_width))
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_WEIGHTS,
                  "%s: %s has shape %s, with Eq = %lld, Ek = %lld, Ev = %lld; rule: a packed "
                  "matrix has one input width",
                  mha_shown_path(path), mha_shown_path(tensor->name), found_shape(tensor, found),
                  (long long)c->query_width, (long long)c->key_width, (long long)c->value_width);
}

/* ---- The norm -------------------------------------------------------------------------------- */

/* What Q is normalised over follows from the weight's length, [d] or [H·d]; for H = 1 both are the
 * same. A length that is neither is found by check_shape. */
static mha_status derive_norm(const mha_layer_names *layer, const char *path, const mha_widths *w,
                              mha_config *c, mha_error *error) {
  char prefix[MHA_SHOWN_BYTES];
  const mha_raw_tensor *tensor = layer->parts[MHA_PART_QUERY_NORM];
  if (!tensor && c->norm != MHA_NORM_NONE)
    return mha_fail(error, MHA_ERROR_WEIGHTS,
                    "%s lacks %s%s, with config.norm = %d; rule: a norm has its "
                    "weights in the file",
                    mha_shown_path(path),
                    mha_shown_text(layer->prefix, (size_t)layer->prefix_bytes, prefix),
                    mha_names_part(layer, MHA_PART_QUERY_NORM), (int)c->norm);
  if (!tensor)
    return MHA_OK;
  if (c->norm == MHA_NORM_NONE)
    c->norm = tensor->shape[0] != c->head_size && tensor->shape[0] == w->q ? MHA_NORM_FULL
                                                                           : MHA_NORM_PER_HEAD;
  if (c->norm_epsilon > 0.0F)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_VALUE,
                  "config.norm_epsilon is %g, with %s in %s; rule: greater than 0 where there is "
                  "a norm",
                  (double)c->norm_epsilon, mha_shown_path(tensor->name), mha_shown_path(path));
}

mha_status mha_sizes_derive(const mha_layer_names *layer, const char *path, mha_config *config,
                            mha_error *error) {
  mha_status status = check_config(config, error);
  for (int part = 0; !status && part < MHA_N_PARTS; part++)
    status = check_rank(layer, path, (mha_part)part, error);
  if (!status)
    status = derive_sizes(layer, path, config, error);
  if (!status)
    status = check_packed_inputs(layer, path, config, error);
  if (status)
    return status;
  mha_widths widths;
  if (!mha_config_widths(config, &widths))
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "config has H = %lld, G = %lld, d = %lld, dv = %lld; rule: their products do "
                    "not overflow",
                    (long long)config->n_heads, (long long)config->n_kv_heads,
                    (long long)config->head_size, (long long)config->value_head_size);
  status = derive_norm(layer, path, &widths, config, error);
  for (int part = 0; !status && part < MHA_N_PARTS; part++)
    status = check_shape(layer, path, (mha_part)part, config, &widths, error);
  return status;
}
