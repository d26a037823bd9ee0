/* Owns the model of a cache. */
#include "cache_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A row has one head; blocks of MHA_Q8_0 want 32 numbers. */
enum { G = 1, D = 4, MOST_D = 32 };

static int64_t head_size(int32_t type) {
  return type == MHA_Q8_0 ? MOST_D : D;
}

static int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* ---- Opening --------------------------------------------------------------------------------- */

mha_cache_options model_options(const model_plan *plan) {
  mha_cache_options o;
  MHA_INIT(&o);
  o.n_entries = MODEL_ENTRIES;
  o.capacity = plan->capacity;
  o.n_kv_heads = G;
  o.head_size = head_size(plan->type);
  o.window = plan->window;
  o.rollback = plan->rollback;
  o.type = plan->type;
  o.page_tokens = plan->T;
  o.n_pages = plan->n_pages;
  return o;
}

void model_open(cache_model *m, const model_plan *plan) {
  mha_cache_options o = model_options(plan);
  mha_error error;
  memset(m, 0, sizeof *m);
  test_allocator_init(&m->allocator);
  o.allocator = &m->allocator.mha;
  m->capacity = plan->capacity ? plan->capacity : plan->T * plan->n_pages;
  m->T = plan->T ? plan->T : m->capacity;
  m->n_pages = plan->n_pages;
  m->window = plan->window;
  m->rollback = plan->rollback;
  m->type = plan->type;
  assert_in_range(m->capacity, 1, MODEL_TOKENS);
  for (int e = 0; e < MODEL_ENTRIES; e++)
    for (int s = 0; s < MODEL_SLOTS; s++)
      m->page[e][s] = -1;
  test_expect(mha_cache_create(&o, &m->cache, &error), MHA_OK, &error);
}

void model_close(cache_model *m) {
  model_check(m);
  mha_cache_destroy(m->cache);
  test_allocator_check(&m->allocator);
}

/* ---- Tokens ---------------------------------------------------------------------------------- */

/* Small integers, which every type holds, also in a block with 127, whose scale is 1. Those behind
 * it are the digits of the token's number. */
static float number_of(int64_t token, int64_t c, bool value) {
  int64_t digits = token;
  for (int64_t k = 1; k < c && k < D - 1; k++)
    digits /= 251;
  const float number = c == 0 ? 127 : (float)((digits + (c < D ? 0 : c)) % 251 - 125);
  return value ? -number : number;
}

static int64_t row_of(const cache_model *m, int64_t t) {
  return m->window > 0 ? t % m->capacity : t;
}

static int64_t first_token(const cache_model *m, int64_t e) {
  return larger(m->dropped[e], m->window > 0 ? m->highest[e] - m->capacity : 0);
}

int64_t model_largest_chunk(const cache_model *m) {
  return m->window > 0 ? m->capacity - m->window - m->rollback + 1 : m->capacity;
}

int64_t model_lowest_length(const cache_model *m, int64_t e) {
  if (m->window == 0)
    return 0;
  return larger(larger(m->highest[e] - m->rollback, 0),
                m->dropped[e] > 0 ? m->dropped[e] + m->window - 1 : 0);
}

/* ---- Pages ----------------------------------------------------------------------------------- */

static int64_t slot_count(const cache_model *m) {
  return m->n_pages > 0 ? (m->capacity + m->T - 1) / m->T : 0;
}

static void leave_page(cache_model *m, int64_t e, int64_t slot) {
  const int64_t page = m->page[e][slot];
  if (page >= 0)
    m->users[page]--;
  m->page[e][slot] = -1;
}

static void take_page(cache_model *m, int64_t e, int64_t slot) {
  int64_t page = 0;
  leave_page(m, e, slot);
  while (page < MODEL_PAGES && m->users[page] > 0)
    page++;
  assert_true(page < MODEL_PAGES);
  m->users[page] = 1;
  m->place[page] = -1;
  m->page[e][slot] = page;
}

static int64_t pages_in_use(const cache_model *m) {
  int64_t n = 0;
  for (int page = 0; page < MODEL_PAGES; page++)
    n += m->users[page] > 0;
  return n;
}

