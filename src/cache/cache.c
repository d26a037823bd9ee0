/* Owns mha_cache as memory: the object with its lists in one block, the keys and values in another;
 * who is inside; more room. */
#include "cache.h"

#include "base/element.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/tensor.h"

#include <string.h>

/* ---- keys and values ---- */

static size_t add_rows(mha_layout *layout, const mha_cache_options *o, int64_t pages,
                       int64_t page_rows, int64_t size) {
  int64_t row_bytes = 0;
  layout->overflow |= !mha_element_extent(o->type, size, &row_bytes) ||
                      !mha_multiply(o->n_kv_heads, row_bytes, &row_bytes);
  return mha_layout_add(layout, 1, pages, page_rows, row_bytes);
}

/* `asker` is the argument that the sizes come from. */
static mha_status make_numbers(const mha_cache_options *o, const mha_allocator *allocator,
                               const char *asker, mha_cache_numbers *numbers, mha_error *error) {
  const bool paged = o->page_tokens > 0;
  mha_cache_numbers n = {.pages = paged ? o->n_pages : o->n_entries,
                         .page_rows = paged ? o->page_tokens : o->capacity};
  while (paged && INT64_C(1) << n.page_shift < o->page_tokens)
    n.page_shift++;
  mha_layout layout = {0};
  const size_t keys = add_rows(&layout, o, n.pages, n.page_rows, o->head_size);
  const size_t values = add_rows(&layout, o, n.pages, n.page_rows, o->value_head_size);
  if (layout.overflow)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s asks for %lld %s of %lld tokens; rule: the cache fits the address space",
                    asker, (long long)n.pages, paged ? "pages" : "entries", (long long)n.page_rows);
  n.bytes = layout.bytes;
  n.memory = mha_memory_allocate(allocator, n.bytes);
  if (!n.memory)
    return mha_fail(error, MHA_ERROR_MEMORY, "the cache needs %zu bytes; rule: they must be there",
                    n.bytes);
  n.keys = n.memory + keys;
  n.values = n.memory + values;
  *numbers = n;
  return MHA_OK;
}

/* ---- the object ---- */

/* Offsets of the arrays behind the object. */
typedef struct cache_layout {
  mha_layout layout;
  size_t lengths, highest, dropped, last_call;
  int64_t slots;
  mha_pages_layout pages;
} cache_layout;

static cache_layout lay_out(const mha_cache_options *o) {
  cache_layout at = {.layout = {0}};
  (void)mha_layout_add(&at.layout, sizeof(mha_cache), 1, 1, 1);
  at.lengths = mha_layout_add(&at.layout, sizeof(int64_t), o->n_entries, 1, 1);
  at.highest = mha_layout_add(&at.layout, sizeof(int64_t), o->n_entries, 1, 1);
  at.dropped = mha_layout_add(&at.layout, sizeof(int64_t), o->n_entries, 1, 1);
  at.last_call = mha_layout_add(&at.layout, sizeof(int64_t), o->n_entries, 1, 1);
  if (o->page_tokens > 0) {
    at.slots = mha_divide_up(o->capacity, o->page_tokens);
    at.pages = mha_pages_plan(&at.layout, o->n_entries, at.slots, o->n_pages);
  }
  return at;
}

static void place(mha_cache *cache, char *base, const cache_layout *at) {
  const mha_cache_options *o = &cache->sizes;
  const size_t bytes = (size_t)o->n_entries * sizeof *cache->lengths;
  cache->lengths = (void *)(base + at->lengths);
  cache->highest = (void *)(base + at->highest);
  cache->dropped = (void *)(base + at->dropped);
  cache->last_call = (void *)(base + at->last_call);
  memset(cache->lengths, 0, bytes);
  memset(cache->highest, 0, bytes);
  memset(cache->dropped, 0, bytes);
  memset(cache->last_call, 0, bytes);
  if (o->page_tokens > 0)
    mha_pages_start(&cache->pages, base, &at->pages, o->n_entries, at->slots, o->n_pages);
}

