/* Owns caches: their making with a twin, what their entries must hold, and the calls that change
 * them without a layer. */
#include "session.h"
#include "tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int64_t lesser(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static int64_t greater(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* ---- what a cache must hold ---- */

static size_t row_bytes(const mha_tensor *t) {
  return mha_element_bytes(t->element, t->heads * t->size);
}

static size_t all_bytes(const mha_tensor *t) {
  return (size_t)(t->batch * t->length) * row_bytes(t);
}

static void view(const mha_cache *cache, mha_tensor *k, mha_tensor *v) {
  FUZZ_CHECK(mha_cache_view(cache, k, v, NULL) == MHA_OK);
}

static void remember(fuzz_cache *c) {
  mha_tensor k;
  mha_tensor v;
  view(c->cache, &k, &v);
  memcpy(c->keys_before, k.data, all_bytes(&k));
  memcpy(c->values_before, v.data, all_bytes(&v));
  memcpy(c->next_lengths, c->lengths, sizeof c->lengths);
  memcpy(c->next_highest, c->highest, sizeof c->highest);
  memset(c->touched, 0, sizeof c->touched);
}

void fuzz_caches_remember(fuzz_session *session) {
  for (int i = 0; i < FUZZ_N_CACHES; i++)
    if (session->caches[i].cache)
      remember(&session->caches[i]);
}

static void check_lengths(const mha_cache *cache, const int64_t *expected, int64_t n_entries) {
  for (int64_t e = 0; e < n_entries; e++) {
    int64_t length = -1;
    FUZZ_CHECK(mha_cache_length(cache, e, &length, NULL) == MHA_OK);
    FUZZ_CHECK(length == expected[e]);
  }
}

/* Every token lies in the memory, and two entries share a row of a page or none. */
static void check_places(const fuzz_cache *c, const mha_tensor *t) {
  int64_t n_free = -1;
  FUZZ_CHECK(mha_cache_page_count(c->cache, 0, NULL, NULL, NULL, &n_free, NULL) == MHA_OK);
  FUZZ_CHECK(n_free >= 0 && n_free <= c->sizes.n_pages);
  for (int64_t e = 0; e < c->sizes.n_entries; e++)
    for (int64_t i = 0; i < c->lengths[e]; i++) {
      int64_t row = -1;
      const mha_status status = mha_cache_row(c->cache, e, i, &row, NULL);
      FUZZ_CHECK(status == MHA_OK || (c->sizes.window > 0 && status == MHA_ERROR_LENGTH));
      FUZZ_CHECK(status || (row >= 0 && row < t->batch * t->length));
    }
}

/* Tokens are as they were: what is in pages that nobody has does not matter. */
static void check_tokens(const fuzz_cache *c, const mha_tensor *now, const char *before) {
  for (int64_t e = 0; e < c->sizes.n_entries; e++)
    for (int64_t i = 0; i < c->lengths[e]; i++) {
      int64_t row = -1;
      if (mha_cache_row(c->cache, e, i, &row, NULL))
        continue; /* a ring has dropped it */
      const size_t at = (size_t)row * row_bytes(now);
      FUZZ_CHECK(memcmp((const char *)now->data + at, before + at, row_bytes(now)) == 0);
    }
}

/* Rows that are not touched are as they were. */
static void check_rows(const fuzz_cache *c, const mha_tensor *now, const char *before) {
  if (c->sizes.page_tokens > 0)
    return; /* entries have no rows of their own */
  for (int64_t e = 0; e < now->batch; e++)
    for (int64_t i = 0; i < now->length; i++) {
      const size_t at = (size_t)(e * now->length + i) * row_bytes(now);
      if (!c->touched[e][i])
        FUZZ_CHECK(memcmp((const char *)now->data + at, before + at, row_bytes(now)) == 0);
    }
}

void fuzz_caches_check_untouched(fuzz_session *session) {
  for (int i = 0; i < FUZZ_N_CACHES; i++) {
    fuzz_cache *c = &session->caches[i];
    mha_tensor k;
    mha_tensor v;
    if (!c->cache)
      continue;
    view(c->cache, &k, &v);
    check_lengths(c->cache, c->lengths, c->sizes.n_entries);
    check_places(c, &k);
    check_tokens(c, &k, c->keys_before);
    check_tokens(c, &v, c->values_before);
    if (c->sizes.page_tokens > 0)
      continue;
    FUZZ_CHECK(memcmp(k.data, c->keys_before, all_bytes(&k)) == 0);
    FUZZ_CHECK(memcmp(v.data, c->values_before, all_bytes(&v)) == 0);
  }
}