/* Slots that n tokens behind `length` lie in. */
static void mark_slots(const cache_model *m, int64_t length, int64_t n, bool marked[MODEL_SLOTS]) {
  memset(marked, 0, MODEL_SLOTS * sizeof *marked);
  for (int64_t t = length; m->n_pages > 0 && t < length + n; t++)
    marked[row_of(m, t) / m->T] = true;
}

static bool must_take(const cache_model *m, int64_t e, int64_t slot) {
  return m->page[e][slot] < 0 || m->users[m->page[e][slot]] > 1;
}

static int64_t pages_wanted(const cache_model *m, int64_t e, int64_t n) {
  bool marked[MODEL_SLOTS];
  int64_t wanted = 0;
  mark_slots(m, m->length[e], n, marked);
  for (int64_t slot = 0; slot < slot_count(m); slot++)
    wanted += marked[slot] && must_take(m, e, slot);
  return wanted;
}

/* ---- Comparing ------------------------------------------------------------------------------- */

static void check_row(const mha_tensor *t, int64_t row, int64_t token, bool value) {
  float numbers[G * MOST_D];
  const int64_t n = t->heads * t->size;
  const char *at = (const char *)t->data + row * (int64_t)mha_element_bytes(t->element, n);
  mha_error error;
  assert_in_range(n, 1, G * MOST_D);
  test_expect(mha_element_convert(t->element, at, MHA_F32, numbers, n, &error), MHA_OK, &error);
  for (int64_t c = 0; c < n; c++)
    if (numbers[c] != number_of(token, c, value))
      test_failed("row %lld has %g, expected %g of token %lld", (long long)row, (double)numbers[c],
                  (double)number_of(token, c, value), (long long)token);
}

/* A page of the model is one place in the cache, as long as anybody has it. */
static void check_place(cache_model *m, int64_t e, int64_t t, int64_t row) {
  const int64_t own = row_of(m, t);
  if (m->n_pages == 0) {
    assert_int_equal(row, e * m->capacity + own);
    return;
  }
  const int64_t page = m->page[e][own / m->T];
  assert_int_equal(row % m->T, own % m->T);
  assert_in_range(row / m->T, 0, m->n_pages - 1);
  assert_in_range(page, 0, MODEL_PAGES - 1);
  if (m->place[page] < 0) {
    for (int other = 0; other < MODEL_PAGES; other++)
      if (m->users[other] > 0 && m->place[other] == row / m->T)
        test_failed("page %lld of the cache is used twice", (long long)(row / m->T));
    m->place[page] = row / m->T;
  }
  assert_int_equal(m->place[page], row / m->T);
}

static void check_entry(cache_model *m, int64_t e) {
  mha_tensor k, v;
  mha_error error;
  int64_t length = -1;
  test_expect(mha_cache_view(m->cache, &k, &v, &error), MHA_OK, &error);
  test_expect(mha_cache_length(m->cache, e, &length, &error), MHA_OK, &error);
  assert_int_equal(length, m->length[e]);
  const int64_t first = first_token(m, e);
  for (int64_t t = first; t < m->length[e]; t++) {
    int64_t row = -1;
    test_expect(mha_cache_row(m->cache, e, t, &row, &error), MHA_OK, &error);
    check_place(m, e, t, row);
    check_row(&k, row, m->token[e][row_of(m, t)], false);
    check_row(&v, row, m->token[e][row_of(m, t)], true);
  }
  int64_t row = -1;
  test_expect(mha_cache_row(m->cache, e, first - 1, &row, &error), MHA_ERROR_LENGTH, &error);
  test_expect(mha_cache_row(m->cache, e, length, &row, &error), MHA_ERROR_LENGTH, &error);
}

static void check_free(const cache_model *m) {
  int64_t n_free = -1;
  mha_error error;
  test_expect(mha_cache_page_count(m->cache, 0, NULL, NULL, NULL, &n_free, &error), MHA_OK, &error);
  assert_int_equal(n_free, m->n_pages - pages_in_use(m));
}

void model_check(cache_model *m) {
  for (int64_t e = 0; e < MODEL_ENTRIES; e++)
    check_entry(m, e);
  check_free(m);
}

/* ---- Appending ------------------------------------------------------------------------------- */