static mha_status make_object(const mha_cache_options *o, const mha_allocator *allocator,
                              mha_cache **cache, mha_error *error) {
  const cache_layout at = lay_out(o);
  if (at.layout.overflow)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "options has %lld entries of %lld tokens; rule: the cache's lists fit the "
                    "address space",
                    (long long)o->n_entries, (long long)o->capacity);
  char *memory = mha_memory_allocate(allocator, at.layout.bytes);
  if (!memory)
    return mha_fail(error, MHA_ERROR_MEMORY,
                    "the cache's lists need %zu bytes; rule: they must be there", at.layout.bytes);
  mha_cache *created = (void *)memory;
  memset(created, 0, sizeof *created);
  created->sizes = *o;
  created->sizes.allocator = NULL;
  created->allocator = *allocator;
  created->bytes = at.layout.bytes;
  atomic_init(&created->users, 0);
  place(created, memory, &at);
  *cache = created;
  return MHA_OK;
}

mha_status mha_cache_make(const mha_cache_options *o, mha_cache **cache, mha_error *error) {
  const mha_allocator allocator = mha_memory_allocator(o->allocator);
  mha_cache_numbers numbers = {0};
  mha_status status = make_numbers(o, &allocator, "options", &numbers, error);
  if (status)
    return status;
  status = make_object(o, &allocator, cache, error);
  if (status) {
    mha_memory_release(&allocator, numbers.memory, numbers.bytes);
    return status;
  }
  (*cache)->numbers = numbers;
  return mha_succeed(error);
}

void mha_cache_destroy(mha_cache *cache) {
  if (!cache)
    return;
  const mha_allocator allocator = cache->allocator;
  mha_memory_release(&allocator, cache->numbers.memory, cache->numbers.bytes);
  mha_memory_release(&allocator, cache, cache->bytes);
}

/* ---- readers, or one that changes it ---- */

mha_status mha_cache_enter(mha_cache *cache, bool change, mha_error *error) {
  int users = atomic_load(&cache->users);
  do {
    if (users < 0 || (change && users > 0))
      return mha_fail(error, MHA_ERROR_BUSY,
                      "cache is inside another call; rule: any number of readers, or one caller "
                      "that changes it");
  } while (!atomic_compare_exchange_weak(&cache->users, &users, change ? -1 : users + 1));
  return MHA_OK;
}

void mha_cache_leave(mha_cache *cache, bool change) {
  if (change)
    atomic_store(&cache->users, 0);
  else
    (void)atomic_fetch_sub(&cache->users, 1);
}

mha_status mha_cache_enter_to_read(const mha_cache *cache, mha_error *error) {
  return mha_cache_enter((mha_cache *)(uintptr_t)cache, false, error);
}

void mha_cache_leave_read(const mha_cache *cache) {
  mha_cache_leave((mha_cache *)(uintptr_t)cache, false);
}

/* ---- more room ---- */

/* Copies the tokens that an entry holds from where `from` has them to where `to` has room. */
static void move_entry(const mha_cache_options *o, int64_t entry, const mha_cache_rows *from,
                       const mha_cache_numbers *old, const mha_cache_rows *to,
                       const mha_cache_numbers *grown) {
  const size_t k = mha_element_bytes(o->type, o->n_kv_heads * o->head_size);
  const size_t v = mha_element_bytes(o->type, o->n_kv_heads * o->value_head_size);
  const int64_t end = from->lengths[entry];
  int64_t n = 0;
  for (int64_t t = mha_cache_rows_first(from, entry); t < end; t += n) {
    const size_t here = (size_t)mha_cache_rows_at(from, entry, t);
    const size_t there = (size_t)mha_cache_rows_at(to, entry, t);
    n = mha_min(end - t, mha_min(mha_cache_rows_run(from, t), mha_cache_rows_run(to, t)));
    memcpy((char *)grown->keys + there * k, (char *)old->keys + here * k, (size_t)n * k);
    memcpy((char *)grown->values + there * v, (char *)old->values + here * v, (size_t)n * v);
  }
}

