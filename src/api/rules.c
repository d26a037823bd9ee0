/* Owns the reading of the rules: every member of them is looked at here alone, checked against the
 * call's sizes, and becomes what step 3 works with. What the rules mean is visibility.c's. */
#include "rules.h"

#include "base/error.h"
#include "masks.h"

#include <math.h>

mha_status mha_rules_read(mha_asked *asked, const mha_rules *rules, const mha_results *results,
                          mha_error *error) {
  mha_status status = MHA_OK;
  MHA_INIT(&asked->rules);
  MHA_INIT(&asked->results);
  if (rules)
    status =
        mha_read_struct(&asked->rules, sizeof asked->rules, MHA_FIRST_RULES, rules, "rules", error);
  if (!status && results)
    status = mha_read_struct(&asked->results, sizeof asked->results, MHA_FIRST_RESULTS, results,
                             "results", error);
  if (!status)
    status = mha_require_reserved(asked->results.reserved, "results.reserved", error);
  return status;
}

bool mha_rules_are_packed(const mha_asked *asked) {
  return asked->rules.query_starts || asked->rules.key_starts;
}

/* ---- lengths ---- */

static mha_status check_lengths(const int64_t *lengths, int64_t n, int64_t highest,
                                const char *name, mha_error *error) {
  for (int64_t b = 0; lengths && b < n; b++)
    if (lengths[b] < 0 || lengths[b] > highest)
      return mha_fail(error, MHA_ERROR_LENGTH, "%s[%lld] is %lld; rule: between 0 and %lld", name,
                      (long long)b, (long long)lengths[b], (long long)highest);
  return MHA_OK;
}

static mha_status check_starts(const int64_t *starts, int64_t n, int64_t rows, const char *name,
                               mha_error *error) {
  if (!starts)
    return mha_fail(error, MHA_ERROR_NULL,
                    "%s is NULL; rule: packed input gives offsets for queries and keys", name);
  if (n == INT64_MAX)
    return mha_fail(error, MHA_ERROR_OVERFLOW, "%s ends %lld sequences; rule: fewer", name,
                    (long long)n);
  if (starts[0] != 0)
    return mha_fail(error, MHA_ERROR_LENGTH, "%s[0] is %lld; rule: offsets start at 0", name,
                    (long long)starts[0]);
  for (int64_t b = 1; b <= n; b++)
    if (starts[b] < starts[b - 1])
      return mha_fail(error, MHA_ERROR_LENGTH,
                      "%s[%lld] is %lld after %lld; rule: offsets do not decrease", name,
                      (long long)b, (long long)starts[b], (long long)starts[b - 1]);
  if (starts[n] > rows)
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "%s ends at %lld; rule: within the %lld rows that are given", name,
                    (long long)starts[n], (long long)rows);
  return MHA_OK;
}

/* A rule that does not go together with another. */
typedef struct exclusion {
  const void *pointer;
  const char *name;
} exclusion;

static mha_status refuse(const exclusion *excluded, size_t n, const char *reason,
                         mha_error *error) {
  for (size_t k = 0; k < n; k++)
    if (excluded[k].pointer)
      return mha_fail(error, MHA_ERROR_UNSUPPORTED, "%s is given together with %s",
                      excluded[k].name, reason);
  return MHA_OK;
}

static mha_status refuse_with_packed(const mha_asked *asked, mha_error *error) {
  const mha_rules *rules = &asked->rules;
  const mha_results *results = &asked->results;
  const exclusion excluded[] = {
      {rules->query_lengths, "rules.query_lengths"}, {rules->key_lengths, "rules.key_lengths"},
      {rules->attend.data, "rules.attend"},          {rules->bias.data, "rules.bias"},
      {results->weights, "results.weights"},         {results->average, "results.average"}};
  return refuse(excluded, sizeof excluded / sizeof *excluded,
                "rules.query_starts; rule: not with packed input", error);
}

/* Lengths do not go together with a cache. */
static mha_status refuse_with_cache(const mha_rules *rules, mha_error *error) {
  const exclusion excluded[] = {{rules->query_lengths, "rules.query_lengths"},
                                {rules->key_lengths, "rules.key_lengths"}};
  return refuse(excluded, sizeof excluded / sizeof *excluded,
                "args.cache; rule: the cache knows its lengths, args.new_lengths those of the call",
                error);
}