static void check_changed(fuzz_cache *c) {
  mha_tensor k[2];
  mha_tensor v[2];
  view(c->cache, &k[0], &v[0]);
  view(c->twin, &k[1], &v[1]);
  memcpy(c->lengths, c->next_lengths, sizeof c->lengths);
  memcpy(c->highest, c->next_highest, sizeof c->highest);
  check_lengths(c->cache, c->lengths, c->sizes.n_entries);
  check_lengths(c->twin, c->lengths, c->sizes.n_entries);
  check_places(c, &k[0]);
  check_rows(c, &k[0], c->keys_before);
  check_rows(c, &v[0], c->values_before);
  FUZZ_CHECK(memcmp(k[0].data, k[1].data, all_bytes(&k[0])) == 0);
  FUZZ_CHECK(memcmp(v[0].data, v[1].data, all_bytes(&v[0])) == 0);
}

void fuzz_caches_check_changed(fuzz_session *session) {
  for (int i = 0; i < FUZZ_N_CACHES; i++)
    if (session->caches[i].cache)
      check_changed(&session->caches[i]);
}

static void expect_append(fuzz_cache *cache, int64_t entry, int64_t n) {
  const int64_t capacity = cache->sizes.capacity;
  for (int64_t i = 0; i < n; i++)
    cache->touched[entry][(cache->lengths[entry] + i) % capacity] = true;
  cache->next_lengths[entry] = cache->lengths[entry] + n;
  cache->next_highest[entry] = greater(cache->highest[entry], cache->next_lengths[entry]);
}

static bool has_room(const fuzz_cache *cache, int64_t entry, int64_t n) {
  const mha_cache_options *o = &cache->sizes;
  return o->window > 0 ? n <= o->capacity - o->window - o->rollback + 1
                       : cache->lengths[entry] + n <= o->capacity;
}

/* ---- making one ---- */

typedef struct cache_trial {
  fuzz_trial trial; /* first */
  const mha_cache_options *options;
  mha_cache *made[2];
  bool no_handle, no_options;
} cache_trial;

static mha_status make_cache(fuzz_trial *trial, mha_context *context, bool again,
                             mha_error *error) {
  cache_trial *t = (cache_trial *)trial;
  mha_cache **made = &t->made[again];
  (void)context;
  *made = (mha_cache *)trial; /* to be overwritten */
  const mha_status status = mha_cache_create(t->options, t->no_handle ? NULL : made, error);
  FUZZ_CHECK(t->no_handle || (status == MHA_OK) == (*made != NULL));
  if (status || t->no_handle)
    *made = NULL;
  return status;
}

/* Mostly what a layer needs. */
static void choose_sizes(fuzz_trial *t, mha_cache_options *o) {
  fuzz_reader *r = t->reader;
  const fuzz_layer *layer = &t->session->layers[fuzz_read(r, 0, FUZZ_N_LAYERS - 1)];
  o->n_entries = fuzz_read(r, 1, FUZZ_MOST_ENTRIES);
  o->capacity = fuzz_read(r, 8, FUZZ_MOST_CAPACITY);
  o->n_kv_heads = 2;
  o->head_size = o->value_head_size = 3;
  if (layer->weights && !fuzz_read_one_in(r, 8)) {
    o->n_kv_heads = layer->config.n_kv_heads;
    o->head_size = layer->config.head_size;
    o->value_head_size = layer->config.value_head_size;
    if (fuzz_read_one_in(r, 3))
      o->weights = layer->weights;
  }
  if (fuzz_read_one_in(r, 2)) {
    o->window = fuzz_read(r, 1, o->capacity - 4);
    o->rollback = fuzz_read(r, 0, lesser(o->capacity - o->window, 4));
  }
}

/* Takes back what is derived. */
static void leave_out(fuzz_reader *r, mha_cache_options *o) {
  if ((o->weights || o->value_head_size == o->head_size) && fuzz_read_one_in(r, 2))
    o->value_head_size = 0;
  if (o->weights && fuzz_read_one_in(r, 2))
    o->n_kv_heads = o->head_size = 0;
}

static void spoil_options(cache_trial *t, mha_cache_options *o) {
  fuzz_reader *r = t->trial.reader;
  int64_t *sizes[] = {&o->n_entries,       &o->capacity, &o->n_kv_heads, &o->head_size,
                      &o->value_head_size, &o->window,   &o->rollback};
  const int64_t kind = fuzz_read(r, 0, 9);
  fuzz_trial_refuse(&t->trial, true);
  if (kind < 7)
    *sizes[kind] =
        kind < (o->weights ? 2 : 4) && (kind != 1 || o->page_tokens == 0) && fuzz_read_one_in(r, 3)
            ? 0
            : fuzz_read_no_size(r);
  else if (kind == 7)
    t->options = fuzz_trial_struct(&t->trial, o, sizeof *o, true);
  else if (kind == 8)
    t->no_options = true;
  else
    t->no_handle = true;
}

