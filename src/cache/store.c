/* Owns the rounding of rows into their places in a cache: those of a layer call, those that come
 * ready, and those that take the place of an entry. */
#include "base/error.h"
#include "base/memory.h"
#include "base/tensor.h"
#include "cache.h"
#include "engine/numbers.h"

/* Rows that a call brings, keys or values: of which type, how they lie, and where they go. */
typedef struct arrival {
  const void *data; /* [B][rows][G][size] */
  int32_t element;
  mha_tensor_shape shape;
  const mha_cache_rows *cached;
  void *numbers; /* the cache's, of `type` */
  int32_t type;
} arrival;

/* Stores a row whose first number is number `from` of the data, as token t of batch entry b. */
static void store_row(const arrival *a, int64_t from, int64_t b, int64_t t) {
  const mha_tensor_shape *s = &a->shape;
  const size_t head_bytes = mha_element_bytes(a->type, s->size);
  char *to =
      (char *)a->numbers + (size_t)(mha_cache_rows_at(a->cached, b, t) * s->heads) * head_bytes;
  for (int64_t h = 0; h < s->heads; h++, to += head_bytes)
    mha_numbers_convert(to, a->type, mha_element_at(a->data, a->element, from + h * s->head_stride),
                        a->element, s->size);
}

/* ---- a layer call ---- */

/* A call's rows, dense: entries one after the other, or packed. */
static mha_tensor_shape dense_rows(int64_t B, int64_t rows, int64_t heads, int64_t size) {
  const mha_tensor_shape shape = {B, rows, heads, size, rows * heads * size, heads * size, size};
  return shape;
}

/* Rows per task: enough work to be worth taking. */
enum { ROWS_PER_TASK = 16, N_ARRIVALS = 2 };

typedef struct store_job {
  arrival arrivals[N_ARRIVALS];
  int64_t B, rows; /* all of them */
} store_job;

/* One task: some rows, counted over all entries, of keys and values. */
static mha_status store_task(void *argument, int64_t index, int32_t worker) {
  (void)worker;
  const store_job *job = argument;
  const mha_cache_rows *cached = job->arrivals[0].cached;
  const int64_t end = mha_min((index + 1) * ROWS_PER_TASK, job->rows);
  for (int64_t row = index * ROWS_PER_TASK; row < end; row++) {
    int64_t b = 0;
    int64_t i = 0;
    if (!mha_cache_rows_find(cached, job->B, row, &b, &i))
      continue;
    for (int k = 0; k < N_ARRIVALS; k++)
      store_row(&job->arrivals[k], row * job->arrivals[k].shape.row_stride, b,
                mha_cache_rows_before(cached, b) + i);
  }
  return MHA_OK;
}

mha_status mha_cache_store(mha_cache *cache, const mha_cache_rows *cached, int64_t B,
                           const float *k, const float *v, const mha_threads *threads) {
  const mha_cache_options *o = &cache->sizes;
  const int64_t n = cached->new_rows;
  const int64_t entries = cached->starts ? 1 : B;
  store_job job = {
      .arrivals = {{k, MHA_F32, dense_rows(entries, n, o->n_kv_heads, o->head_size), cached,
                    cache->numbers.keys, o->type},
                   {v, MHA_F32, dense_rows(entries, n, o->n_kv_heads, o->value_head_size), cached,
                    cache->numbers.values, o->type}},
      .B = B,
      .rows = entries * n};
  const double numbers =
      (double)job.rows * (double)(o->n_kv_heads * (o->head_size + o->value_head_size));
  const mha_task_list list = {.work = store_task,
                              .job = &job,
                              .n_tasks = mha_divide_up(job.rows, ROWS_PER_TASK),
                              .operations = MHA_OPERATIONS_PER_READ * numbers};
  return mha_parallel_run(threads, &list);
}

/* ---- ready rows ---- */