static mha_status grow(mha_cache *cache, int64_t capacity, mha_error *error) {
  mha_cache_options o = cache->sizes;
  const mha_cache_rows from = mha_cache_describe_rows(cache);
  mha_cache_numbers grown = {0};
  if (o.page_tokens > 0)
    return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                    "cache has %lld pages of %lld tokens; rule: only a cache without pages grows",
                    (long long)o.n_pages, (long long)o.page_tokens);
  if (capacity < o.capacity)
    return mha_fail(error, MHA_ERROR_SIZE, "capacity is %lld; rule: at least the cache's, %lld",
                    (long long)capacity, (long long)o.capacity);
  if (capacity == o.capacity)
    return MHA_OK;
  o.capacity = capacity;
  const mha_status status = make_numbers(&o, &cache->allocator, "capacity", &grown, error);
  if (!grown.memory)
    return status;
  mha_cache_rows to = from;
  to.capacity = to.page_rows = capacity;
  for (int64_t entry = 0; entry < o.n_entries; entry++) {
    move_entry(&o, entry, &from, &cache->numbers, &to, &grown);
    cache->dropped[entry] = mha_cache_rows_first(&from, entry);
  }
  mha_memory_release(&cache->allocator, cache->numbers.memory, cache->numbers.bytes);
  cache->numbers = grown;
  cache->sizes.capacity = capacity;
  return MHA_OK;
}

mha_status mha_cache_grow(mha_cache *cache, int64_t capacity, mha_error *error) {
  mha_status status = mha_require(cache, "cache", error);
  if (!status)
    status = mha_cache_enter(cache, true, error);
  if (status)
    return status;
  status = grow(cache, capacity, error);
  mha_cache_leave(cache, true);
  return status ? status : mha_succeed(error);
}

/* ---- what it looks like ---- */

mha_cache_rows mha_cache_describe_rows(const mha_cache *cache) {
  const mha_cache_rows rows = {.lengths = cache->lengths,
                               .highest = cache->highest,
                               .dropped = cache->dropped,
                               .capacity = cache->sizes.capacity,
                               .ring = cache->sizes.window > 0,
                               .window = cache->sizes.window,
                               .page_rows = cache->numbers.page_rows,
                               .pages = cache->pages.n > 0 ? cache->pages.lists : NULL,
                               .slots = cache->pages.slots,
                               .page_shift = cache->numbers.page_shift};
  return rows;
}

static mha_tensor show(const mha_cache *cache, const void *data, int64_t size) {
  const mha_cache_numbers *n = &cache->numbers;
  const int64_t G = cache->sizes.n_kv_heads;
  const mha_tensor tensor = {
      data, n->pages, n->page_rows,      G, size, n->page_rows * G * size, G * size,
      size, 1,        cache->sizes.type, 0};
  return tensor;
}

mha_status mha_cache_view(const mha_cache *cache, mha_tensor *k, mha_tensor *v, mha_error *error) {
  mha_status status = mha_require(cache, "cache", error);
  if (!status)
    status = mha_require(k, "k", error);
  if (!status)
    status = mha_require(v, "v", error);
  if (status)
    return status;
  *k = show(cache, cache->numbers.keys, cache->sizes.head_size);
  *v = show(cache, cache->numbers.values, cache->sizes.value_head_size);
  return mha_succeed(error);
}

mha_status mha_cache_ranges(const mha_cache *cache, bool change, mha_address_ranges *ranges,
                            mha_error *error) {
  const mha_cache_options *o = &cache->sizes;
  const mha_cache_numbers *n = &cache->numbers;
  const int64_t rows = n->pages * n->page_rows * o->n_kv_heads;
  mha_status status = mha_ranges_add(ranges, "the cache's keys", n->keys, rows,
                                     mha_element_bytes(o->type, o->head_size), change, error);
  if (!status)
    status = mha_ranges_add(ranges, "the cache's values", n->values, rows,
                            mha_element_bytes(o->type, o->value_head_size), change, error);
  return status;
}