static mha_status init_packed(mha_visibility *v, const mha_asked *asked, bool key_is_query,
                              mha_error *error) {
  const mha_rules *rules = &asked->rules;
  v->query_starts = rules->query_starts;
  v->key_starts = rules->key_starts;
  if (!v->key_starts && key_is_query)
    v->key_starts = v->query_starts;
  mha_status status = refuse_with_packed(asked, error);
  if (!status)
    status = check_starts(v->query_starts, v->B, v->Lq, "rules.query_starts", error);
  if (!status)
    status = check_starts(v->key_starts, v->B, v->Lk, "rules.key_starts", error);
  return status;
}

/* The rows that are appended begin where the caller says, or with the queries that they are. */
static mha_status read_appended(const mha_rules *rules, mha_cache_use use, mha_visibility *v,
                                mha_error *error) {
  const bool shared = !rules->key_starts && use.key_is_query;
  v->key_starts = shared ? rules->query_starts : rules->key_starts;
  return check_starts(v->key_starts, v->B, v->Lk,
                      shared ? "rules.query_starts" : "rules.key_starts", error);
}

mha_status mha_rules_read_starts(const mha_asked *asked, mha_cache_use use, mha_visibility *v,
                                 mha_error *error) {
  const mha_rules *rules = &asked->rules;
  if (!mha_rules_are_packed(asked))
    return MHA_OK;
  mha_status status = refuse_with_packed(asked, error);
  if (!status && !use.appends && rules->key_starts)
    status = mha_fail(error, MHA_ERROR_VALUE,
                      "rules.key_starts is given with MHA_CACHE_ATTEND; rule: the keys are the "
                      "cache's");
  if (!status && use.appends)
    status = read_appended(rules, use, v, error);
  if (!status && use.attends)
    status = check_starts(rules->query_starts, v->B, v->Lq, "rules.query_starts", error);
  v->query_starts = use.attends ? rules->query_starts : v->key_starts;
  return status;
}

/* ---- alignment and window ---- */

static mha_status init_alignment(mha_visibility *v, const mha_rules *rules, mha_error *error) {
  if (rules->alignment < MHA_ALIGN_TOP_LEFT || rules->alignment > MHA_ALIGN_OFFSET)
    return mha_fail(error, MHA_ERROR_VALUE, "rules.alignment is %d; rule: a value of mha_alignment",
                    (int)rules->alignment);
  v->causal = rules->causal != 0;
  v->alignment = rules->alignment;
  v->offset = rules->offset;
  v->offsets = rules->offsets;
  v->left = v->right = -1;
  if (rules->flags & MHA_WINDOW) {
    if (rules->window_left < -1 || rules->window_right < -1)
      return mha_fail(error, MHA_ERROR_VALUE,
                      "rules.window_left and window_right are %lld and %lld; rule: at least -1",
                      (long long)rules->window_left, (long long)rules->window_right);
    v->left = rules->window_left;
    v->right = rules->window_right;
  }
  return MHA_OK;
}

/* The first query of an entry that sees a key sees the oldest. */
static int64_t first_seeing_query(const mha_visibility *v, int64_t b) {
  int64_t i = 0;
  while (i < mha_query_count(v, b) && mha_range_is_empty(mha_visible_keys(v, b, i)))
    i++;
  return i;
}

/* A ring keeps what its own window needs. A call with a wider one, or none, would do until the
 * first needed key is dropped: it is refused while the ring still holds all. */
static mha_status check_ring_window(const mha_visibility *v, mha_error *error) {
  if (!v->cached->ring || v->Lq == 0 || (v->left >= 0 && v->left < v->cached->window))
    return MHA_OK;
  return mha_fail(
      error, MHA_ERROR_VALUE,
      "window_left is %lld%s over a cache that is a ring; rule: between 0 and %lld, the "
      "ring's window - 1",
      (long long)v->left, v->left < 0 ? " (open)" : "", (long long)(v->cached->window - 1));
}