static void store_rows(const arrival *a) {
  const mha_tensor_shape *s = &a->shape;
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t i = 0; i < mha_cache_rows_new(a->cached, b); i++)
      store_row(a, b * s->batch_stride + i * s->row_stride, b,
                mha_cache_rows_before(a->cached, b) + i);
}

static mha_status check_fit(const mha_cache *cache, const mha_tensor_shape *k,
                            const mha_tensor_shape *v, mha_error *error) {
  const mha_cache_options *o = &cache->sizes;
  if (k->batch != v->batch || k->length != v->length)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "v is %lld entries of %lld rows; rule: as k, %lld of %lld", (long long)v->batch,
                    (long long)v->length, (long long)k->batch, (long long)k->length);
  if (k->heads != o->n_kv_heads || k->size != o->head_size)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "k has %lld heads of size %lld; rule: the cache's G and d, %lld and %lld",
                    (long long)k->heads, (long long)k->size, (long long)o->n_kv_heads,
                    (long long)o->head_size);
  if (v->heads != o->n_kv_heads || v->size != o->value_head_size)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "v has %lld heads of size %lld; rule: the cache's G and dv, %lld and %lld",
                    (long long)v->heads, (long long)v->size, (long long)o->n_kv_heads,
                    (long long)o->value_head_size);
  return MHA_OK;
}

static mha_status check_type(const mha_cache *cache, int32_t element, const char *name,
                             mha_error *error) {
  if (element == MHA_F32 || element == cache->sizes.type)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_UNSUPPORTED, "%s is %s; rule: F32, or as the cache, %s", name,
                  mha_element_name(element), mha_element_name(cache->sizes.type));
}

/* Everything about ready rows that the cache's entries do not decide. The cache has been entered.
 */
static mha_status read_rows(const mha_cache *cache, const mha_tensor *k, const mha_tensor *v,
                            mha_tensor_shape *ks, mha_tensor_shape *vs, mha_error *error) {
  mha_address_ranges ranges = {.n = 0};
  mha_status status = mha_tensor_read_stored(k, "k", ks, &ranges, error);
  if (!status)
    status = mha_tensor_read_stored(v, "v", vs, &ranges, error);
  if (!status)
    status = check_fit(cache, ks, vs, error);
  if (!status)
    status = check_type(cache, k->element, "k.element", error);
  if (!status)
    status = check_type(cache, v->element, "v.element", error);
  if (!status)
    status = mha_cache_ranges(cache, true, &ranges, error);
  return status ? status : mha_ranges_check(&ranges, error);
}

static mha_status append(mha_cache *cache, const mha_tensor *k, const mha_tensor *v,
                         const int64_t *cache_entries, const int64_t *new_lengths,
                         mha_error *error) {
  mha_tensor_shape ks = {0};
  mha_tensor_shape vs = {0};
  mha_cache_rows cached;
  mha_status status = read_rows(cache, k, v, &ks, &vs, error);
  if (status)
    return status;
  const mha_cache_call call = {.prefix = "",
                               .batch = "k.batch",
                               .B = ks.batch,
                               .rows = ks.length,
                               .append = true,
                               .entries = cache_entries,
                               .new_lengths = new_lengths};
  status = mha_cache_describe(cache, &call, &cached, error);
  if (status)
    return status;
  const int32_t type = cache->sizes.type;
  const arrival keys = {k->data, k->element, ks, &cached, cache->numbers.keys, type};
  const arrival values = {v->data, v->element, vs, &cached, cache->numbers.values, type};
  store_rows(&keys);
  store_rows(&values);
  mha_cache_commit(cache, &cached, ks.batch);
  return MHA_OK;
}

mha_status mha_cache_append(mha_cache *cache, const mha_tensor *k, const mha_tensor *v,
                            const int64_t *cache_entries, const int64_t *new_lengths,
                            mha_error *error) {
  mha_status status = mha_require(cache, "cache", error);
  if (!status)
    status = mha_cache_enter(cache, true, error);
  if (status)
    return status;
  status = append(cache, k, v, cache_entries, new_lengths, error);
  mha_cache_leave(cache, true);
  return status ? status : mha_succeed(error);
}

