/* Owns trials of the layer call: mha_forward in all its forms, and mha_self_attention. */
#include "forward.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static mha_status forward(fuzz_trial *trial, mha_context *context, bool again, mha_error *error) {
  const fuzz_forward *t = (const fuzz_forward *)trial;
  const mha_forward_args *given = t->no_args ? NULL : t->given[again];
  if (t->no_context)
    context = NULL;
  if (!fuzz_goes_back(t))
    return mha_forward(context, t->weights, given, error);
  return mha_backward(context, t->weights, given, t->no_back ? NULL : t->back_given[again], error);
}

/* ---- sizes ---- */

static int64_t choose_length(fuzz_reader *r) {
  return fuzz_read_one_in(r, 3) ? fuzz_read(r, 0, 40) : fuzz_read(r, 1, 5);
}

static bool fits(const fuzz_cache *c, const mha_config *layer) {
  return c->cache && c->sizes.n_kv_heads == layer->n_kv_heads &&
         c->sizes.head_size == layer->head_size &&
         c->sizes.value_head_size == layer->value_head_size;
}

static void choose_cache(fuzz_forward *t) {
  fuzz_reader *r = t->trial.reader;
  fuzz_cache *c = fuzz_choose_cache(t->trial.session);
  if (!c || !fuzz_read_one_in(r, 2))
    return;
  t->cache = c;
  t->args.cache = c->cache;
  t->args.cache_mode = (int32_t)fuzz_read(r, MHA_CACHE_APPEND_ATTEND, MHA_CACHE_ATTEND);
  if (!fits(c, &t->layer->config))
    t->trial.expect = FUZZ_FAILURE;
}

static bool appends(const fuzz_forward *t) {
  return t->cache && t->args.cache_mode != MHA_CACHE_ATTEND;
}

static bool attends(const fuzz_forward *t) {
  return t->args.cache_mode != MHA_CACHE_APPEND;
}

static void choose_sizes(fuzz_forward *t) {
  fuzz_reader *r = t->trial.reader;
  mha_forward_args *a = &t->args;
  t->most_rows = t->cache && !fuzz_read_one_in(r, 4) ? 6 : 40;
  const int64_t most = t->cache ? t->cache->sizes.n_entries : 3;
  a->batch = fuzz_read_one_in(r, 8) ? 0 : fuzz_read(r, 1, most);
  a->query_length = fuzz_read_one_in(r, 8) ? 0 : choose_length(r);
  if (a->query_length > t->most_rows)
    a->query_length = t->most_rows;
  /* with a cache from what is read already: the inputs there are keep their meaning */
  t->rules.to.packed = t->cache ? (a->batch + a->query_length) % 4 == 3 : fuzz_read_one_in(r, 4);
  t->entries = t->rules.to.packed ? 1 : a->batch;
}

/* ---- arrays ---- */

/* [entries][length][width] in one of the layouts; returns the elements from first to last. */
static int64_t lay_out(fuzz_forward *t, int64_t length, int64_t width, int64_t *batch_stride,
                       int64_t *row_stride) {
  fuzz_reader *r = t->trial.reader;
  const int64_t layout = fuzz_read(r, 0, 3);
  const int64_t pad = layout >= 2 ? fuzz_read(r, 0, 3) : 0;
  const int64_t B = t->entries;
  int64_t row = width + pad;
  int64_t batch = length * row + pad;
  if (layout == 3) { /* [L][B][width] */
    batch = row;
    row = B * batch;
  }
  if (row < width)
    row = width;
  *batch_stride = layout == 0 ? 0 : batch;
  *row_stride = layout == 0 ? 0 : row;
  return B > 0 && length > 0 ? (B - 1) * batch + (length - 1) * row + width : 0;
}

static float *choose_input(fuzz_forward *t, int64_t length, int64_t width, int64_t *batch_stride,
                           int64_t *row_stride) {
  const int64_t n = lay_out(t, length, width, batch_stride, row_stride);
  float *data = fuzz_pool_floats(&t->trial.pool, n);
  fuzz_read_floats(t->trial.reader, data, n);
  return data;
}

