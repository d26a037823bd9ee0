/* Owns the masks of ONNX Runtime's own operators. They hide a key by adding mask_filter_value, a
 * finite number. Beside a kept key exp(fill) rounds to 0, so that lengths and boolean masks mean
 * the same. A query that keeps no key differs: by the formula a common fill cancels in the softmax,
 * and the query attends to the keys it should not see. There only the added number is right. */
#include "ort_mask.h"

#include <string.h>

/* Kinds of mask_index: [B] lengths; [2B] ends, then starts; [B][Lk]; [B][Lq][Lk]. */
static bool keeps_length(const int64_t *numbers, const conf_sizes *s, int64_t b, int64_t j) {
  (void)s;
  return j < numbers[b];
}

static bool keeps_range(const int64_t *numbers, const conf_sizes *s, int64_t b, int64_t j) {
  return j < numbers[b] && j >= numbers[s->B + b];
}

typedef bool keeps_function(const int64_t *numbers, const conf_sizes *s, int64_t b, int64_t j);

static const uint8_t *expand(conf_case *c, const int64_t *numbers, const conf_sizes *s,
                             keeps_function *keeps) {
  uint8_t *bytes = conf_bytes(c, s->B * s->Lk);
  for (int64_t i = 0; bytes && i < s->B * s->Lk; i++)
    bytes[i] = keeps(numbers, s, i / s->Lk, i % s->Lk);
  return bytes;
}

static const uint8_t *convert(conf_case *c, const int64_t *numbers, int64_t n) {
  uint8_t *bytes = conf_bytes(c, n);
  for (int64_t i = 0; bytes && i < n; i++)
    bytes[i] = numbers[i] != 0;
  return bytes;
}

static bool read_kind(conf_case *c, const conf_sizes *s, const char *kind, const conf_array *array,
                      ort_mask *mask) {
  const int64_t *numbers = array->numbers.data;
  if (strcmp(kind, "key_len") == 0 && conf_check_integers(c, array, s->B, 0)) {
    mask->lengths = numbers;
    mask->keeps = expand(c, numbers, s, keeps_length);
  } else if (strcmp(kind, "key_end_start") == 0 && conf_check_integers(c, array, 2 * s->B, 0)) {
    mask->keeps = expand(c, numbers, s, keeps_range);
  } else if (strcmp(kind, "key_padding") == 0 && conf_check_integers(c, array, s->B, s->Lk)) {
    mask->keeps = convert(c, numbers, s->B * s->Lk);
  } else if (strcmp(kind, "attention_3d") == 0) {
    mask->rows = s->Lq;
    if (array->kind == MHA_NPY_INTEGERS && array->numbers.n_elements == s->B * s->Lq * s->Lk)
      mask->keeps = convert(c, numbers, s->B * s->Lq * s->Lk);
  }
  /* Where a check has failed, the first outcome stays. */
  return mask->keeps || conf_cannot(c, "a mask of the kind \"%s\" is not translated", kind);
}

static bool keeps_a_key(const conf_sizes *s, const ort_mask *mask, const mha_rules *rules,
                        int64_t b, int64_t i) {
  const uint8_t *row = mask->keeps + (b * mask->rows + i % mask->rows) * s->Lk;
  for (int64_t j = 0; j < s->Lk; j++) {
    if (row[j] && (!rules->causal || j <= i + rules->offset))
      return true;
  }
  return false;
}

static bool empties_a_row(const conf_sizes *s, const ort_mask *mask, const mha_rules *rules) {
  for (int64_t i = 0; i < s->B * s->Lq; i++) {
    if (!keeps_a_key(s, mask, rules, i / s->Lq, i % s->Lq))
      return true;
  }
  return false;
}

/* The derived mask, [B][1][rows][Lk], says the same as the mask itself. */
static bool check_derived(conf_case *c, const conf_sizes *s, const ort_mask *mask,
                          const conf_array *derived) {
  const int64_t n = mask->keeps ? s->B * mask->rows * s->Lk : 0;
  bool same = derived->numbers.n_elements == n && derived->kind != MHA_NPY_INTEGERS;
  for (int64_t i = 0; i < n && same; i++) {
    if (derived->kind == MHA_NPY_BYTES)
      same = !((const uint8_t *)derived->numbers.data)[i] == !mask->keeps[i];
    else
      same = ((const float *)derived->numbers.data)[i] == (mask->keeps[i] ? 0 : mask->fill);
  }
  return same || conf_fail(c, "attn_mask is not what follows from the operator's own mask");
}

bool ort_take_mask(conf_case *c, const conf_sizes *sizes, const mha_rules *rules, ort_mask *mask) {
  const char *kind = conf_text(c, "mask_kind");
  const conf_array *derived = conf_input(c, "attn_mask");
  const conf_array *array = conf_input(c, "mask_index");
  double fill;
  if (!array)
    array = conf_input(c, "key_padding_mask");
  mask->rows = 1;
  if (!conf_attribute(c, "mask_filter_value", &fill))
    return conf_fail(c, "there is no mask_filter_value");
  mask->fill = (float)fill;
  if (!array != (strcmp(kind, "none") == 0))
    return conf_fail(c, "mask_kind is \"%s\", but the inputs say otherwise", kind);
  if (array) {
    if (!read_kind(c, sizes, kind, array, mask))
      return false;
    mask->empties_a_row = empties_a_row(sizes, mask, rules);
  }
  return !derived || check_derived(c, sizes, mask, derived);
}

static bool add_fill(conf_case *c, const conf_sizes *s, const ort_mask *mask, mha_rules *rules) {
  float *numbers = conf_floats(c, s->B * mask->rows * s->Lk);
  for (int64_t i = 0; numbers && i < s->B * mask->rows * s->Lk; i++)
    numbers[i] = mask->keeps[i] ? 0 : mask->fill;
  rules->bias = (mha_bias){numbers, s->B, 1, mask->rows, s->Lk, 0, 0, 0, 0, 0};
  return numbers != NULL;
}

bool ort_spell_mask(conf_case *c, const conf_sizes *sizes, const ort_mask *mask,
                    ort_spelling spelling, mha_rules *rules, bool *applies) {
  *applies = false;
  if (!mask->keeps) {
    *applies = spelling == ORT_ATTEND;
    return true;
  }
  if (mask->empties_a_row && rules->bias.data)
    return conf_cannot(c, "a bias and a finite fill for a query that keeps no key");
  if (spelling == ORT_FILL) {
    *applies = !rules->bias.data;
    return !*applies || add_fill(c, sizes, mask, rules);
  }
  if (mask->empties_a_row || (spelling == ORT_LENGTHS && !mask->lengths))
    return true;
  if (spelling == ORT_LENGTHS)
    rules->key_lengths = mask->lengths;
  else
    rules->attend = (mha_mask){mask->keeps, sizes->B, 1, mask->rows, sizes->Lk, 0, 0, 0, 0, 0};
  *applies = true;
  return true;
}
