/* Owns the picture of attention weights: its layout, its SVG. Lengths are whole pixels. */
#include "svg.h"

#include "drawing.h"

#include "base/error.h"
#include "base/memory.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>

/* ---- Layout ---------------------------------------------------------------------------------- */

enum {
  MARGIN = 16,
  MARGINS = 2 * MARGIN,
  TITLE = 20,      /* one line: a head's title, an axis' title */
  GAP = 5,         /* between a map and its labels */
  TITLE_AWAY = 8,  /* an axis' title from the labels */
  BETWEEN = 20,    /* maps */
  MAP_SIDE = 288,  /* what a map's side should be */
  MAX_CELL = 40,   /* where it has few cells */
  MIN_WIDTH = 112, /* of a map with its title */
  PAGE = 1600,     /* width to be filled */
  BAR_WIDTH = 14,
  BAR_STEPS = 64,
  BAR_STEP = 2, /* height of the bar: 128 */
  N_TICKS = 5,
  LEGEND_WIDTH = 76,
  NUMBERED_WIDTH = 32, /* a cell that has room for "0.12" */
  NUMBERED_HEIGHT = 18,
  MAX_LABELLED = 40 /* so many tokens get cells as large as a line for their labels */
};

/* One direction of a map. */
typedef struct axis {
  int64_t n, cell, side; /* side = n·cell */
  int64_t every;         /* each so many-th token has its label */
  int64_t label_size;    /* room for the labels, across the axis */
  const mha_label *labels;
} axis;

typedef struct layout {
  axis query, key;
  bool upright; /* labels of the keys, instead of turned to the side */
  int64_t panel_width, panel_height, per_row, rows_per_entry;
  int64_t width, height;
  double top; /* end of the scale of colours */
  bool not_a_number;
} layout;

static axis make_axis(int64_t n, const mha_label *labels) {
  axis a = {.n = n, .labels = labels};
  a.cell = mha_min(mha_max(MAP_SIDE / n, 1), MAX_CELL);
  if (labels && n <= MAX_LABELLED)
    a.cell = mha_max(a.cell, MHA_LINE);
  a.side = n * a.cell;
  a.label_size = mha_drawing_label_width(labels, n);
  return a;
}

/* So that labels of `size` along the axis do not touch. */
static int64_t thin(int64_t cell, int64_t size) {
  static const int64_t steps[] = {1, 2, 5, 10, 20, 50, 100};
  size_t i = 0;
  while (i + 1 < sizeof steps / sizeof steps[0] && steps[i] * cell < size)
    i++;
  return steps[i];
}

static void scan_weights(layout *l, const mha_heat_maps *maps) {
  const int64_t n = maps->n_entries * maps->n_heads * maps->n_queries * maps->n_keys;
  float largest = 0;
  for (int64_t i = 0; i < n; i++) {
    l->not_a_number = l->not_a_number || isnan(maps->weights[i]);
    largest = maps->weights[i] > largest ? maps->weights[i] : largest;
  }
  l->top = mha_drawing_top(largest);
}

static layout make_layout(const mha_heat_maps *maps) {
  layout l = {.query = make_axis(maps->n_queries, maps->query_labels),
              .key = make_axis(maps->n_keys, maps->key_labels)};
  const int64_t key_width = l.key.label_size + MHA_COLUMN;
  l.query.every = thin(l.query.cell, MHA_LINE);
  /* numbers may be thinned until they fit beside each other; words are turned instead */
  l.upright = !maps->key_labels || key_width <= l.key.cell;
  l.key.every = thin(l.key.cell, l.upright ? key_width : MHA_LINE);
  if (l.upright)
    l.key.label_size = MHA_FONT;
  l.panel_width = TITLE + l.query.label_size + GAP + mha_max(l.key.side, MIN_WIDTH) + BETWEEN;
  l.panel_height = TITLE + l.query.side + GAP + l.key.label_size + TITLE + BETWEEN;
  const int64_t fit = mha_max((PAGE - LEGEND_WIDTH - MARGINS) / l.panel_width, 1);
  l.rows_per_entry = (maps->n_heads + fit - 1) / fit;
  l.per_row = (maps->n_heads + l.rows_per_entry - 1) / l.rows_per_entry;
  const int legend_height = TITLE + BAR_STEPS * BAR_STEP + 2 * MHA_LINE + TITLE;
  l.width = MARGINS + l.per_row * l.panel_width + LEGEND_WIDTH;
  l.height = MARGINS - BETWEEN +
             mha_max(maps->n_entries * l.rows_per_entry * l.panel_height, legend_height + BETWEEN);
  scan_weights(&l, maps);
  return l;
}

