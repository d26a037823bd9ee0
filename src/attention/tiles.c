/* Owns the cut of step 3 and the walk over key tiles. Many queries: keys that every query of the
 * tile sees are walked in large tiles; before and behind them lie the steps of a causal mask or a
 * window, walked in narrow tiles by only the queries that see any of it. Few queries: the keys of
 * an entry lie on a grid of tiles, of which each part of the entry takes a fixed number. */
#include "tiles.h"

#include "base/memory.h"
#include "engine/softmax.h"

/* ---- the cut ---- */

int64_t mha_cut_most_few(int64_t Lq, int64_t span) {
  return mha_min(mha_min(Lq, MHA_FEW_QUERIES), span / MHA_FEW_RATIO);
}

int64_t mha_cut_most_span_of_many(int64_t Lq, int64_t span) {
  return Lq > MHA_FEW_QUERIES ? span : mha_max(mha_min(span, MHA_FEW_RATIO * Lq - 1), 0);
}

static bool is_few(int64_t Lq, int64_t span, bool packed) {
  return !packed && Lq > 0 && Lq <= mha_cut_most_few(Lq, span);
}

static int64_t part_keys(int64_t span) {
  return mha_divide_up(mha_divide_up(span, MHA_PART_TILE), MHA_MAX_PARTS) * MHA_PART_TILE;
}

/* One more than divides the span, since those of a window may begin within a part. */
int64_t mha_cut_most_parts(int64_t Lq, int64_t span, bool packed) {
  return is_few(Lq, span, packed) ? mha_min(mha_divide_up(span, MHA_PART_TILE), MHA_MAX_PARTS) + 1
                                  : 0;
}

mha_cut mha_cut_call(const mha_cut_sizes *s) {
  if (!is_few(s->Lq, s->span, s->packed)) {
    static const int64_t keys[] = {MHA_KEY_TILE, MHA_LAID_TILE};
    static const int64_t queries[] = {MHA_QUERY_TILE, MHA_LAID_QUERIES};
    const mha_cut many = {.laid = s->laid,
                          .heads = 1,
                          .queries = queries[s->laid],
                          .tile_keys = keys[s->laid],
                          .product_keys = keys[s->laid],
                          .parts = 1};
    return many;
  }
  const int64_t width = mha_max(s->d, s->dv);
  const int64_t piece = s->stored ? 2 * MHA_PIECE_FLOATS : MHA_PIECE_FLOATS; /* half the bytes */
  const int64_t groups = mha_min(mha_max(MHA_STRIP_FLOATS / width, 1), s->G);
  const mha_cut cut = {.few = true,
                       .heads = groups * (s->H / s->G),
                       .queries = s->Lq,
                       .tile_keys = MHA_PART_TILE,
                       .product_keys = mha_min(mha_max(piece / width, 4), MHA_PART_TILE),
                       .parts = mha_divide_up(s->span, part_keys(s->span)) + s->windowed,
                       .part_keys = part_keys(s->span)};
  return cut;
}

bool mha_cut_entry_is_few(int64_t queries, int64_t keys) {
  return is_few(queries, keys, false);
}

mha_cut_sizes mha_cut_few_of_packed(const mha_cut_sizes *s) {
  mha_cut_sizes few = *s;
  int64_t rows = 0;
  few.packed = false;
  few.Lq = s->packed && s->cached ? mha_cut_most_few(s->Lq, s->span) : 0;
  few.rows = mha_multiply(s->B, few.Lq, &rows) ? mha_min(rows, s->Lq) : s->Lq;
  return few;
}

/* ---- slots of packed sequences ---- */

int64_t mha_slot_first(const int64_t *starts, int64_t size, int64_t b) {
  return starts[b] / size + b;
}

int64_t mha_slot_owner(const int64_t *starts, int64_t size, int64_t B, int64_t slot) {
  int64_t low = 0;
  int64_t high = B;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (mha_slot_first(starts, size, middle) <= slot)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* ---- the walk ---- */

static int64_t clip(int64_t x, mha_range to) {
  return mha_max(to.begin, mha_min(x, to.end));
}

mha_tile_walk mha_walk_visible(const mha_visibility *v, const mha_cut *cut, int64_t b, int64_t i,
                               int64_t n) {
  mha_tile_walk walk = {.visibility = v, .cut = cut, .b = b, .i = i, .n = n};
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

/* Parts are counted from the one in which the first query's keys begin: what lies before is seen by
 * nobody, however long a ring's sequence has become. */
mha_tile_walk mha_walk_part(const mha_visibility *v, const mha_cut *cut, int64_t b, int64_t i,
                            int64_t n, int64_t part) {
  mha_tile_walk walk = mha_walk_visible(v, cut, b, i, n);
  const int64_t first = walk.all.begin / cut->part_keys + part;
  const mha_range keys = {first * cut->part_keys, (first + 1) * cut->part_keys};
  walk.all = mha_range_intersect(walk.all, keys);
  walk.keys.end = walk.all.begin;
  return walk;
}

mha_tile_walk mha_walk_everything(const mha_visibility *v, const mha_cut *cut, int64_t b, int64_t i,
                                  int64_t n) {
  mha_tile_walk walk = {.visibility = v, .cut = cut, .b = b, .i = i, .n = n, .everything = true};
  if (n > 0)
    walk.all = walk.common = mha_present_keys(v, b);
  walk.keys.end = walk.all.begin;
  return walk;
}

/* Where the next line of a grid of `step` lies behind `begin`. */
static int64_t next_line(int64_t begin, int64_t step) {
  return begin - begin % step + step;
}

/* The tile that begins at `begin`; empty behind the last. */
static mha_range tile_at(const mha_tile_walk *walk, int64_t begin) {
  const mha_cache_rows *cached = walk->visibility->cached;
  int64_t limit = walk->all.end;
  int64_t end = begin + MHA_EDGE_TILE;
  if (walk->cut->few) {
    end = next_line(begin, walk->cut->tile_keys);
  } else if (begin < walk->common.begin) {
    limit = walk->common.begin;
  } else if (begin < walk->common.end) {
    limit = walk->common.end;
    end = begin + walk->cut->tile_keys;
  }
  /* the row behind a ring's last is its first; a tile ends where a page does, or has several */
  if (cached && cached->ring)
    limit = mha_min(limit, next_line(begin, cached->capacity));
  if (cached && cached->page_rows >= walk->cut->tile_keys)
    limit = mha_min(limit, begin + mha_cache_rows_run(cached, begin));
  const mha_range keys = {begin, mha_min(end, limit)};
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