static void keep_cache(cache_trial *t, fuzz_cache *c, const mha_cache_options *sizes) {
  mha_tensor k;
  mha_tensor v;
  fuzz_end_cache(c);
  memset(c->lengths, 0, sizeof c->lengths);
  memset(c->highest, 0, sizeof c->highest);
  c->cache = t->made[0];
  c->twin = t->made[1];
  c->sizes = *sizes;
  c->sizes.weights = NULL;
  view(c->cache, &k, &v);
  FUZZ_CHECK(k.batch == (sizes->n_pages ? sizes->n_pages : sizes->n_entries));
  FUZZ_CHECK(k.length == (sizes->page_tokens ? sizes->page_tokens : sizes->capacity));
  FUZZ_CHECK(k.heads == sizes->n_kv_heads && v.heads == k.heads);
  FUZZ_CHECK(k.size == sizes->head_size && v.size == sizes->value_head_size);
  FUZZ_CHECK(k.element == sizes->type && v.element == sizes->type);
  c->keys_before = malloc(all_bytes(&k));
  c->values_before = malloc(all_bytes(&v));
  FUZZ_CHECK(c->keys_before && c->values_before);
}

void fuzz_make_cache(fuzz_session *session) {
  cache_trial t = {.options = NULL};
  mha_cache_options o;
  fuzz_trial_begin(&t.trial, session);
  fuzz_reader *r = t.trial.reader;
  t.trial.make = make_cache;
  MHA_INIT(&o);
  choose_sizes(&t.trial, &o);
  /* from what is read already: the inputs there are keep their meaning */
  o.type = (int32_t)((o.capacity + o.n_entries) % (MHA_BF16 + 1));
  if ((o.capacity + 2 * o.n_entries) % 3 == 0) { /* so many that none is wanting */
    o.page_tokens = 16;
    o.n_pages = 2 * o.n_entries * ((o.capacity + 15) / 16);
  }
  const mha_cache_options sizes = o;
  leave_out(r, &o);
  const mha_allocator home = session->home.mha;
  o.allocator = &home;
  if (t.trial.hostile)
    spoil_options(&t, &o);
  if (!t.options && !t.no_options)
    t.options = fuzz_trial_struct(&t.trial, &o, sizeof o, false);
  if (fuzz_trial_run(&t.trial) == MHA_OK)
    keep_cache(&t, &session->caches[fuzz_read(r, 0, FUZZ_N_CACHES - 1)], &sizes);
}

void fuzz_end_cache(fuzz_cache *cache) {
  mha_cache_destroy(cache->cache);
  mha_cache_destroy(cache->twin);
  free(cache->keys_before);
  free(cache->values_before);
  cache->cache = cache->twin = NULL;
  cache->keys_before = cache->values_before = NULL;
}

fuzz_cache *fuzz_choose_cache(fuzz_session *session) {
  const int64_t first = fuzz_read(session->reader, 0, FUZZ_N_CACHES - 1);
  for (int64_t i = 0; i < FUZZ_N_CACHES; i++) {
    fuzz_cache *c = &session->caches[(first + i) % FUZZ_N_CACHES];
    if (c->cache)
      return c;
  }
  return NULL;
}

/* ---- entries ---- */

typedef enum entry_kind { TRUNCATE, RESET, COPY, LENGTH, VIEW, N_KINDS } entry_kind;

typedef struct entry_trial {
  fuzz_trial trial; /* first */
  const fuzz_cache *cache;
  entry_kind kind;
  int64_t entry, to, length;
  int64_t *length_into;
  mha_tensor *k, *v;
  bool no_cache;
} entry_trial;

static mha_status change_entry(fuzz_trial *trial, mha_context *context, bool again,
                               mha_error *error) {
  const entry_trial *t = (const entry_trial *)trial;
  mha_cache *cache = t->no_cache ? NULL : again ? t->cache->twin : t->cache->cache;
  (void)context;
  switch (t->kind) {
  case TRUNCATE:
    return mha_cache_truncate(cache, t->entry, t->length, error);
  case RESET:
    return mha_cache_reset(cache, t->entry, error);
  case COPY:
    return mha_cache_copy_entry(cache, t->entry, t->to, error);
  case LENGTH:
    return mha_cache_length(cache, t->entry, t->length_into, error);
  default: /* what is shown of the twin lies elsewhere */
    return mha_cache_view(t->no_cache ? NULL : t->cache->cache, t->k, t->v, error);
  }
}