/* The row stride that counts. */
int64_t fuzz_row_step(int64_t row_stride, int64_t width) {
  return row_stride ? row_stride : width;
}

int64_t fuzz_batch_step(int64_t batch_stride, int64_t row_stride, int64_t length, int64_t width) {
  return batch_stride ? batch_stride : length * fuzz_row_step(row_stride, width);
}

static void choose_output(fuzz_forward *t) {
  fuzz_reader *r = t->trial.reader;
  mha_forward_args *a = &t->args;
  const int64_t width = t->layer->config.output_width;
  const int64_t Lq = a->query_length;
  const int64_t n = lay_out(t, Lq, width, &a->output_batch_stride, &a->output_row_stride);
  const int64_t row = fuzz_row_step(a->output_row_stride, width);
  const int64_t batch = fuzz_batch_step(a->output_batch_stride, a->output_row_stride, Lq, width);
  a->accumulate = fuzz_read_one_in(r, 4) ? (int32_t)fuzz_read(r, -1, 2) : 0;
  float *data = fuzz_pool_output(&t->trial.pool, n, FUZZ_BOTH_RUNS, a->accumulate == 0);
  if (a->accumulate)
    fuzz_read_floats(r, data, n);
  for (int64_t b = 0; b < t->entries; b++)
    for (int64_t i = 0; i < Lq; i++)
      fuzz_pool_allow(&t->trial.pool, data + b * batch + i * row, (size_t)width * sizeof *data);
  a->output = data;
}

/* Whether the layer lets the query stand for the key, and the key for the value. */
static bool query_can_be_key(const fuzz_forward *t) {
  return t->layer->config.key_width == t->layer->config.query_width;
}

static bool key_can_be_value(const fuzz_forward *t) {
  return t->layer->config.value_width == t->layer->config.key_width;
}

static void choose_keys(fuzz_forward *t) {
  fuzz_reader *r = t->trial.reader;
  mha_forward_args *a = &t->args;
  const mha_config *c = &t->layer->config;
  const bool own_value = !key_can_be_value(t) || fuzz_read_one_in(r, 3);
  const bool own_key = !query_can_be_key(t) || own_value || fuzz_read_one_in(r, 3);
  t->rows = a->query_length;
  if (!own_key) {
    a->key_length = fuzz_read_one_in(r, 2) ? a->query_length : 0;
    return;
  }
  t->rows = a->key_length = fuzz_read_one_in(r, 8) ? 0 : choose_length(r);
  if (t->rows > t->most_rows)
    t->rows = a->key_length = t->most_rows;
  a->key = choose_input(t, t->rows, c->key_width, &a->key_batch_stride, &a->key_row_stride);
  if (own_value)
    a->value =
        choose_input(t, t->rows, c->value_width, &a->value_batch_stride, &a->value_row_stride);
}

/* A size of 0 beside an array that the call would use. */
static bool is_empty(const fuzz_forward *t) {
  const mha_forward_args *a = &t->args;
  const bool query = attends(t) || !a->key;
  return (a->batch == 0 && (query || a->key)) || (a->query_length == 0 && query) ||
         (a->key_length == 0 && a->key);
}

static void choose_arrays(fuzz_forward *t) {
  mha_forward_args *a = &t->args;
  const mha_config *c = &t->layer->config;
  a->query = choose_input(t, a->query_length, c->query_width, &a->query_batch_stride,
                          &a->query_row_stride);
  if (!t->cache || appends(t))
    choose_keys(t);
  if (attends(t))
    choose_output(t);
  a->flags = fuzz_choose_flags(&t->trial, is_empty(t));
}

/* ---- cache ---- */

/* Where packed sequences start, and so what each of them appends. */
static void choose_cached_starts(fuzz_forward *t) {
  const mha_forward_args *a = &t->args;
  fuzz_rules_for *to = &t->rules.to;
  to->query_starts = fuzz_choose_starts(&t->trial, a->batch, a->query_length);
  to->key_starts = a->key ? fuzz_choose_starts(&t->trial, a->batch, t->rows) : NULL;
  if (!appends(t))
    return;
  const int64_t *starts = a->key ? to->key_starts : to->query_starts;
  t->arrivals = fuzz_pool_integers(&t->trial.pool, a->batch);
  for (int64_t b = 0; b < a->batch; b++)
    t->arrivals[b] = starts[b + 1] - starts[b];
}

