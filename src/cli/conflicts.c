/* Owns what the options of `mha run` and `mha convert` forbid each other. */
#include "conflicts.h"

#include "base/error.h"

#include <inttypes.h>

static mha_status check_rope(const mha_option_value *v, mha_error *error) {
  const bool tables = v[MHA_OPTION_ROPE_COS].given;
  if (v[MHA_OPTION_ROPE_SIN].given != tables)
    return mha_fail(error, MHA_ERROR_VALUE, "%s is given without %s; rule: both or none",
                    tables ? "--rope-cos" : "--rope-sin", tables ? "--rope-sin" : "--rope-cos");
  if (v[MHA_OPTION_ROTARY].integer % 2 != 0)
    return mha_fail(error, MHA_ERROR_VALUE, "--rotary is %" PRId64 "; rule: an even number",
                    v[MHA_OPTION_ROTARY].integer);
  return MHA_OK;
}

static mha_status check_pairs(const mha_option_value *v, mha_error *error) {
  static const struct {
    mha_option one, other;
    const char *rule;
  } pairs[] = {
      {MHA_OPTION_ROPE_BASE, MHA_OPTION_ROPE_COS, "angles come from one of them"},
      {MHA_OPTION_KEY, MHA_OPTION_STEPS, "steps are for self attention"},
      {MHA_OPTION_ALIGN, MHA_OPTION_STEPS, "in steps each query is at its own key"},
      {MHA_OPTION_LENGTHS, MHA_OPTION_STEPS, "in steps the cache counts the keys"},
      {MHA_OPTION_QUERY_LENGTHS, MHA_OPTION_STEPS, "in steps the cache counts the tokens"},
      {MHA_OPTION_DROPOUT, MHA_OPTION_STEPS, "which weights are dropped depends on Lq and Lk"},
      {MHA_OPTION_BACKWARD, MHA_OPTION_STEPS, "nothing passes back through a cache"},
      {MHA_OPTION_LABELS, MHA_OPTION_KEY, "labels are for the tokens of self attention"},
  };
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
    if (v[pairs[i].one].given && v[pairs[i].other].given)
      return mha_fail(error, MHA_ERROR_VALUE, "%s is given with %s; rule: %s",
                      mha_option_name(pairs[i].one), mha_option_name(pairs[i].other),
                      pairs[i].rule);
  return MHA_OK;
}

mha_status mha_conflicts_check(const mha_option_value v[MHA_N_OPTIONS], mha_error *error) {
  const mha_option_value *stage = &v[MHA_OPTION_STAGE];
  if (v[MHA_OPTION_KV_HEADS].given &&
      v[MHA_OPTION_HEADS].integer % v[MHA_OPTION_KV_HEADS].integer != 0)
    return mha_fail(error, MHA_ERROR_HEADS,
                    "--kv-heads is %" PRId64 " for --heads %" PRId64 "; rule: it divides them",
                    v[MHA_OPTION_KV_HEADS].integer, v[MHA_OPTION_HEADS].integer);
  if (v[MHA_OPTION_SVG].given && stage->given && stage->stage != MHA_STAGE_WEIGHTS)
    return mha_fail(error, MHA_ERROR_VALUE,
                    "--svg is given with --stage %s; rule: the picture shows the stage weights",
                    stage->text);
  const mha_status status = check_pairs(v, error);
  return status ? status : check_rope(v, error);
}