/* Results of `bytes` bytes. */
static void *choose_result(entry_trial *t, size_t bytes) {
  void *data = fuzz_pool_integers(&t->trial.pool, (int64_t)(bytes / sizeof(int64_t)));
  t->trial.pool.first->runs = FUZZ_BOTH_RUNS;
  fuzz_pool_allow(&t->trial.pool, data, bytes);
  return data;
}

static void expect_truncation(entry_trial *t, fuzz_cache *c) {
  const int64_t lowest =
      c->sizes.window > 0 ? greater(c->highest[t->entry] - c->sizes.rollback, 0) : 0;
  t->length = fuzz_read(t->trial.reader, 0, c->lengths[t->entry]);
  if (t->length < lowest)
    t->trial.expect = FUZZ_FAILURE;
  else
    c->next_lengths[t->entry] = t->length;
}

static void expect_copy(const entry_trial *t, fuzz_cache *c) {
  c->next_lengths[t->to] = c->lengths[t->entry];
  c->next_highest[t->to] = c->highest[t->entry];
  for (int64_t i = 0; t->to != t->entry && i < c->sizes.capacity; i++)
    c->touched[t->to][i] = true;
}

static void expect_entry(entry_trial *t, fuzz_cache *c) {
  switch (t->kind) {
  case TRUNCATE:
    expect_truncation(t, c);
    break;
  case RESET:
    c->next_lengths[t->entry] = c->next_highest[t->entry] = 0;
    break;
  case COPY:
    expect_copy(t, c);
    break;
  case LENGTH:
    t->length_into = choose_result(t, sizeof *t->length_into);
    break;
  default:
    t->k = choose_result(t, sizeof *t->k);
    t->v = choose_result(t, sizeof *t->v);
  }
}

static void spoil_entry(entry_trial *t, const fuzz_cache *c) {
  fuzz_reader *r = t->trial.reader;
  const int64_t kind = fuzz_read(r, 0, 3);
  fuzz_trial_refuse(&t->trial, true);
  if (kind == 0) {
    t->no_cache = true;
  } else if (t->kind == VIEW || (t->kind == LENGTH && kind == 1)) {
    t->k = NULL;
    t->length_into = NULL;
  } else if (t->kind == TRUNCATE && kind == 1) {
    t->length = fuzz_read_one_in(r, 2) ? c->lengths[t->entry] + 1 : fuzz_read_no_size(r);
  } else if (t->kind == COPY && kind == 1) {
    t->to = fuzz_read_one_in(r, 2) ? c->sizes.n_entries : fuzz_read_no_size(r);
  } else {
    t->entry = fuzz_read_one_in(r, 2) ? c->sizes.n_entries : fuzz_read_no_size(r);
  }
}

static void try_entry(fuzz_session *session, fuzz_cache *c) {
  entry_trial t = {.cache = c};
  fuzz_trial_begin(&t.trial, session);
  fuzz_reader *r = t.trial.reader;
  t.trial.make = change_entry;
  t.kind = (entry_kind)fuzz_read(r, 0, N_KINDS - 1);
  t.entry = fuzz_read(r, 0, c->sizes.n_entries - 1);
  t.to = fuzz_read(r, 0, c->sizes.n_entries - 1);
  expect_entry(&t, c);
  if (t.trial.hostile)
    spoil_entry(&t, c);
  (void)fuzz_trial_run(&t.trial);
}

/* Several in a row, since what one leaves behind shows in the next. */
void fuzz_try_cache_entry(fuzz_session *session) {
  fuzz_cache *cache = fuzz_choose_cache(session);
  for (int64_t n = fuzz_read(session->reader, 1, 6); cache && n > 0; n--)
    try_entry(session, cache);
}

/* ---- ready rows ---- */

typedef struct append_trial {
  fuzz_trial trial; /* first */
  fuzz_cache *cache;
  mha_tensor k, v;
  const int64_t *entries, *counts;
  bool no_cache, no_k, no_v;
  bool no_twin; /* both runs use the cache itself */
} append_trial;

static mha_status append(fuzz_trial *trial, mha_context *context, bool again, mha_error *error) {
  const append_trial *t = (const append_trial *)trial;
  mha_cache *cache = t->no_cache ? NULL : again && !t->no_twin ? t->cache->twin : t->cache->cache;
  (void)context;
  return mha_cache_append(cache, t->no_k ? NULL : &t->k, t->no_v ? NULL : &t->v, t->entries,
                          t->counts, error);
}