static void choose_entries(fuzz_forward *t) {
  mha_forward_args *a = &t->args;
  if (!t->cache)
    return;
  t->to_entries = fuzz_choose_entries(&t->trial, t->cache, a->batch, appends(t));
  if (t->rules.to.packed)
    choose_cached_starts(t);
  else
    t->counts = fuzz_choose_counts(&t->trial, a->batch, appends(t) ? t->rows : a->query_length);
  if (fuzz_read_one_in(t->trial.reader, 4)) {
    t->expected = fuzz_pool_integers(&t->trial.pool, a->batch);
    for (int64_t b = 0; b < a->batch; b++)
      t->expected[b] = t->cache->lengths[t->to_entries ? t->to_entries[b] : b];
  }
  a->cache_entries = t->to_entries;
  a->new_lengths = t->counts;
  a->expected_lengths = t->expected;
  if (appends(t) && t->trial.expect == FUZZ_SUCCESS)
    fuzz_cache_expect_appends(&t->trial, t->cache, a->batch, t->rows, t->to_entries,
                              t->arrivals ? t->arrivals : t->counts);
}

static int64_t length_after(const fuzz_forward *t, int64_t b) {
  const int64_t entry = t->to_entries ? t->to_entries[b] : b;
  const int64_t new = t->arrivals ? t->arrivals[b] : t->counts ? t->counts[b] : t->rows;
  return t->cache->lengths[entry] + (appends(t) ? new : 0);
}

/* Lk as masks and results have it. */
static int64_t visible_length(const fuzz_forward *t) {
  int64_t most = 0;
  if (!t->cache)
    return t->rows;
  for (int64_t b = 0; b < t->args.batch; b++)
    if (length_after(t, b) > most)
      most = length_after(t, b);
  return most;
}

/* ---- rules and positions ---- */

static void choose_rules(fuzz_forward *t) {
  const bool packed = t->rules.to.packed;
  const fuzz_rules_for to = {.B = t->args.batch,
                             .H = t->layer->config.n_heads,
                             .Lq = t->args.query_length,
                             .Lk = visible_length(t),
                             .key_rows = t->rows,
                             .query_starts = t->rules.to.query_starts,
                             .key_starts = t->rules.to.key_starts,
                             .packed = packed,
                             .cached = t->cache != NULL,
                             .append_only = !attends(t),
                             .key_is_query = !t->args.key && (!t->cache || packed),
                             .window = t->cache ? t->cache->sizes.window : 0};
  fuzz_choose_rules(&t->trial, &t->rules, &to);
  /* a ring that has dropped keys, and any alignment */
  if (to.window > 0 && t->args.cache_mode == MHA_CACHE_ATTEND && t->trial.expect == FUZZ_SUCCESS)
    t->trial.expect = FUZZ_ANYTHING;
}

/* Of entries that have grown: counted from behind what they hold. */
static int64_t last_counted_position(const fuzz_forward *t) {
  int64_t most = t->args.query_length > t->rows ? t->args.query_length : t->rows;
  for (int64_t e = 0; t->cache && e < t->cache->sizes.n_entries; e++)
    if (t->cache->lengths[e] + 48 > most)
      most = t->cache->lengths[e] + 48;
  return most;
}

static int64_t *choose_positions(fuzz_forward *t, int64_t n) {
  int64_t *positions = NULL;
  if (fuzz_read_one_in(t->trial.reader, 4)) {
    positions = fuzz_pool_integers(&t->trial.pool, n);
    for (int64_t i = 0; i < n; i++)
      positions[i] = fuzz_read(t->trial.reader, 0, 9);
  }
  return positions;
}