/* ---- One map --------------------------------------------------------------------------------- */

/* The cells of one colour, as runs along the rows; nothing if there is none. */
static void draw_level(mha_drawing *d, const uint16_t *levels, const layout *l, int level) {
  bool begun = false;
  for (int64_t i = 0; i < l->query.n; i++)
    for (int64_t j = 0; j < l->key.n; j++) {
      const uint16_t *row = levels + i * l->key.n;
      const int64_t first = j;
      while (j < l->key.n && row[j] == level)
        j++;
      if (j == first)
        continue;
      if (!begun) {
        mha_drawing_put(d, "<path fill=\"");
        mha_drawing_put_colour(d, level);
        mha_drawing_put(d, "\" d=\"");
        begun = true;
      }
      mha_drawing_put(d, "M%" PRId64 " %" PRId64 "h%" PRId64 "v1h-%" PRId64 "z", first, i,
                      j - first, j - first);
    }
  if (begun)
    mha_drawing_put(d, "\"/>\n");
}

static void draw_cells(mha_drawing *d, const layout *l, const float *weights, uint16_t *levels) {
  for (int64_t i = 0; i < l->query.n * l->key.n; i++)
    levels[i] = (uint16_t)mha_drawing_level(weights[i], l->top);
  mha_drawing_put(
      d, "<g transform=\"scale(%" PRId64 " %" PRId64 ")\" shape-rendering=\"crispEdges\">\n",
      l->key.cell, l->query.cell);
  for (int level = 0; level <= MHA_LEVEL_NAN; level++)
    draw_level(d, levels, l, level);
  mha_drawing_put(d,
                  "</g>\n<rect x=\"-0.5\" y=\"-0.5\" width=\"%" PRId64 "\" height=\"%" PRId64
                  "\" fill=\"none\" stroke=\"#8a8a8a\"/>\n",
                  l->key.side + 1, l->query.side + 1);
}

/* The weights as numbers, where a cell has room for one. */
static void draw_numbers(mha_drawing *d, const layout *l, const float *weights) {
  if (l->key.cell < NUMBERED_WIDTH || l->query.cell < NUMBERED_HEIGHT)
    return;
  mha_drawing_put(d, "<g text-anchor=\"middle\" font-size=\"11\">\n");
  for (int64_t i = 0; i < l->query.n; i++)
    for (int64_t j = 0; j < l->key.n; j++) {
      const float weight = weights[i * l->key.n + j];
      const int level = mha_drawing_level(weight, l->top);
      mha_drawing_put(d, "<text x=\"%" PRId64 "\" y=\"%" PRId64 "\" dy=\"0.35em\"%s>",
                      j * l->key.cell + l->key.cell / 2, i * l->query.cell + l->query.cell / 2,
                      mha_drawing_level_is_dark(level) ? " fill=\"#ffffff\"" : "");
      mha_drawing_put(d, level == MHA_LEVEL_NAN ? "nan</text>\n" : "%.2f</text>\n", (double)weight);
    }
  mha_drawing_put(d, "</g>\n");
}

static void draw_query_labels(mha_drawing *d, const axis *a) {
  mha_drawing_put(d, "<g text-anchor=\"end\">\n");
  for (int64_t i = 0; i < a->n; i += a->every) {
    mha_drawing_put(d, "<text x=\"-%d\" y=\"%" PRId64 "\" dy=\"0.35em\">", (int)GAP,
                    i * a->cell + a->cell / 2);
    mha_drawing_put_label(d, a->labels, i);
    mha_drawing_put(d, "</text>\n");
  }
  mha_drawing_put(d, "</g>\n");
}

