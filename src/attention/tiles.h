/* How step 3 is cut: tasks, tiles, products; and the walk of a task's queries over its keys. */
#ifndef MHA_SRC_ATTENTION_TILES_H
#define MHA_SRC_ATTENTION_TILES_H

#include "visibility.h"

/* At most MHA_QUERY_TILE × MHA_KEY_TILE scores exist at a time, per thread. A larger query tile
 * amortises what the BLAS spends on packing K and V; the scores of a tile, 512 KiB, should stay in
 * a second-level cache. A build may make them tiny to bring every border of a tile within reach of
 * small tests. */
#ifndef MHA_QUERY_TILE
#define MHA_QUERY_TILE 256
#endif
#ifndef MHA_KEY_TILE
#define MHA_KEY_TILE 512
#endif
/* Keys per tile where a causal mask or a window cuts: a narrow tile wastes less of its products on
 * hidden keys, a wide one is multiplied faster. */
#ifndef MHA_EDGE_TILE
#define MHA_EDGE_TILE 64
#endif
_Static_assert(MHA_EDGE_TILE <= MHA_KEY_TILE, "the scratch of a task holds MHA_KEY_TILE keys");

/* Few queries over many keys are bound by reading the keys and values. Heads of token-major rows
 * are short pieces, a row apart, which memory delivers at half its speed; so a task takes a strip
 * of neighbouring heads at once, MHA_STRIP_FLOATS wide, and products of MHA_PIECE_FLOATS numbers
 * go along the rows. Its keys are one of at most MHA_MAX_PARTS parts of the entry, in tiles of
 * MHA_PART_TILE, so that all threads have work. */
#ifndef MHA_FEW_QUERIES
#define MHA_FEW_QUERIES 8
#endif
#ifndef MHA_FEW_RATIO
#define MHA_FEW_RATIO 16 /* keys per query, at least */
#endif
#ifndef MHA_PART_TILE
#define MHA_PART_TILE 256
#endif
#ifndef MHA_STRIP_FLOATS
#define MHA_STRIP_FLOATS 1024
#endif
#ifndef MHA_PIECE_FLOATS
#define MHA_PIECE_FLOATS 1024
#endif
#define MHA_MAX_PARTS 64

/* Keys that are laid out for kernels: nothing is packed, so a task of fewer queries loses nothing
 * and its scores, 220 KiB, stay nearer. Keys are laid out in blocks. */
#ifndef MHA_LAID_QUERIES
#define MHA_LAID_QUERIES 96
#endif
#ifndef MHA_LAID_TILE
#define MHA_LAID_TILE 512
#endif
#ifndef MHA_KEY_BLOCK
#define MHA_KEY_BLOCK 64
#endif
/* Of a last block with no more keys than this only so many columns are multiplied. */
#define MHA_NARROW_BLOCK (MHA_KEY_BLOCK / 4)
/* Scores of a row: a tile's keys in whole blocks. */
#define MHA_LAID_COLUMNS (MHA_LAID_TILE + MHA_KEY_BLOCK)
_Static_assert(MHA_EDGE_TILE <= MHA_LAID_TILE && MHA_LAID_TILE % MHA_KEY_BLOCK == 0,
               "the scratch of a task holds MHA_LAID_TILE keys and a block");

/* Sizes that the cut of a call depends on. `span` is the most keys in memory per entry. */
typedef struct mha_cut_sizes {
  int64_t B, H, G, Lq, span, d, dv;
  bool packed;
  bool windowed; /* visible keys may begin elsewhere than at the first; scratch does not depend on
                    it */
  bool laid;     /* keys are laid out for kernels, unless the queries are few */
  bool stored;   /* keys or values are of another type than float32 */
  bool paged;    /* they lie in pages */
  bool cached;   /* they lie in a cache: packed queries then have an entry's keys each */
  int64_t rows;  /* of the queries of all entries; 0 = B·Lq */
} mha_cut_sizes;

/* The cut of a call, by its sizes alone. */
typedef struct mha_cut {
  bool few;             /* few queries over many keys */
  bool laid;            /* many, and keys are laid out */
  int64_t heads;        /* per task: 1, or all heads that share a strip of key heads */
  int64_t queries;      /* per task, at most */
  int64_t tile_keys;    /* per tile, at most */
  int64_t product_keys; /* per product, at most */
  int64_t parts;        /* of an entry's keys, each a task of its own */
  int64_t part_keys;
} mha_cut;

mha_cut mha_cut_call(const mha_cut_sizes *sizes);

/* At least the parts of an entry's keys, and growing with the span, as scratch must; 0 if the call
 * has many queries. */
int64_t mha_cut_most_parts(int64_t Lq, int64_t span, bool packed);

/* Packed queries over a cache: entries with few queries over many keys are served as those of a
 * call that has nothing else, see mha_core_pass. Whether an entry is one of them, and the sizes of
 * that call: Lq is the most queries that one of them can have, 0 = there can be none. */
bool mha_cut_entry_is_few(int64_t queries, int64_t keys);
mha_cut_sizes mha_cut_few_of_packed(const mha_cut_sizes *sizes);

/* The most queries, up to Lq, that a call over up to `span` keys may have to be cut as one of few.
 */
int64_t mha_cut_most_few(int64_t Lq, int64_t span);

/* The most keys, up to `span`, over which a call of up to Lq queries may be cut as one of many. */
int64_t mha_cut_most_span_of_many(int64_t Lq, int64_t span);

/* Packed sequences have no common length. Entry b owns the slots of `size` rows from this one on,
 * which are always enough for its rows: floor(starts[b]/size) + b. */
int64_t mha_slot_first(const int64_t *starts, int64_t size, int64_t b);

/* The entry that owns a slot: the last one whose first slot is not behind it. */
int64_t mha_slot_owner(const int64_t *starts, int64_t size, int64_t B, int64_t slot);

/* Queries [i, i + n) of entry b on their way over key tiles. */
typedef struct mha_tile_walk {
  const mha_visibility *visibility;
  const mha_cut *cut;
  int64_t b, i, n;
  bool everything;       /* all rows, whatever they see */
  mha_range all, common; /* keys that some row sees; keys that every row sees */
  mha_range keys;        /* the tile at hand */
  mha_range rows;        /* of the n queries, those that see a key of it */
} mha_tile_walk;

/* Over the keys that the queries see. The tiles depend on shapes, flags and lengths alone, so two
 * walks over the same queries meet the same tiles, and their products have the same bits. */
mha_tile_walk mha_walk_visible(const mha_visibility *visibility, const mha_cut *cut, int64_t b,
                               int64_t i, int64_t n);

/* Over those of them in one part of the entry: few queries only. Tiles never cross from one part
 * into the next. */
mha_tile_walk mha_walk_part(const mha_visibility *visibility, const mha_cut *cut, int64_t b,
                            int64_t i, int64_t n, int64_t part);

/* Over all keys of the entry that are in memory. */
mha_tile_walk mha_walk_everything(const mha_visibility *visibility, const mha_cut *cut, int64_t b,
                                  int64_t i, int64_t n);

/* Steps to the first or next tile that some row sees; false behind the last. */
bool mha_walk_next(mha_tile_walk *walk);

#endif