static void choose_all_positions(fuzz_forward *t) {
  fuzz_reader *r = t->trial.reader;
  mha_forward_args *a = &t->args;
  const mha_config *c = &t->layer->config;
  a->query_position = fuzz_read_one_in(r, 4) ? fuzz_read_any(r) : 0;
  a->query_positions = choose_positions(t, t->entries * a->query_length);
  if (a->key) {
    a->key_position = fuzz_read_one_in(r, 4) ? fuzz_read_any(r) : 0;
    a->key_positions = choose_positions(t, t->entries * a->key_length);
  }
  const bool usual = a->query_position >= 0 && a->query_position < INT32_MAX &&
                     a->key_position >= 0 && a->key_position < INT32_MAX &&
                     (t->cache == NULL || a->cache_mode != MHA_CACHE_ATTEND);
  const int64_t last =
      usual ? last_counted_position(t) + a->query_position + a->key_position : INT64_MAX - 9;
  if (c->rope != MHA_ROPE_NONE && t->trial.expect == FUZZ_SUCCESS &&
      (!usual || (c->rope_cos && last + 9 >= c->rope_positions)))
    t->trial.expect = FUZZ_ANYTHING;
}

/* ---- what must not be read ---- */

static void hide(fuzz_forward *t, const float *data, int64_t length, int64_t width,
                 int64_t batch_stride, int64_t row_stride, const int64_t *counts) {
  const int64_t row = fuzz_row_step(row_stride, width);
  const int64_t batch = fuzz_batch_step(batch_stride, row_stride, length, width);
  for (int64_t b = 0; counts && data && b < t->entries; b++)
    for (int64_t i = counts[b]; i < length; i++)
      fuzz_pool_hide(&t->trial.pool, data + b * batch + i * row, (size_t)width * sizeof *data);
}

/* Rows behind a length: of keys, and of queries that are no keys. */
static void hide_rows(fuzz_forward *t) {
  const mha_forward_args *a = &t->args;
  const mha_config *c = &t->layer->config;
  const int64_t *keys = t->cache ? t->counts : t->rules.key_lengths;
  const int64_t *queries = t->cache ? (attends(t) ? t->counts : NULL) : t->rules.query_lengths;
  hide(t, a->key, t->rows, c->key_width, a->key_batch_stride, a->key_row_stride, keys);
  hide(t, a->value, t->rows, c->value_width, a->value_batch_stride, a->value_row_stride, keys);
  if (a->key || a->cache_mode == MHA_CACHE_ATTEND || (t->cache && t->counts))
    hide(t, a->query, a->query_length, c->query_width, a->query_batch_stride, a->query_row_stride,
         queries);
}

/* ---- what is refused ---- */

static bool has_rows(const fuzz_forward *t) {
  return t->args.batch > 0 && t->args.query_length > 0 && attends(t);
}

static bool has_keys(const fuzz_forward *t) {
  return t->args.batch > 0 && t->args.key && t->rows > 0 && (t->cache || t->args.query_length > 0);
}

static bool spoil_pointers(fuzz_forward *t) {
  mha_forward_args *a = &t->args;
  switch (fuzz_read(t->trial.reader, 0, 5)) {
  case 0:
    t->no_context = true;
    return true;
  case 1:
    t->weights = NULL;
    return true;
  case 2:
    t->no_args = true;
    return true;
  case 3:
    a->query = NULL;
    return has_rows(t);
  case 4:
    a->output = NULL;
    return has_rows(t);
  default:
    if (!a->value)
      return false;
    a->key = NULL;
    return true;
  }
}

/* A huge batch has no array of that length: where one is given, only a negative one will do. */
static bool spoil_sizes(fuzz_forward *t) {
  mha_forward_args *a = &t->args;
  int64_t *sizes[] = {&a->batch, &a->query_length, &a->key_length};
  const int64_t which = fuzz_read(t->trial.reader, 0, 2);
  const bool lists = t->to_entries || t->counts || t->expected || t->rules.query_starts;
  int64_t size = fuzz_read_no_size(t->trial.reader);
  if (size > 0 && (which != 1 || !has_rows(t)) && (lists || !has_rows(t) || which == 2))
    size = -size;
  *sizes[which] = size;
  return true;
}

