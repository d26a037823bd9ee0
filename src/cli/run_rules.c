/* Owns who attends to whom in `mha run`: the rules as options give them, and the files of those
 * that are arrays. */
#include "run_rules.h"

#include "shape.h"

#include "base/error.h"

#include <inttypes.h>

/* Reads [B|1][H|1][Lq|1][Lk], of which the first ones may be missing, if the option is given. */
static mha_status read_extents(const mha_option_value *v, mha_option which, mha_npy_kind kind,
                               mha_npy_array *array, int64_t extents[4], mha_error *error) {
  const char *path = v[which].text;
  if (!v[which].given)
    return MHA_OK;
  const mha_status status = mha_npy_read(path, kind, NULL, array, error);
  if (status)
    return status;
  if (array->rank < 1 || array->rank > 4)
    return mha_shape_fail(path, array, "[B|1][H|1][Lq|1][Lk] or the last ones of these", error);
  for (int axis = 0; axis < 4; axis++)
    extents[axis] = axis < 4 - array->rank ? 1 : array->shape[axis - (4 - array->rank)];
  return MHA_OK;
}

static mha_status read_masks(const mha_option_value *v, mha_run_rules *r, mha_error *error) {
  mha_rules *a = &r->rules;
  int64_t m[4] = {0};
  int64_t n[4] = {0};
  mha_status status = read_extents(v, MHA_OPTION_ATTEND, MHA_NPY_BYTES, &r->attend, m, error);
  a->attend = (mha_mask){r->attend.data, m[0], m[1], m[2], m[3], 0, 0, 0, 0, 0};
  if (!status)
    status = read_extents(v, MHA_OPTION_BIAS, MHA_NPY_FLOATS, &r->bias, n, error);
  a->bias = (mha_bias){r->bias.data, n[0], n[1], n[2], n[3], 0, 0, 0, MHA_F32, 0};
  return status;
}

/* Reads [H], if the option is given. */
static mha_status read_per_head(const mha_option_value *v, mha_option which, int64_t n_heads,
                                mha_npy_array *array, const float **numbers, mha_error *error) {
  const char *path = v[which].text;
  if (!v[which].given)
    return MHA_OK;
  const mha_status status = mha_npy_read(path, MHA_NPY_FLOATS, NULL, array, error);
  if (status)
    return status;
  *numbers = array->data;
  return array->rank == 1 && array->shape[0] == n_heads
             ? MHA_OK
             : mha_shape_fail(path, array, "[H], one number for each of --heads", error);
}

/* A number for each batch entry, at most `most`, which `letter` stands for. */
static mha_status take_lengths(const mha_option_value *v, mha_option which, int64_t batch,
                               int64_t most, const char *letter, const int64_t **lengths,
                               mha_error *error) {
  const mha_option_value *value = &v[which];
  const char *name = mha_option_name(which);
  *lengths = value->list;
  if (value->given && value->list_count != batch)
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "%s is \"%.64s\", numbers for %" PRId64 " batch entries; rule: one for each of "
                    "the %" PRId64,
                    name, value->text, value->list_count, batch);
  for (int64_t i = 0; i < value->list_count; i++)
    if (value->list[i] > most)
      return mha_fail(error, MHA_ERROR_LENGTH,
                      "%s is \"%.64s\", %" PRId64 " for batch entry %" PRId64
                      "; rule: at most %s = %" PRId64,
                      name, value->text, value->list[i], i, letter, most);
  return MHA_OK;
}

static void take_rules(const mha_option_value *v, mha_rules *a) {
  const mha_option_value *window = &v[MHA_OPTION_WINDOW];
  a->causal = v[MHA_OPTION_CAUSAL].given;
  a->alignment = v[MHA_OPTION_ALIGN].alignment;
  a->offset = v[MHA_OPTION_ALIGN].integer;
  a->scale = (float)v[MHA_OPTION_SCALE].number;
  a->softcap = (float)v[MHA_OPTION_SOFTCAP].number;
  if (v[MHA_OPTION_SCALE].given)
    a->flags |= MHA_SCALE;
  if (v[MHA_OPTION_SOFTCAP].given)
    a->flags |= MHA_SOFTCAP;
  a->dropout = (float)v[MHA_OPTION_DROPOUT].number;
  a->dropout_seed = v[MHA_OPTION_SEED].word;
  a->dropout_call = v[MHA_OPTION_CALL].word;
  if (window->given) {
    a->flags |= MHA_WINDOW;
    a->window_left = window->list[0];
    a->window_right = window->list[1];
  }
}

mha_status mha_run_rules_read(const mha_options *options, int64_t n_heads, mha_run_rules *r,
                              mha_forward_args *args, mha_error *error) {
  const mha_option_value *v = options->values;
  const int64_t n_queries = args->query_length;
  const int64_t n_keys = args->key ? args->key_length : n_queries;
  mha_rules *a = &r->rules;
  MHA_INIT(a);
  take_rules(v, a);
  mha_status status =
      take_lengths(v, MHA_OPTION_LENGTHS, args->batch, n_keys, "Lk", &a->key_lengths, error);
  if (!status)
    status = take_lengths(v, MHA_OPTION_QUERY_LENGTHS, args->batch, n_queries, "Lq",
                          &a->query_lengths, error);
  if (!status)
    status = read_masks(v, r, error);
  if (!status)
    status = read_per_head(v, MHA_OPTION_ALIBI, n_heads, &r->slopes, &a->alibi_slopes, error);
  if (!status)
    status = read_per_head(v, MHA_OPTION_SINKS, n_heads, &r->sinks, &a->sinks, error);
  args->rules = a;
  return status;
}

void mha_run_rules_release(mha_run_rules *r) {
  mha_npy_array *arrays[] = {&r->attend, &r->bias, &r->slopes, &r->sinks};
  for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
    mha_npy_array_release(arrays[i]);
}
