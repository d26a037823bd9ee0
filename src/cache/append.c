/* Owns what calls do to a cache: which rows they bring, whether there is room, where they go. */
#include "base/arithmetic.h"
#include "base/error.h"
#include "base/tensor.h"
#include "cache.h"
#include "engine/numbers.h"

/* ---- what a call brings ---- */

static mha_status check_entries(mha_cache *cache, const mha_cache_call *call, mha_error *error) {
  if (!call->entries)
    return call->B <= cache->sizes.n_entries
               ? MHA_OK
               : mha_fail(error, MHA_ERROR_LENGTH,
                          "%s is %lld without %scache_entries; rule: at most the cache's %lld "
                          "entries",
                          call->batch, (long long)call->B, call->prefix,
                          (long long)cache->sizes.n_entries);
  if (call->append)
    cache->n_calls++;
  for (int64_t b = 0; b < call->B; b++) {
    const int64_t entry = call->entries[b];
    if (entry < 0 || entry >= cache->sizes.n_entries)
      return mha_fail(error, MHA_ERROR_LENGTH,
                      "%scache_entries[%lld] is %lld; rule: an entry of the cache, 0 to %lld",
                      call->prefix, (long long)b, (long long)entry,
                      (long long)(cache->sizes.n_entries - 1));
    if (call->append && cache->last_call[entry] == cache->n_calls)
      return mha_fail(error, MHA_ERROR_LENGTH,
                      "%scache_entries[%lld] is %lld a second time; rule: a call appends to an "
                      "entry once",
                      call->prefix, (long long)b, (long long)entry);
    if (call->append)
      cache->last_call[entry] = cache->n_calls;
  }
  return MHA_OK;
}

static mha_status check_room(const mha_cache *cache, const mha_cache_rows *cached, int64_t b,
                             mha_error *error) {
  const mha_cache_options *o = &cache->sizes;
  const int64_t n = mha_cache_rows_new(cached, b);
  const int64_t before = mha_cache_rows_before(cached, b);
  int64_t after = 0;
  if (o->window > 0 && n > o->capacity - o->window - o->rollback + 1)
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "batch entry %lld brings %lld tokens to a ring of %lld with window %lld and "
                    "rollback %lld; rule: at most capacity - window - rollback + 1",
                    (long long)b, (long long)n, (long long)o->capacity, (long long)o->window,
                    (long long)o->rollback);
  if (!mha_add(before, n, &after) || (o->window == 0 && after > o->capacity))
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "batch entry %lld brings %lld tokens to an entry that has %lld; rule: at most "
                    "the capacity, %lld, together",
                    (long long)b, (long long)n, (long long)before, (long long)o->capacity);
  return MHA_OK;
}

/* What the caller says of batch entry b: how long it is by now, and what comes. */
static mha_status check_lengths(const mha_cache_call *call, const mha_cache_rows *cached, int64_t b,
                                mha_error *error) {
  if (call->expected_lengths && call->expected_lengths[b] != mha_cache_rows_before(cached, b))
    return mha_fail(
        error, MHA_ERROR_LENGTH,
        "%sexpected_lengths[%lld] is %lld, but entry %lld of the cache has %lld tokens; "
        "rule: they agree, mha_cache_reset starts an entry again",
        call->prefix, (long long)b, (long long)call->expected_lengths[b],
        (long long)mha_cache_rows_entry(cached, b), (long long)mha_cache_rows_before(cached, b));
  if (call->new_lengths && (call->new_lengths[b] < 0 || call->new_lengths[b] > call->rows))
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "%snew_lengths[%lld] is %lld; rule: between 0 and the %lld rows given",
                    call->prefix, (long long)b, (long long)call->new_lengths[b],
                    (long long)call->rows);
  return MHA_OK;
}

mha_status mha_cache_describe(mha_cache *cache, const mha_cache_call *call, mha_cache_rows *cached,
                              mha_error *error) {
  const mha_cache_rows described = {.lengths = cache->lengths,
                                    .highest = cache->highest,
                                    .entries = call->entries,
                                    .new_lengths = call->new_lengths,
                                    .new_rows = call->rows,
                                    .append = call->append,
                                    .capacity = cache->sizes.capacity,
                                    .ring = cache->sizes.window > 0,
                                    .window = cache->sizes.window};
  *cached = described;
  mha_status status = check_entries(cache, call, error);
  for (int64_t b = 0; !status && b < call->B; b++) {
    status = check_lengths(call, cached, b, error);
    if (!status)
      status = check_room(cache, cached, b, error);
  }
  return status;
}

/* ---- storing ---- */

/* Rows that a call brings, keys or values: of which type, how they lie, and where they go. */
typedef struct arrival {
  const void *data; /* [B][rows][G][size] */
  int32_t element;
  mha_tensor_shape shape;
  const mha_cache_rows *cached;
  char *numbers; /* the cache's, of `type` */
  int32_t type;
} arrival;

/* Stores row i of entry b, if it is a token. */
static void store_row(const arrival *a, int64_t b, int64_t i) {
  const mha_tensor_shape *s = &a->shape;
  const size_t head_bytes = mha_element_bytes(a->type, s->size);
  if (i >= mha_cache_rows_new(a->cached, b))
    return;
  char *to = a->numbers + (size_t)(mha_cache_rows_place(a->cached, b, i) * s->heads) * head_bytes;
  for (int64_t h = 0; h < s->heads; h++, to += head_bytes) {
    const int64_t from = b * s->batch_stride + i * s->row_stride + h * s->head_stride;
    mha_numbers_convert(to, a->type, mha_element_at(a->data, a->element, from), a->element,
                        s->size);
  }
}

