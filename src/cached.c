/* Owns the arithmetic of a cache's rows: which entry, which tokens, which rows. Knows neither the
 * numbers nor their owner. */
#include "cached.h"

#include "memory.h"

int64_t mha_cached_entry(const mha_cached *cached, int64_t b) {
  return cached->entries ? cached->entries[b] : b;
}

int64_t mha_cached_new(const mha_cached *cached, int64_t b) {
  if (!cached->append)
    return 0;
  return cached->new_lengths ? cached->new_lengths[b] : cached->new_rows;
}

int64_t mha_cached_before(const mha_cached *cached, int64_t b) {
  return cached->lengths[mha_cached_entry(cached, b)];
}

int64_t mha_cached_after(const mha_cached *cached, int64_t b) {
  return mha_cached_before(cached, b) + mha_cached_new(cached, b);
}

int64_t mha_cached_first(const mha_cached *cached, int64_t b) {
  const int64_t highest =
      mha_max(cached->highest[mha_cached_entry(cached, b)], mha_cached_after(cached, b));
  return cached->ring ? mha_max(highest - cached->capacity, 0) : 0;
}

int64_t mha_cached_row(const mha_cached *cached, int64_t t) {
  return cached->ring ? t % cached->capacity : t;
}

int64_t mha_cached_run(const mha_cached *cached, int64_t t) {
  return cached->capacity - mha_cached_row(cached, t);
}

int64_t mha_cached_place(const mha_cached *cached, int64_t b, int64_t i) {
  return mha_cached_entry(cached, b) * cached->capacity +
         mha_cached_row(cached, mha_cached_before(cached, b) + i);
}