/* Where a call only attends, its alignment may still put a query beside keys of long ago. */
static mha_status check_present(const mha_visibility *v, mha_error *error) {
  for (int64_t b = 0; v->cached->ring && v->Lq > 0 && b < v->B; b++) {
    const int64_t i = first_seeing_query(v, b);
    const mha_range seen = mha_visible_keys(v, b, i);
    if (!mha_range_is_empty(seen) && seen.begin < mha_present_keys(v, b).begin)
      return mha_fail(error, MHA_ERROR_LENGTH,
                      "query %lld of batch entry %lld sees key %lld, but the ring has dropped the "
                      "keys below %lld; rule: only keys that it still holds",
                      (long long)i, (long long)b, (long long)seen.begin,
                      (long long)mha_present_keys(v, b).begin);
  }
  return MHA_OK;
}

static mha_status init_slopes(mha_visibility *v, const mha_rules *rules, mha_error *error) {
  mha_status status = MHA_OK;
  v->alibi_slopes = rules->alibi_slopes;
  for (int64_t h = 0; !status && v->alibi_slopes && h < v->H; h++)
    status = mha_require_finite(v->alibi_slopes[h], "rules.alibi_slopes", error);
  return status;
}

static mha_status init_visibility(mha_visibility *v, const mha_asked *asked, bool key_is_query,
                                  mha_error *error) {
  const mha_rules *rules = &asked->rules;
  mha_status status = init_alignment(v, rules, error);
  if (!status && v->cached) {
    status = refuse_with_cache(rules, error);
    if (!status)
      status = check_ring_window(v, error);
    if (!status)
      status = check_present(v, error);
  } else if (!status && (rules->query_starts || rules->key_starts)) {
    status = init_packed(v, asked, key_is_query, error);
  } else if (!status) {
    v->query_lengths = rules->query_lengths;
    v->key_lengths = rules->key_lengths;
    status = check_lengths(v->query_lengths, v->B, v->Lq, "rules.query_lengths", error);
    if (!status)
      status = check_lengths(v->key_lengths, v->B, v->Lk, "rules.key_lengths", error);
  }
  if (!status)
    status = mha_masks_read(&rules->attend, &rules->bias, v, error);
  return status ? status : init_slopes(v, rules, error);
}

/* ---- scores ---- */

static mha_status init_scores(mha_core *core, const mha_rules *rules,
                              const mha_rules_defaults *defaults, mha_error *error) {
  const bool own_softcap = rules->flags & MHA_SOFTCAP || rules->softcap != 0.0f;
  core->scale = rules->flags & MHA_SCALE ? rules->scale : defaults->scale;
  core->softcap = own_softcap ? rules->softcap : defaults->softcap;
  core->sinks = rules->sinks ? rules->sinks : defaults->sinks;
  mha_status status =
      mha_require_flags(rules->flags, MHA_SCALE | MHA_SOFTCAP | MHA_WINDOW, "rules.flags", error);
  if (!status)
    status = mha_require_finite(core->scale, "rules.scale", error);
  if (!status)
    status = mha_require_finite(core->softcap, "rules.softcap", error);
  if (!status && core->softcap < 0.0f)
    return mha_fail(error, MHA_ERROR_VALUE, "rules.softcap is %g; rule: at least 0",
                    (double)core->softcap);
  return status ? status
                : mha_require_sinks(rules->sinks, core->visibility.H, "rules.sinks", error);
}

/* A word below p·2^32 drops its weight: the threshold is p·2^32 rounded up, which is below 2^32 for
 * every float p below 1. */
static mha_status init_dropout(mha_core *core, const mha_rules *rules, mha_error *error) {
  const double p = (double)rules->dropout;
  if (!(p >= 0.0 && p < 1.0)) /* NaN included */
    return mha_fail(error, MHA_ERROR_VALUE, "rules.dropout is %g; rule: at least 0 and below 1", p);
  const mha_dropout dropout = {(uint32_t)ceil(ldexp(p, 32)), (float)(1.0 / (1.0 - p)),
                               rules->dropout_seed, rules->dropout_call};
  core->dropout = dropout;
  return MHA_OK;
}

/* ---- results ---- */

