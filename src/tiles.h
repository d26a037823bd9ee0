/* The tiles of step 3: their sizes, and the walk of a tile of queries over the keys they see. */
#ifndef MHA_SRC_TILES_H
#define MHA_SRC_TILES_H

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

/* Queries [i, i + n) of entry b on their way over key tiles. */
typedef struct mha_tile_walk {
  const mha_visibility *visibility;
  int64_t b, i, n;
  bool everything;       /* all rows, whatever they see */
  mha_range all, common; /* keys that some row sees; keys that every row sees */
  mha_range keys;        /* the tile at hand */
  mha_range rows;        /* of the n queries, those that see a key of it */
} mha_tile_walk;

/* Over the keys that the queries see. The tiles depend on shapes, flags and lengths alone, so two
 * walks over the same queries meet the same tiles, and their products have the same bits. */
mha_tile_walk mha_walk_visible(const mha_visibility *visibility, int64_t b, int64_t i, int64_t n);

/* Over all keys of the entry. */
mha_tile_walk mha_walk_everything(const mha_visibility *visibility, int64_t b, int64_t i,
                                  int64_t n);

/* Steps to the first or next tile that some row sees; false behind the last. */
bool mha_walk_next(mha_tile_walk *walk);

#endif