/* [n][longest][width] */
static float *make_rows(const int64_t *counts, int64_t n, int64_t longest, int64_t width,
                        int64_t first, bool value) {
  float *rows = test_allocate((size_t)(n * longest * width), sizeof *rows);
  test_fill_poison(rows, n * longest * width);
  for (int64_t b = 0; b < n; b++)
    for (int64_t i = 0; i < counts[b]; i++, first++)
      for (int64_t c = 0; c < width; c++)
        rows[(b * longest + i) * width + c] = number_of(first, c, value);
  return rows;
}

static mha_status append(cache_model *m, int64_t n, const int64_t *entries, const int64_t *counts,
                         mha_error *error) {
  const int64_t d = head_size(m->type);
  int64_t longest = 0;
  for (int64_t b = 0; b < n; b++)
    longest = larger(longest, counts[b]);
  float *k = make_rows(counts, n, longest, G * d, m->next, false);
  float *v = make_rows(counts, n, longest, G * d, m->next, true);
  const mha_tensor keys = {k, n, longest, G, d, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor values = {v, n, longest, G, d, 0, 0, 0, 0, MHA_F32, 0};
  const mha_status status = mha_cache_append(m->cache, &keys, &values, entries, counts, error);
  free(k);
  free(v);
  return status;
}

static void take_tokens(cache_model *m, int64_t e, int64_t n) {
  bool marked[MODEL_SLOTS];
  mark_slots(m, m->length[e], n, marked);
  for (int64_t slot = 0; slot < slot_count(m); slot++)
    if (marked[slot] && must_take(m, e, slot))
      take_page(m, e, slot);
  for (int64_t i = 0; i < n; i++, m->next++)
    m->token[e][row_of(m, m->length[e] + i)] = m->next;
  m->length[e] += n;
  m->highest[e] = larger(m->highest[e], m->length[e]);
}

/* A page that several entries leave in one call is left by all of them. */
static void take_all(cache_model *m, int64_t n, const int64_t *entries, const int64_t *counts) {
  bool marked[3][MODEL_SLOTS];
  assert_in_range(n, 1, 3);
  for (int64_t b = 0; b < n; b++) {
    mark_slots(m, m->length[entries[b]], counts[b], marked[b]);
    for (int64_t slot = 0; slot < slot_count(m); slot++)
      marked[b][slot] = marked[b][slot] && must_take(m, entries[b], slot);
  }
  for (int64_t b = 0; b < n; b++) /* their own pages stay known by number until all are taken */
    for (int64_t slot = 0; slot < slot_count(m); slot++)
      if (marked[b][slot])
        leave_page(m, entries[b], slot);
  for (int64_t b = 0; b < n; b++)
    take_tokens(m, entries[b], counts[b]);
}

void model_append(cache_model *m, int64_t n, const int64_t *entries, const int64_t *counts) {
  int64_t wanted = 0, told = -1, n_free = -1;
  char figures[80];
  bool room = true;
  mha_error error;
  for (int64_t b = 0; b < n; b++) {
    room = room && (m->window > 0 || m->length[entries[b]] + counts[b] <= m->capacity);
    wanted += room ? pages_wanted(m, entries[b], counts[b]) : 0;
  }
  const bool fits = wanted <= m->n_pages - pages_in_use(m);
  const mha_status asked =
      mha_cache_page_count(m->cache, n, entries, counts, &told, &n_free, &error);
  test_expect(asked, room ? MHA_OK : MHA_ERROR_LENGTH, &error);
  if (room)
    assert_int_equal(told, wanted);
  const mha_status status = append(m, n, entries, counts, &error);
  test_expect(status, room && fits ? MHA_OK : MHA_ERROR_LENGTH, &error);
  if (room && !fits) {
    (void)snprintf(figures, sizeof figures, "wants %lld pages of the cache and %lld are free",
                   (long long)wanted, (long long)n_free);
    assert_non_null(strstr(error.message, figures));
    m->n_refused++;
  }
  if (!status)
    take_all(m, n, entries, counts);
  for (int64_t b = 0; b < n; b++)
    check_entry(m, entries[b]);
  check_free(m);
}

/* ---- The other operations -------------------------------------------------------------------- */

static void release_from(cache_model *m, int64_t e, int64_t slot) {
  for (; slot < slot_count(m); slot++)
    leave_page(m, e, slot);
}

static void forget(cache_model *m, int64_t e) {
  m->length[e] = m->highest[e] = m->dropped[e] = 0;
  release_from(m, e, 0);
}

void model_share(cache_model *m, int64_t from, int64_t to) {
  mha_error error;
  test_expect(mha_cache_copy_entry(m->cache, from, to, &error), MHA_OK, &error);
  if (from != to) {
    forget(m, to);
    for (int64_t slot = 0; slot < slot_count(m); slot++) {
      m->page[to][slot] = m->page[from][slot];
      if (m->page[to][slot] >= 0)
        m->users[m->page[to][slot]]++;
    }
    memcpy(m->token[to], m->token[from], sizeof m->token[to]);
    m->length[to] = m->length[from];
    m->highest[to] = m->highest[from];
    m->dropped[to] = m->dropped[from];
  }
  check_entry(m, to);
  check_free(m);
}

void model_truncate(cache_model *m, int64_t e, int64_t length) {
  mha_error error;
  test_expect(mha_cache_truncate(m->cache, e, length, &error), MHA_OK, &error);
  m->length[e] = length;
  if (m->window == 0 || m->highest[e] <= m->capacity)
    release_from(m, e, (length + m->T - 1) / m->T);
  check_entry(m, e);
  check_free(m);
}

void model_reset(cache_model *m, int64_t e) {
  mha_error error;
  test_expect(mha_cache_reset(m->cache, e, &error), MHA_OK, &error);
  forget(m, e);
  check_entry(m, e);
  check_free(m);
}

void model_grow(cache_model *m, int64_t capacity) {
  mha_error error;
  test_expect(mha_cache_grow(m->cache, capacity, &error), MHA_OK, &error);
  const int64_t before = m->capacity;
  if (capacity == before)
    return;
  for (int64_t e = 0; e < MODEL_ENTRIES; e++) {
    int64_t tokens[MODEL_TOKENS];
    memcpy(tokens, m->token[e], sizeof tokens);
    m->dropped[e] = first_token(m, e);
    for (int64_t t = m->dropped[e]; t < m->length[e]; t++)
      m->token[e][m->window > 0 ? t % capacity : t] = tokens[m->window > 0 ? t % before : t];
  }
  m->capacity = m->T = capacity;
}

/* ---- Files ----------------------------------------------------------------------------------- */

/* Whether the tokens of entry e may become an entry of m; *first is the first that it then has. */
static bool may_load(const cache_model *m, const cache_model *from, int64_t e, int64_t *first) {
  const int64_t held = smaller(first_token(from, e), from->length[e]);
  const int64_t length = from->length[e];
  const int64_t needed = m->window > 0 ? larger(length - m->window + 1, 0) : 0;
  *first = larger(held, m->window > 0 ? length - m->capacity : 0);
  return held <= needed && (m->window > 0 || length <= m->capacity);
}

void model_load(cache_model *m, int64_t entry, const cache_model *from, int64_t e,
                const char *path) {
  int64_t tokens[MODEL_TOKENS];
  bool marked[MODEL_SLOTS];
  int64_t first = 0, wanted = 0, n_free = m->n_pages - pages_in_use(m);
  mha_error error;
  const int64_t length = from->length[e];
  bool fits = may_load(m, from, e, &first);
  if (fits)
    mark_slots(m, first, length - first, marked);
  for (int64_t slot = 0; slot < slot_count(m); slot++) {
    wanted += fits && marked[slot];
    n_free += m->page[entry][slot] >= 0 && m->users[m->page[entry][slot]] == 1;
  }
  fits = fits && (m->n_pages == 0 || wanted <= n_free);
  const mha_status status = mha_cache_load(path, m->cache, entry, &error);
  test_expect(status, fits ? MHA_OK : MHA_ERROR_LENGTH, &error);
  if (fits) {
    for (int64_t t = first; t < length; t++)
      tokens[t - first] = from->token[e][row_of(from, t)];
    forget(m, entry);
    for (int64_t slot = 0; slot < slot_count(m); slot++)
      if (marked[slot])
        take_page(m, entry, slot);
    for (int64_t t = first; t < length; t++)
      m->token[entry][row_of(m, t)] = tokens[t - first];
    m->length[entry] = m->highest[entry] = length;
    m->dropped[entry] = first;
  }
  check_entry(m, entry);
  check_free(m);
}