static void draw_key_labels(mha_drawing *d, const axis *a, int64_t y, bool upright) {
  mha_drawing_put(d, "<g text-anchor=\"%s\">\n", upright ? "middle" : "end");
  for (int64_t j = 0; j < a->n; j += a->every) {
    const int64_t x = j * a->cell + a->cell / 2;
    if (upright)
      mha_drawing_put(d, "<text x=\"%" PRId64 "\" y=\"%" PRId64 "\">", x, y + MHA_FONT);
    else
      mha_drawing_put(
          d, "<text transform=\"translate(%" PRId64 " %" PRId64 ") rotate(-90)\" dy=\"0.35em\">", x,
          y);
    mha_drawing_put_label(d, a->labels, j);
    mha_drawing_put(d, "</text>\n");
  }
  mha_drawing_put(d, "</g>\n");
}

/* Everything of one head, with the map's corner as the origin. */
static void draw_panel(mha_drawing *d, const layout *l, const mha_heat_maps *maps, int64_t entry,
                       int64_t head, uint16_t *levels) {
  const int64_t cells = maps->n_queries * maps->n_keys;
  const float *weights = maps->weights + (entry * maps->n_heads + head) * cells;
  const int64_t row = entry * l->rows_per_entry + head / l->per_row;
  const int64_t x = MARGIN + head % l->per_row * l->panel_width;
  const int64_t y = MARGIN + row * l->panel_height;
  const int64_t below = l->query.side + GAP;
  mha_drawing_put(d, "<g transform=\"translate(%" PRId64 " %" PRId64 ")\">\n",
                  x + TITLE + l->query.label_size + GAP, y + TITLE);
  mha_drawing_put(d,
                  "<text x=\"%" PRId64 "\" y=\"-7\" text-anchor=\"middle\" font-weight=\"bold\">",
                  l->key.side / 2);
  if (maps->n_entries > 1)
    mha_drawing_put(d, "entry %" PRId64 ", ", entry);
  mha_drawing_put(d, "head %" PRId64 "</text>\n", head);
  draw_cells(d, l, weights, levels);
  draw_numbers(d, l, weights);
  draw_query_labels(d, &l->query);
  draw_key_labels(d, &l->key, below, l->upright);
  mha_drawing_put(d,
                  "<text x=\"%" PRId64 "\" y=\"%" PRId64 "\" text-anchor=\"middle\">key</text>\n",
                  l->key.side / 2, below + l->key.label_size + TITLE_AWAY + MHA_FONT - GAP);
  mha_drawing_put(d,
                  "<text transform=\"translate(-%" PRId64 " %" PRId64
                  ") rotate(-90)\" text-anchor=\"middle\">query</text>\n</g>\n",
                  l->query.label_size + GAP + TITLE_AWAY, l->query.side / 2);
}

/* ---- The picture ----------------------------------------------------------------------------- */

static void draw_legend(mha_drawing *d, const layout *l) {
  const int height = BAR_STEPS * BAR_STEP;
  mha_drawing_put(d,
                  "<g transform=\"translate(%" PRId64
                  " %d)\">\n<text y=\"-12\" font-weight=\"bold\">weight"
                  "</text>\n<g shape-rendering=\"crispEdges\">\n",
                  l->width - MARGIN - LEGEND_WIDTH, MARGIN + TITLE);
  for (int i = 0; i < BAR_STEPS; i++) {
    mha_drawing_put(d, "<rect y=\"%d\" width=\"%d\" height=\"%d\" fill=\"",
                    height - (i + 1) * BAR_STEP, (int)BAR_WIDTH, (int)BAR_STEP);
    mha_drawing_put_colour(d, (2 * i * (MHA_N_LEVELS - 1) + BAR_STEPS - 1) / (2 * (BAR_STEPS - 1)));
    mha_drawing_put(d, "\"/>\n");
  }
  mha_drawing_put(d,
                  "</g>\n<rect x=\"-0.5\" y=\"-0.5\" width=\"%d\" height=\"%d\" fill=\"none\" "
                  "stroke=\"#8a8a8a\"/>\n",
                  BAR_WIDTH + 1, height + 1);
  for (int i = 0; i < N_TICKS; i++)
    mha_drawing_put(d, "<text x=\"%d\" y=\"%d\" dy=\"0.35em\">%.4g</text>\n", BAR_WIDTH + GAP,
                    height - i * height / (N_TICKS - 1), l->top * i / (N_TICKS - 1));
  if (l->not_a_number) {
    mha_drawing_put(d, "<rect y=\"%d\" width=\"%d\" height=\"%d\" fill=\"", height + MHA_LINE,
                    (int)BAR_WIDTH, (int)BAR_WIDTH);
    mha_drawing_put_colour(d, MHA_LEVEL_NAN);
    mha_drawing_put(d, "\"/>\n<text x=\"%d\" y=\"%d\" dy=\"0.35em\">nan</text>\n", BAR_WIDTH + GAP,
                    height + MHA_LINE + BAR_WIDTH / 2);
  }
  mha_drawing_put(d, "</g>\n");
}

