/* Owns the walk over key tiles. Keys that every query of the tile sees are walked in large tiles;
 * before and behind them lie the steps of a causal mask or a window, walked in narrow tiles by only
 * the queries that see any of it. */
#include "tiles.h"

#include "memory.h"
#include "softmax.h"

static int64_t clip(int64_t x, mha_range to) {
  return mha_max(to.begin, mha_min(x, to.end));
}

mha_tile_walk mha_walk_visible(const mha_visibility *v, int64_t b, int64_t i, int64_t n) {
  mha_tile_walk walk = {.visibility = v, .b = b, .i = i, .n = n};
  if (n <= 0)
    return walk;
  const mha_range first = mha_visible_keys(v, b, i);
  const mha_range last = mha_visible_keys(v, b, i + n - 1);
  const mha_range all = {first.begin, last.end};
  mha_range common = {last.begin, first.end};
  if (mha_range_is_empty(all))
    return walk;
  /* whole vectors, so that a causal tile of queries i.. has its common keys end at i, not i + 1 */
  if (common.end < all.end)
    common.end -= (common.end - all.begin) % MHA_LANES;
  walk.all = all;
  walk.common.begin = clip(common.begin, all);
  walk.common.end = clip(common.end, all);
  walk.keys.end = all.begin;
  return walk;
}

mha_tile_walk mha_walk_everything(const mha_visibility *v, int64_t b, int64_t i, int64_t n) {
  mha_tile_walk walk = {.visibility = v, .b = b, .i = i, .n = n, .everything = true};
  walk.all.end = walk.common.end = n > 0 ? mha_key_count(v, b) : 0;
  return walk;
}

/* The tile that begins at `begin`; empty behind the last. */
static mha_range tile_at(const mha_tile_walk *walk, int64_t begin) {
  int64_t limit = walk->all.end;
  int64_t size = MHA_EDGE_TILE;
  if (begin < walk->common.begin) {
    limit = walk->common.begin;
  } else if (begin < walk->common.end) {
    limit = walk->common.end;
    size = MHA_KEY_TILE;
  }
  const mha_range keys = {begin, mha_min(begin + size, limit)};
  return keys;
}

/* Both ends of what a row sees do not decrease, so these rows follow one another. */
static mha_range rows_that_see(const mha_tile_walk *walk) {
  const mha_visibility *v = walk->visibility;
  mha_range rows = {0, walk->n};
  if (walk->everything)
    return rows;
  while (rows.begin < rows.end &&
         mha_visible_keys(v, walk->b, walk->i + rows.begin).end <= walk->keys.begin)
    rows.begin++;
  while (rows.end > rows.begin &&
         mha_visible_keys(v, walk->b, walk->i + rows.end - 1).begin >= walk->keys.end)
    rows.end--;
  return rows;
}

bool mha_walk_next(mha_tile_walk *walk) {
  do {
    walk->keys = tile_at(walk, walk->keys.end);
    if (mha_range_is_empty(walk->keys))
      return false;
    walk->rows = rows_that_see(walk);
  } while (mha_range_is_empty(walk->rows));
  return true;
}