/* A stride counts where something is stepped over. */
static fuzz_expect spoil_strides(fuzz_forward *t) {
  mha_forward_args *a = &t->args;
  int64_t *strides[] = {&a->query_row_stride,  &a->query_batch_stride, &a->key_row_stride,
                        &a->key_batch_stride,  &a->value_row_stride,   &a->value_batch_stride,
                        &a->output_row_stride, &a->output_batch_stride};
  const int64_t which = fuzz_read(t->trial.reader, 0, 7);
  const int64_t rows = which >= 2 && which < 6 ? t->rows : a->query_length;
  const int64_t steps = which % 2 == 0 ? rows : t->entries;
  *strides[which] = fuzz_read_no_size(t->trial.reader);
  if (steps <= 1)
    return FUZZ_SUCCESS;
  const bool used = which < 2 || which > 5 ? has_rows(t) : has_keys(t) && (which < 4 || a->value);
  return used ? FUZZ_FAILURE : FUZZ_ANYTHING;
}

/* Something that the output must not overlap, or NULL. */
static const void *find_neighbour(fuzz_forward *t) {
  const mha_forward_args *a = &t->args;
  mha_tensor k;
  mha_tensor v;
  switch (fuzz_read(t->trial.reader, 0, 4)) {
  case 0:
    return a->query;
  case 1:
    return has_keys(t) ? a->key : NULL;
  case 2:
    return t->layer->borrowed;
  case 3:
    if (!t->cache || mha_cache_view(t->cache->cache, &k, &v, NULL))
      return NULL;
    t->no_twin = true;
    return fuzz_read_one_in(t->trial.reader, 2) ? v.data : k.data;
  default:
    return t->counts;
  }
}

/* The output lies where something else does, or within itself. */
static bool spoil_output(fuzz_forward *t) {
  mha_forward_args *a = &t->args;
  if (!has_rows(t))
    return false;
  if (fuzz_read_one_in(t->trial.reader, 5) && t->entries > 1 &&
      t->layer->config.output_width > 1) { /* [L][B][1] would do */
    a->output_batch_stride = 1;
    return true;
  }
  const void *neighbour = find_neighbour(t);
  if (neighbour)
    a->output = (float *)(uintptr_t)neighbour;
  return neighbour != NULL;
}

static bool spoil_cache(fuzz_forward *t) {
  fuzz_reader *r = t->trial.reader;
  mha_forward_args *a = &t->args;
  const int64_t kind = fuzz_read(r, 0, 3);
  if (kind == 0) {
    a->cache_mode = fuzz_read_no_enumerator(r, MHA_CACHE_APPEND_ATTEND, MHA_CACHE_ATTEND);
    return true;
  }
  if (!t->cache) {
    int64_t *zeros = fuzz_pool_integers(&t->trial.pool, a->batch);
    memset(zeros, 0, (size_t)a->batch * sizeof *zeros);
    *(kind == 1 ? &a->cache_entries : kind == 2 ? &a->new_lengths : &a->expected_lengths) = zeros;
    return true;
  }
  if (t->expected && a->batch > 0 && fuzz_read_one_in(r, 2)) {
    t->expected[fuzz_read(r, 0, a->batch - 1)] += fuzz_read(r, 1, 9);
    return true;
  }
  if (kind == 1 && t->to_entries && a->batch > 0) {
    t->to_entries[fuzz_read(r, 0, a->batch - 1)] =
        fuzz_read_one_in(r, 2) ? t->cache->sizes.n_entries : fuzz_read_no_size(r);
    return true;
  }
  if (kind == 2 && t->counts && a->batch > 0) {
    t->counts[fuzz_read(r, 0, a->batch - 1)] =
        fuzz_read_one_in(r, 2) ? t->most_rows + 1 : fuzz_read_no_size(r);
    return true;
  }
  if (kind == 3 && appends(t) && t->to_entries && a->batch > 1) {
    t->to_entries[1] = t->to_entries[0];
    return true;
  }
  return false;
}

static bool spoil_positions(fuzz_forward *t) {
  mha_forward_args *a = &t->args;
  const bool rotary = t->layer->config.rope != MHA_ROPE_NONE;
  if (!a->key && fuzz_read_one_in(t->trial.reader, 2)) {
    a->key_position = 1;
    return a->batch > 0;
  }
  a->query_positions = NULL;
  a->query_position = fuzz_read_one_in(t->trial.reader, 2) ? INT64_MIN : -1;
  return rotary && has_rows(t) && !t->cache && !t->rules.query_starts && !t->rules.query_lengths;
}