static void draw(mha_drawing *d, const layout *l, const mha_heat_maps *maps, uint16_t *levels) {
  mha_drawing_put(d,
                  "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" width=\"%" PRId64
                  "\" height=\"%" PRId64 "\" viewBox=\"0 0 %" PRId64 " %" PRId64
                  "\" font-family=\"sans-serif\" font-size=\"%d\" fill=\"#1c1c1c\">\n",
                  l->width, l->height, l->width, l->height, (int)MHA_FONT);
  mha_drawing_put(d,
                  "<title>Attention weights: %" PRId64 " heads, %" PRId64 " queries, %" PRId64
                  " keys</title>\n<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n",
                  maps->n_heads, maps->n_queries, maps->n_keys);
  for (int64_t entry = 0; entry < maps->n_entries; entry++)
    for (int64_t head = 0; head < maps->n_heads && !d->status; head++)
      draw_panel(d, l, maps, entry, head, levels);
  draw_legend(d, l);
  mha_drawing_put(d, "</svg>\n");
  mha_drawing_flush(d);
}

mha_status mha_svg_check(const char *path, const mha_heat_maps *maps, mha_error *error) {
  int64_t cells = 0;
  if (maps->n_entries > 0 && maps->n_queries > 0 && maps->n_keys > 0 &&
      maps->n_queries <= MHA_SVG_MAX_SIDE && maps->n_keys <= MHA_SVG_MAX_SIDE &&
      mha_multiply(maps->n_entries, maps->n_heads, &cells) &&
      mha_multiply(cells, maps->n_queries * maps->n_keys, &cells) && cells <= MHA_SVG_MAX_CELLS)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_SIZE,
                  "%s would show %" PRId64 " x %" PRId64 " maps of %" PRId64 " x %" PRId64
                  " cells; rule: at least one, at most %d x %d in a map and %d in all",
                  mha_shown_path(path), maps->n_entries, maps->n_heads, maps->n_queries,
                  maps->n_keys, (int)MHA_SVG_MAX_SIDE, (int)MHA_SVG_MAX_SIDE,
                  (int)MHA_SVG_MAX_CELLS);
}

mha_status mha_svg_stage(const char *path, const mha_heat_maps *maps, mha_output *output,
                         mha_error *error) {
  const mha_allocator memory = mha_memory_allocator(NULL);
  mha_drawing d = {.output = output, .error = error};
  output->has_temporary = 0;
  d.status = mha_svg_check(path, maps, error);
  if (d.status)
    return d.status;
  const layout l = make_layout(maps);
  const size_t bytes = (size_t)(maps->n_queries * maps->n_keys) * sizeof(uint16_t);
  uint16_t *levels = mha_memory_allocate(&memory, bytes);
  if (!levels)
    return mha_fail(error, MHA_ERROR_MEMORY, "no memory for the %zu bytes of a map", bytes);
  d.status = mha_output_open(path, output, error);
  if (!d.status)
    draw(&d, &l, maps, levels);
  mha_memory_release(&memory, levels, bytes);
  return d.status ? d.status : mha_output_sync(output, error);
}