static void store_rows(const arrival *a) {
  for (int64_t b = 0; b < a->shape.batch; b++)
    for (int64_t i = 0; i < mha_cache_rows_new(a->cached, b); i++)
      store_row(a, b, i);
}

/* A call's dense rows as a tensor. */
static mha_tensor_shape dense_rows(int64_t B, int64_t rows, int64_t heads, int64_t size) {
  const mha_tensor_shape shape = {B, rows, heads, size, rows * heads * size, heads * size, size};
  return shape;
}

/* Rows per task: enough work to be worth taking. */
enum { ROWS_PER_TASK = 16, N_ARRIVALS = 2 };

/* One task: some rows, counted over all entries, of keys and values. */
static mha_status store_task(void *job, int64_t index, int32_t worker) {
  (void)worker;
  const arrival *arrivals = job;
  const int64_t length = arrivals->shape.length;
  const int64_t all = arrivals->shape.batch * length;
  const int64_t end = mha_min((index + 1) * ROWS_PER_TASK, all);
  for (int64_t row = index * ROWS_PER_TASK; row < end; row++)
    for (int k = 0; k < N_ARRIVALS; k++)
      store_row(&arrivals[k], row / length, row % length);
  return MHA_OK;
}

mha_status mha_cache_store(mha_cache *cache, const mha_cache_rows *cached, int64_t B,
                           const float *k, const float *v, const mha_threads *threads) {
  const mha_cache_options *o = &cache->sizes;
  const int64_t n = cached->new_rows;
  arrival arrivals[N_ARRIVALS] = {
      {k, MHA_F32, dense_rows(B, n, o->n_kv_heads, o->head_size), cached, cache->keys, o->type},
      {v, MHA_F32, dense_rows(B, n, o->n_kv_heads, o->value_head_size), cached, cache->values,
       o->type}};
  const double numbers =
      (double)(B * n) * (double)(o->n_kv_heads * (o->head_size + o->value_head_size));
  const mha_task_list list = {.work = store_task,
                              .job = arrivals,
                              .n_tasks = (B * n + ROWS_PER_TASK - 1) / ROWS_PER_TASK,
                              .operations = MHA_OPERATIONS_PER_READ * numbers};
  return mha_parallel_run(threads, &list);
}

void mha_cache_commit(mha_cache *cache, const mha_cache_rows *cached, int64_t B) {
  for (int64_t b = 0; b < B; b++) {
    const int64_t entry = mha_cache_rows_entry(cached, b);
    cache->lengths[entry] = mha_cache_rows_after(cached, b);
    cache->highest[entry] = mha_max(cache->highest[entry], cache->lengths[entry]);
  }
}

/* ---- ready rows ---- */

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

static mha_status check_type(const mha_cache *cache, const mha_tensor *tensor, const char *name,
                             mha_error *error) {
  if (tensor->element == MHA_F32 || tensor->element == cache->sizes.type)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_UNSUPPORTED, "%s.element is %s; rule: F32, or as the cache, %s",
                  name, mha_element_name(tensor->element), mha_element_name(cache->sizes.type));
}

mha_status mha_cache_append(mha_cache *cache, const mha_tensor *k, const mha_tensor *v,
                            const int64_t *cache_entries, const int64_t *new_lengths,
                            mha_error *error) {
  mha_address_ranges ranges = {.n = 0};
  mha_tensor_shape ks = {0};
  mha_tensor_shape vs = {0};
  mha_cache_rows cached;
  mha_status status = mha_require(cache, "cache", error);
  if (!status)
    status = mha_tensor_read_stored(k, "k", &ks, &ranges, error);
  if (!status)
    status = mha_tensor_read_stored(v, "v", &vs, &ranges, error);
  if (!status)
    status = check_fit(cache, &ks, &vs, error);
  if (!status)
    status = check_type(cache, k, "k", error);
  if (!status)
    status = check_type(cache, v, "v", error);
  if (!status)
    status = mha_cache_ranges(cache, true, &ranges, error);
  if (!status)
    status = mha_ranges_check(&ranges, error);
  if (!status)
    status = mha_cache_enter(cache, true, error);
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
  if (!status) {
    const int32_t type = cache->sizes.type;
    const arrival keys = {k->data, k->element, ks, &cached, cache->keys, type};
    const arrival values = {v->data, v->element, vs, &cached, cache->values, type};
    store_rows(&keys);
    store_rows(&values);
    mha_cache_commit(cache, &cached, ks.batch);
  }
  mha_cache_leave(cache, true);
  return status ? status : mha_succeed(error);
}

mha_status mha_cache_ranges(const mha_cache *cache, bool change, mha_address_ranges *ranges,
                            mha_error *error) {
  const mha_cache_options *o = &cache->sizes;
  const int64_t rows = o->n_entries * o->capacity * o->n_kv_heads;
  mha_status status = mha_ranges_add(ranges, "the cache's keys", cache->keys, rows,
                                     mha_element_bytes(o->type, o->head_size), change, error);
  if (!status)
    status = mha_ranges_add(ranges, "the cache's values", cache->values, rows,
                            mha_element_bytes(o->type, o->value_head_size), change, error);
  return status;
}