static void spoil(fuzz_forward *t) {
  bool certain = true;
  switch (fuzz_read(t->trial.reader, 0, 9)) {
  case 0:
    certain = spoil_pointers(t);
    break;
  case 1:
    certain = spoil_sizes(t);
    break;
  case 2:
    fuzz_trial_spoil(&t->trial, spoil_strides(t));
    return;
  case 3:
    certain = spoil_output(t);
    break;
  case 4:
    certain = spoil_cache(t);
    break;
  case 5:
    certain = spoil_positions(t);
    break;
  case 6:
    if (fuzz_read_one_in(t->trial.reader, 2))
      t->args.flags |= UINT32_C(1) << fuzz_read(t->trial.reader, 0, 4);
    else
      t->args.reserved = fuzz_read_no_enumerator(t->trial.reader, 0, 0);
    break;
  case 7:
    t->given[0] = fuzz_trial_struct(&t->trial, &t->args, sizeof t->args, true);
    t->given[1] = t->given[0];
    break;
  default:
    fuzz_spoil_rules(&t->trial, &t->rules);
    return;
  }
  fuzz_trial_refuse(&t->trial, certain);
}

/* On the way back some of what is wrong is not looked at. */
static void spoil_way_back(fuzz_forward *t) {
  if (fuzz_read_one_in(t->trial.reader, 2)) {
    fuzz_spoil_back(t);
    return;
  }
  spoil(t);
  if (t->trial.expect == FUZZ_FAILURE)
    t->trial.expect = FUZZ_ANYTHING;
}

/* ---- the call ---- */

static const fuzz_way ways[] = {FUZZ_FORWARD,        FUZZ_BACK,           FUZZ_FORWARD,
                                FUZZ_BACK_WITH_TAPE, FUZZ_BACK_WITH_TAPE, FUZZ_FORWARD_WITH_TAPE};

/* Scratch for it, or for a larger one, beforehand: it then allocates nothing. */
static void reserve(fuzz_forward *t) {
  const mha_forward_args *a = &t->args;
  mha_shape shape;
  MHA_INIT(&shape);
  shape.packed = t->rules.to.packed;
  shape.cached = t->cache != NULL;
  shape.cache_type = t->cache ? t->cache->sizes.type : MHA_F32;
  shape.cache_page_tokens = t->cache ? t->cache->sizes.page_tokens : 0;
  shape.batch = a->batch;
  shape.query_length = a->query_length > t->rows || !t->cache ? a->query_length : t->rows;
  shape.key_length = t->cache ? t->cache->sizes.capacity : t->rows;
  fuzz_enlarge_shape(&t->trial, &shape);
  if (t->cache && t->way != FUZZ_FORWARD)
    return;
  shape.backward = t->way == FUZZ_BACK             ? MHA_BACKWARD_ALONE
                   : t->way == FUZZ_BACK_WITH_TAPE ? MHA_BACKWARD_WITH_TAPE
                                                   : MHA_BACKWARD_NONE;
  FUZZ_CHECK(mha_context_reserve(t->trial.session->context, t->layer->weights, &shape, NULL) ==
             MHA_OK);
  if (t->tapes[0])
    FUZZ_CHECK(mha_tape_reserve(t->tapes[0], t->layer->weights, &shape, NULL) == MHA_OK);
  t->trial.no_allocation = true;
}

static void finish(fuzz_forward *t) {
  fuzz_finish_rules(&t->trial, &t->rules);
  if (t->given[0])
    return;
  for (int run = 0; run < 2; run++) {
    mha_forward_args a = t->args;
    a.rules = t->rules.given[run];
    a.results = t->rules.wanted[run];
    if (t->cache && run == 1 && !t->no_twin)
      a.cache = t->cache->twin;
    a.tape = fuzz_goes_back(t) ? NULL : t->tapes[run];
    t->given[run] = fuzz_trial_struct(&t->trial, &a, sizeof a, false);
  }
}

