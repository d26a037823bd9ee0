/* Owns the arithmetic of a cache's rows: which entry, which tokens, which rows. Knows neither the
 * numbers nor their owner. */
#include "cache_rows.h"

#include "base/memory.h"

int64_t mha_cache_rows_entry(const mha_cache_rows *cached, int64_t b) {
  return cached->entries ? cached->entries[b] : b;
}

int64_t mha_cache_rows_new(const mha_cache_rows *cached, int64_t b) {
  if (!cached->append)
    return 0;
  return cached->new_lengths ? cached->new_lengths[b] : cached->new_rows;
}

int64_t mha_cache_rows_before(const mha_cache_rows *cached, int64_t b) {
  return cached->lengths[mha_cache_rows_entry(cached, b)];
}

int64_t mha_cache_rows_after(const mha_cache_rows *cached, int64_t b) {
  return mha_cache_rows_before(cached, b) + mha_cache_rows_new(cached, b);
}

int64_t mha_cache_rows_first(const mha_cache_rows *cached, int64_t b) {
  const int64_t highest =
      mha_max(cached->highest[mha_cache_rows_entry(cached, b)], mha_cache_rows_after(cached, b));
  return cached->ring ? mha_max(highest - cached->capacity, 0) : 0;
}

int64_t mha_cache_rows_row(const mha_cache_rows *cached, int64_t t) {
  return cached->ring ? t % cached->capacity : t;
}

int64_t mha_cache_rows_run(const mha_cache_rows *cached, int64_t t) {
  return cached->capacity - mha_cache_rows_row(cached, t);
}

int64_t mha_cache_rows_place(const mha_cache_rows *cached, int64_t b, int64_t i) {
  return mha_cache_rows_entry(cached, b) * cached->capacity +
         mha_cache_rows_row(cached, mha_cache_rows_before(cached, b) + i);
}