/* Makes k or v point into the cache. */
static void point_into_cache(append_trial *t) {
  mha_tensor k;
  mha_tensor v;
  view(t->cache->cache, &k, &v);
  const bool nothing = t->k.batch == 0 || t->k.length == 0;
  t->no_twin = true;
  if (fuzz_read_one_in(t->trial.reader, 2))
    t->k.data = v.data;
  else
    t->v.data = k.data;
  fuzz_trial_refuse(&t->trial, !nothing);
}

static void spoil_append(append_trial *t, int64_t *entries, int64_t *counts) {
  fuzz_reader *r = t->trial.reader;
  const int64_t B = t->k.batch;
  const int64_t kind = fuzz_read(r, 0, 6);
  if (kind == 0) {
    t->no_cache = true;
    fuzz_trial_refuse(&t->trial, true);
  } else if (kind == 1) {
    t->no_k = true;
    t->no_v = fuzz_read_one_in(r, 2);
    fuzz_trial_refuse(&t->trial, true);
  } else if (kind == 2 && entries && B > 0) {
    entries[fuzz_read(r, 0, B - 1)] =
        fuzz_read_one_in(r, 2) ? t->cache->sizes.n_entries : fuzz_read_no_size(r);
    fuzz_trial_refuse(&t->trial, true);
  } else if (kind == 3 && counts && B > 0) {
    counts[fuzz_read(r, 0, B - 1)] =
        fuzz_read_one_in(r, 2) ? t->k.length + 1 : fuzz_read_no_size(r);
    fuzz_trial_refuse(&t->trial, true);
  } else if (kind == 4) {
    point_into_cache(t);
  } else {
    fuzz_spoil_tensor(&t->trial, fuzz_read_one_in(r, 2) ? &t->v : &t->k);
  }
}

int64_t *fuzz_choose_entries(fuzz_trial *trial, fuzz_cache *cache, int64_t B, bool distinct) {
  fuzz_reader *r = trial->reader;
  if (B <= cache->sizes.n_entries && !fuzz_read_one_in(r, 2))
    return NULL;
  int64_t *entries = fuzz_pool_integers(&trial->pool, B);
  const int64_t first = fuzz_read(r, 0, cache->sizes.n_entries - 1);
  for (int64_t b = 0; b < B; b++)
    entries[b] = distinct ? (first + b) % cache->sizes.n_entries
                          : fuzz_read(r, 0, cache->sizes.n_entries - 1);
  return entries;
}

int64_t *fuzz_choose_counts(fuzz_trial *trial, int64_t B, int64_t most) {
  if (!fuzz_read_one_in(trial->reader, 3))
    return NULL;
  int64_t *counts = fuzz_pool_integers(&trial->pool, B);
  for (int64_t b = 0; b < B; b++)
    counts[b] = fuzz_read(trial->reader, 0, most);
  return counts;
}

void fuzz_cache_expect_appends(fuzz_trial *trial, fuzz_cache *cache, int64_t B, int64_t rows,
                               const int64_t *entries, const int64_t *counts) {
  for (int64_t b = 0; b < B; b++) {
    const int64_t entry = entries ? entries[b] : b;
    const int64_t n = counts ? counts[b] : rows;
    if (!has_room(cache, entry, n)) {
      trial->expect = FUZZ_FAILURE;
      return;
    }
    expect_append(cache, entry, n);
  }
}

void fuzz_try_cache_append(fuzz_session *session) {
  fuzz_cache *c = fuzz_choose_cache(session);
  append_trial t = {.cache = c};
  if (!c)
    return;
  fuzz_trial_begin(&t.trial, session);
  fuzz_reader *r = t.trial.reader;
  const mha_cache_options *o = &c->sizes;
  const int64_t B = fuzz_read(r, 0, o->n_entries);
  const int64_t n = fuzz_read(r, 0, fuzz_read_one_in(r, 4) ? 40 : 7);
  t.trial.make = append;
  t.k = fuzz_choose_tensor(&t.trial, B, n, o->n_kv_heads, o->head_size);
  t.v = fuzz_choose_tensor(&t.trial, B, n, o->n_kv_heads, o->value_head_size);
  int64_t *entries = fuzz_choose_entries(&t.trial, c, B, true);
  int64_t *counts = fuzz_choose_counts(&t.trial, B, n);
  t.entries = entries;
  t.counts = counts;
  fuzz_cache_expect_appends(&t.trial, c, B, n, entries, counts);
  fuzz_hide_rows(&t.trial, &t.k, counts);
  fuzz_hide_rows(&t.trial, &t.v, counts);
  if (t.trial.hostile)
    spoil_append(&t, entries, counts);
  (void)fuzz_trial_run(&t.trial);
}