void fuzz_try_forward(fuzz_session *session) {
  fuzz_forward t = {.layer = NULL};
  t.layer = &session->layers[fuzz_read(session->reader, 0, FUZZ_N_LAYERS - 1)];
  if (!t.layer->weights)
    return;
  t.weights = t.layer->weights;
  fuzz_trial_begin(&t.trial, session);
  t.way = ways[t.trial.left % (int64_t)(sizeof ways / sizeof *ways)];
  t.trial.make = forward;
  MHA_INIT(&t.args);
  choose_cache(&t);
  choose_sizes(&t);
  choose_arrays(&t);
  choose_entries(&t);
  choose_rules(&t);
  choose_all_positions(&t);
  hide_rows(&t);
  if (fuzz_goes_back(&t))
    fuzz_choose_back(&t);
  if (t.way == FUZZ_FORWARD_WITH_TAPE)
    fuzz_choose_tapes(&t);
  if (t.trial.hostile && fuzz_goes_back(&t))
    spoil_way_back(&t);
  else if (t.trial.hostile)
    spoil(&t);
  else if (fuzz_read_one_in(t.trial.reader, 4))
    reserve(&t);
  finish(&t);
  if (fuzz_goes_back(&t))
    fuzz_finish_back(&t);
  (void)fuzz_trial_run(&t.trial);
  fuzz_end_tapes(&t);
}

/* ---- the article's call ---- */

typedef struct self_trial {
  fuzz_trial trial; /* first */
  const mha_weights *weights;
  const float *x;
  int64_t batch, length;
  float *output;
  bool no_context;
} self_trial;

static mha_status attend_to_itself(fuzz_trial *trial, mha_context *context, bool again,
                                   mha_error *error) {
  const self_trial *t = (const self_trial *)trial;
  (void)again;
  return mha_self_attention(t->no_context ? NULL : context, t->weights, t->x, t->batch, t->length,
                            t->output, error);
}

static void spoil_self(self_trial *t) {
  fuzz_reader *r = t->trial.reader;
  const bool empty = t->batch == 0 || t->length == 0;
  const int64_t kind = fuzz_read(r, 0, 6);
  bool certain = !empty;
  if (kind == 0) {
    t->no_context = certain = true;
  } else if (kind == 1) {
    t->weights = NULL;
    certain = true;
  } else if (kind == 2) {
    t->x = NULL;
  } else if (kind == 3) {
    t->output = NULL;
  } else if (kind == 4) {
    t->output = (float *)(uintptr_t)t->x;
  } else {
    int64_t *size = kind == 5 ? &t->batch : &t->length;
    *size = fuzz_read_no_size(r);
    if (empty && *size > 0)
      *size = -*size;
    certain = true;
  }
  fuzz_trial_refuse(&t->trial, certain);
}

void fuzz_try_self_attention(fuzz_session *session) {
  const fuzz_layer *layer = &session->layers[fuzz_read(session->reader, 0, FUZZ_N_LAYERS - 1)];
  self_trial t = {.weights = layer->weights};
  const mha_config *c = &layer->config;
  if (!layer->weights)
    return;
  fuzz_trial_begin(&t.trial, session);
  fuzz_reader *r = t.trial.reader;
  t.trial.make = attend_to_itself;
  t.batch = fuzz_read(r, 0, 3);
  t.length = choose_length(r);
  float *x = fuzz_pool_floats(&t.trial.pool, t.batch * t.length * c->query_width);
  fuzz_read_floats(r, x, t.batch * t.length * c->query_width);
  t.x = x;
  const int64_t n = t.batch * t.length * c->output_width;
  t.output = fuzz_pool_output(&t.trial.pool, n, FUZZ_BOTH_RUNS, true);
  fuzz_pool_allow(&t.trial.pool, t.output, (size_t)n * sizeof *t.output);
  const bool has_positions = !c->rope_cos || t.length <= c->rope_positions || t.batch == 0;
  if (c->key_width != c->query_width || c->value_width != c->key_width || !has_positions)
    t.trial.expect = FUZZ_FAILURE;
  if (t.trial.hostile)
    spoil_self(&t);
  (void)fuzz_trial_run(&t.trial);
}