/* ---- in the place of an entry ---- */

/* The first token that the entry will hold: a ring has no room for those before. */
static mha_status choose_first(const mha_cache *cache, const mha_cache_held *held, const char *name,
                               int64_t *first, mha_error *error) {
  const mha_cache_options *o = &cache->sizes;
  const bool ring = o->window > 0;
  const int64_t needed = ring ? mha_max(held->length - o->window + 1, 0) : 0;
  const int64_t most = ring ? MHA_MOST_TOKENS : o->capacity;
  if (held->length > most)
    return mha_fail(error, MHA_ERROR_LENGTH, "%s has %lld tokens; rule: at most %lld, %s", name,
                    (long long)held->length, (long long)most,
                    ring ? "whatever a ring drops" : "the cache's capacity");
  if (held->first > needed)
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "%s has %lld tokens of which those before %lld are gone; rule: %s", name,
                    (long long)held->length, (long long)held->first,
                    ring ? "the window of the next one is there" : "only a ring has dropped any");
  *first = mha_max(held->first, ring ? held->length - o->capacity : 0);
  return MHA_OK;
}

/* Gives the entry pages of its own for its tokens; the rest of the pool is as it was on failure. */
static mha_status renew_pages(mha_cache *cache, const mha_cache_rows *rows, int64_t entry,
                              const mha_cache_held *held, mha_error *error) {
  mha_pages *pages = &cache->pages;
  const int64_t n_free = pages->n_free + mha_pages_own(pages, entry);
  const int64_t tokens = held->length - held->first;
  int64_t wanted = 0;
  for (int64_t t = held->first; t < held->length; t += mha_cache_rows_run(rows, t))
    wanted++;
  wanted = mha_min(wanted, mha_divide_up(rows->capacity, rows->page_rows));
  if (wanted > n_free)
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "%lld tokens want %lld pages of the cache and %lld are free; rule: at most the "
                    "free ones, with those of the entry itself",
                    (long long)tokens, (long long)wanted, (long long)n_free);
  mha_pages_release(pages, entry, 0);
  for (int64_t t = held->first; t < held->length; t += mha_cache_rows_run(rows, t))
    if (mha_pages_at(pages, entry, mha_cache_rows_slot(rows, t)) == MHA_NO_PAGE)
      (void)mha_pages_take(pages, entry, mha_cache_rows_slot(rows, t));
  mha_pages_keep(pages);
  return MHA_OK;
}

mha_status mha_cache_replace(mha_cache *cache, int64_t entry, const mha_cache_held *held,
                             int32_t element, const void *k, const void *v, const char *name,
                             mha_error *error) {
  const mha_cache_options *o = &cache->sizes;
  const mha_cache_rows rows = mha_cache_describe_rows(cache);
  const int64_t n = held->length - held->first;
  mha_cache_held kept = *held;
  mha_status status = check_type(cache, element, name, error);
  if (!status)
    status = choose_first(cache, held, name, &kept.first, error);
  if (!status && cache->pages.n > 0)
    status = renew_pages(cache, &rows, entry, &kept, error);
  if (status)
    return status;
  const arrival arrivals[N_ARRIVALS] = {{k, element, dense_rows(1, n, o->n_kv_heads, o->head_size),
                                         &rows, cache->numbers.keys, o->type},
                                        {v, element,
                                         dense_rows(1, n, o->n_kv_heads, o->value_head_size), &rows,
                                         cache->numbers.values, o->type}};
  for (int64_t t = kept.first; t < kept.length; t++)
    for (int a = 0; a < N_ARRIVALS; a++)
      store_row(&arrivals[a], (t - held->first) * arrivals[a].shape.row_stride, entry, t);
  cache->lengths[entry] = cache->highest[entry] = kept.length;
  cache->dropped[entry] = kept.first;
  return MHA_OK;
}