static mha_status init_results(mha_core *core, const mha_results *results,
                               mha_address_ranges *ranges, mha_error *error) {
  const mha_visibility *v = &core->visibility;
  int64_t rows = 0;      /* B·Lq */
  int64_t head_rows = 0; /* B·H·Lq */
  int64_t cells = 0;     /* B·Lq·Lk */
  int64_t head_cells = 0;
  if (results->stage < MHA_STAGE_WEIGHTS || results->stage > MHA_STAGE_FINAL)
    return mha_fail(error, MHA_ERROR_VALUE, "results.stage is %d; rule: a value of mha_stage",
                    (int)results->stage);
  if (!mha_multiply(v->query_starts ? 1 : v->B, v->Lq, &rows) ||
      !mha_multiply(rows, v->H, &head_rows) ||
      (results->average && !mha_multiply(rows, v->Lk, &cells)) ||
      (results->weights && !mha_multiply(head_rows, v->Lk, &head_cells)))
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s has %lld x %lld x %lld x %lld elements; rule: the product "
                    "must not overflow",
                    results->weights   ? "results.weights"
                    : results->average ? "results.average"
                                       : "the log-sum-exp",
                    (long long)v->B, (long long)v->H, (long long)v->Lq, (long long)v->Lk);
  core->results = *results;
  mha_status status = mha_ranges_add(ranges, "results.weights", results->weights, head_cells,
                                     sizeof(float), true, error);
  if (!status)
    status = mha_ranges_add(ranges, "results.average", results->average, cells, sizeof(float), true,
                            error);
  if (!status)
    status = mha_ranges_add(ranges, "results.log_sum_exp", results->log_sum_exp, head_rows,
                            sizeof(float), true, error);
  return status;
}

/* ---- addresses ---- */

/* The arrays that are read. */
static mha_status add_ranges(const mha_core *core, const mha_rules *rules,
                             mha_address_ranges *ranges, mha_error *error) {
  const mha_visibility *v = &core->visibility;
  const int64_t starts = v->query_starts ? v->B + 1 : 0;
  const struct {
    const char *name;
    const void *data;
    int64_t elements;
    size_t element_bytes;
  } arrays[] = {{"rules.query_lengths", rules->query_lengths, v->B, sizeof(int64_t)},
                {"rules.key_lengths", rules->key_lengths, v->B, sizeof(int64_t)},
                {"rules.query_starts", rules->query_starts, starts, sizeof(int64_t)},
                {"rules.key_starts", rules->key_starts, starts, sizeof(int64_t)},
                {"rules.offsets", rules->offsets, v->B, sizeof(int64_t)},
                {"rules.alibi_slopes", rules->alibi_slopes, v->H, sizeof(float)},
                {"rules.sinks", core->sinks, v->H, sizeof(float)}};
  mha_status status = MHA_OK;
  for (size_t k = 0; !status && k < sizeof arrays / sizeof *arrays; k++)
    status = mha_ranges_add(ranges, arrays[k].name, arrays[k].data, arrays[k].elements,
                            arrays[k].element_bytes, false, error);
  return status ? status : mha_masks_ranges(v, ranges, error);
}

/* ---- all of it ---- */

mha_status mha_rules_apply(const mha_asked *asked, bool key_is_query,
                           const mha_rules_defaults *defaults, mha_core *core,
                           mha_address_ranges *ranges, mha_error *error) {
  const mha_rules *rules = &asked->rules;
  mha_status status = init_visibility(&core->visibility, asked, key_is_query, error);
  if (!status)
    status = init_scores(core, rules, defaults, error);
  if (!status)
    status = init_dropout(core, rules, error);
  if (!status)
    status = add_ranges(core, rules, ranges, error);
  return status ? status : init_results(core, &asked->results, ranges, error);
}

mha_status mha_rules_ignore(mha_asked *asked, mha_error *error) {
  const mha_results *results = &asked->results;
  const mha_status status = refuse_with_cache(&asked->rules, error);
  if (!status && (results->weights || results->average || results->log_sum_exp))
    return mha_fail(error, MHA_ERROR_VALUE,
                    "results.%s is given with MHA_CACHE_APPEND; rule: nothing is attended to",
                    results->weights   ? "weights"
                    : results->average ? "average"
                                       : "log_sum_exp");
  const int64_t *query_starts = asked->rules.query_starts;
  const int64_t *key_starts = asked->rules.key_starts;
  MHA_INIT(&asked->rules);
  asked->rules.query_starts = query_starts;
  asked->rules.key_starts = key_starts;
  return status;
}
