/* Owns the names under which a layer's matrices and biases lie in files. */
#include "names.h"

#include "../memory.h"

static const struct {
  const char *folder_name;
  const char *letters;
} parts[MHA_N_PARTS] = {
    [MHA_PART_WQ] = {"W_Q", "[Eq][H·d]"},  [MHA_PART_WK] = {"W_K", "[Ek][G·d]"},
    [MHA_PART_WV] = {"W_V", "[Ev][G·dv]"}, [MHA_PART_WO] = {"W_O", "[H·dv][Eo]"},
    [MHA_PART_BQ] = {"b_Q", "[H·d]"},      [MHA_PART_BK] = {"b_K", "[G·d]"},
    [MHA_PART_BV] = {"b_V", "[G·dv]"},     [MHA_PART_BO] = {"b_O", "[Eo]"},
};

bool mha_part_is_matrix(mha_part part) {
  return part <= MHA_PART_WO;
}

const char *mha_part_folder_name(mha_part part) {
  return parts[part].folder_name;
}

const char *mha_part_letters(mha_part part) {
  return parts[part].letters;
}

/* Input width and output width of the projection that `part` belongs to. */
static bool projection_widths(mha_part part, const mha_config *c, int64_t *in, int64_t *out) {
  switch (part) {
  case MHA_PART_WQ:
  case MHA_PART_BQ:
    *in = c->query_width;
    return mha_multiply(c->n_heads, c->head_size, out);
  case MHA_PART_WK:
  case MHA_PART_BK:
    *in = c->key_width;
    return mha_multiply(c->n_kv_heads, c->head_size, out);
  case MHA_PART_WV:
  case MHA_PART_BV:
    *in = c->value_width;
    return mha_multiply(c->n_kv_heads, c->value_head_size, out);
  case MHA_PART_WO:
  case MHA_PART_BO:
    *out = c->output_width;
    return mha_multiply(c->n_heads, c->value_head_size, in);
  }
  return false;
}

int mha_part_shape(mha_part part, const mha_config *config, int64_t shape[2]) {
  int64_t in = 0;
  int64_t out = 0;
  if (!projection_widths(part, config, &in, &out))
    return 0;
  if (!mha_part_is_matrix(part)) {
    shape[0] = out;
    return 1;
  }
  shape[0] = in;
  shape[1] = out;
  return 2;
}
