/* Owns the picture of attention weights: its colours, its layout, its SVG. Lengths are whole
 * pixels. */
#include "svg.h"

#include "terminal.h"

#include "base/error.h"
#include "base/memory.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* ---- Writing --------------------------------------------------------------------------------- */

enum { PIECE_BYTES = 512 }; /* more than any one call of put writes */

/* Text on its way to the file. The first failure stays in `status`; what follows is dropped. */
typedef struct writer {
  mha_output *output;
  mha_error *error;
  mha_status status;
  size_t used;
  char buffer[16 * 1024];
} writer;

static void flush(writer *w) {
  if (!w->status && w->used > 0)
    w->status = mha_output_write(w->output, w->buffer, w->used, w->error);
  w->used = 0;
}

static void put(writer *w, const char *format, ...) MHA_PRINTF(2, 3);

static void put(writer *w, const char *format, ...) {
  va_list values;
  if (sizeof w->buffer - w->used < PIECE_BYTES)
    flush(w);
  va_start(values, format);
  w->used += (size_t)vsnprintf(w->buffer + w->used, PIECE_BYTES, format, values);
  va_end(values);
}

/* ---- Labels ---------------------------------------------------------------------------------- */

/* A column holds any Latin letter of 12 pixels; a Chinese character is given two. */
enum { FONT = 12, COLUMN = 8, LINE = 14, MAX_COLUMNS = 20, ESCAPED_COLUMNS = 4 };

/* Bytes of the character that text begins with, if XML may hold it and a reader may see it, or 0.
 * U+FFFE and U+FFFF are no characters to XML. */
static size_t drawn_bytes(const char *text, size_t n) {
  const size_t bytes = mha_terminal_harmless(text, n);
  return bytes == 3 && memcmp(text, "\xEF\xBF", 2) == 0 && (unsigned char)text[2] >= 0xBE ? 0
                                                                                          : bytes;
}

/* A character of `bytes` bytes as drawn_bytes has it; from U+1100 on most are wide, and those have
 * at least three. */
static int columns_of(const char *text, size_t bytes) {
  const bool wide = bytes > 3 || (bytes == 3 && memcmp(text, "\xE1\x84", 2) >= 0);
  return bytes == 0 ? ESCAPED_COLUMNS : wide ? 2 : 1;
}

static int label_columns(mha_label label) {
  int columns = 0;
  for (size_t at = 0; at < label.bytes;) {
    const size_t bytes = drawn_bytes(label.text + at, label.bytes - at);
    columns += columns_of(label.text + at, bytes);
    at += bytes > 0 ? bytes : 1;
  }
  return columns;
}

static void put_character(writer *w, const char *text, size_t bytes) {
  static const struct {
    char character;
    const char *name;
  } names[] = {{'<', "&lt;"}, {'>', "&gt;"}, {'&', "&amp;"}, {'"', "&quot;"}};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (text[0] == names[i].character) {
      put(w, "%s", names[i].name);
      return;
    }
  if (bytes > 0)
    put(w, "%.*s", (int)bytes, text);
  else
    put(w, "\\x%02X", (unsigned)(unsigned char)text[0]);
}

/* What is too long ends with an ellipsis. */
static void put_label(writer *w, mha_label label) {
  const bool fits = label_columns(label) <= MAX_COLUMNS;
  int left = fits ? MAX_COLUMNS : MAX_COLUMNS - 1;
  for (size_t at = 0; at < label.bytes;) {
    const size_t bytes = drawn_bytes(label.text + at, label.bytes - at);
    left -= columns_of(label.text + at, bytes);
    if (left < 0)
      break;
    put_character(w, label.text + at, bytes);
    at += bytes > 0 ? bytes : 1;
  }
  if (!fits)
    put(w, "\xE2\x80\xA6");
}

enum { NUMBER_BYTES = 24 };

/* The label of token i: given, or its index written into `number`. */
static mha_label label_at(const mha_label *labels, int64_t i, char number[NUMBER_BYTES]) {
  if (labels)
    return labels[i];
  const int bytes = snprintf(number, NUMBER_BYTES, "%" PRId64, i);
  return (mha_label){number, (size_t)bytes};
}

/* Width in pixels of the widest of n labels. */
static int widest(const mha_label *labels, int64_t n) {
  char number[NUMBER_BYTES];
  int columns = 1;
  for (int64_t i = labels ? 0 : n - 1; i < n; i++) {
    const int here = label_columns(label_at(labels, i, number));
    columns = here > columns ? here : columns;
  }
  return COLUMN * (columns < MAX_COLUMNS ? columns : MAX_COLUMNS);
}

/* ---- Colours --------------------------------------------------------------------------------- */

/* Weights become levels 0 .. N_LEVELS - 1; NOT_A_NUMBER stands beside them. */
enum { N_LEVELS = 256, NOT_A_NUMBER = N_LEVELS, DARK_LEVEL = 140 };

/* `#rrggbb`, between anchors whose lightness (L* of CIELAB) is 100, 80, 60, 40 and 20: equal steps
 * of the weight look equal. */
static void put_colour(writer *w, int level) {
  static const int anchors[][3] = {
      {255, 255, 255}, {172, 204, 232}, {96, 148, 200}, {38, 96, 156}, {12, 48, 96}};
  enum { N_SPANS = sizeof anchors / sizeof anchors[0] - 1 };
  if (level == NOT_A_NUMBER) {
    put(w, "#e08a2c");
    return;
  }
  const double at = (double)level / (N_LEVELS - 1) * N_SPANS;
  const int span = at < N_SPANS ? (int)at : N_SPANS - 1;
  put(w, "#");
  for (int channel = 0; channel < 3; channel++) {
    const double from = anchors[span][channel];
    const double to = anchors[span + 1][channel];
    put(w, "%02x", (unsigned)lround(from + (to - from) * (at - span)));
  }
}

static int level_of(float weight, double top) {
  if (isnan(weight))
    return NOT_A_NUMBER;
  return (int)lround(fmin(fmax((double)weight / top, 0), 1) * (N_LEVELS - 1));
}

/* The first round number that is not below `largest`, its rounding to float32 aside; 1 for what a
 * sum in float32 leaves above it, and where there is nothing to show. */
static double round_top(float largest) {
  static const double steps[] = {1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8};
  if (!(largest > 0 && largest < 1))
    return 1;
  const double unit = pow(10, floor(log10((double)largest)));
  for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++)
    if ((double)largest <= steps[i] * unit * (1 + (double)FLT_EPSILON))
      return steps[i] * unit;
  return 10 * unit;
}

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
    a.cell = mha_max(a.cell, LINE);
  a.side = n * a.cell;
  a.label_size = widest(labels, n);
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
  l->top = round_top(largest);
}

static layout make_layout(const mha_heat_maps *maps) {
  layout l = {.query = make_axis(maps->n_queries, maps->query_labels),
              .key = make_axis(maps->n_keys, maps->key_labels)};
  const int64_t key_width = l.key.label_size + COLUMN;
  l.query.every = thin(l.query.cell, LINE);
  /* numbers may be thinned until they fit beside each other; words are turned instead */
  l.upright = !maps->key_labels || key_width <= l.key.cell;
  l.key.every = thin(l.key.cell, l.upright ? key_width : LINE);
  if (l.upright)
    l.key.label_size = FONT;
  l.panel_width = TITLE + l.query.label_size + GAP + mha_max(l.key.side, MIN_WIDTH) + BETWEEN;
  l.panel_height = TITLE + l.query.side + GAP + l.key.label_size + TITLE + BETWEEN;
  const int64_t fit = mha_max((PAGE - LEGEND_WIDTH - MARGINS) / l.panel_width, 1);
  l.rows_per_entry = (maps->n_heads + fit - 1) / fit;
  l.per_row = (maps->n_heads + l.rows_per_entry - 1) / l.rows_per_entry;
  const int legend_height = TITLE + BAR_STEPS * BAR_STEP + 2 * LINE + TITLE;
  l.width = MARGINS + l.per_row * l.panel_width + LEGEND_WIDTH;
  l.height = MARGINS - BETWEEN +
             mha_max(maps->n_entries * l.rows_per_entry * l.panel_height, legend_height + BETWEEN);
  scan_weights(&l, maps);
  return l;
}

/* ---- One map --------------------------------------------------------------------------------- */

/* The cells of one colour, as runs along the rows; nothing if there is none. */
static void draw_level(writer *w, const uint16_t *levels, const layout *l, int level) {
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
        put(w, "<path fill=\"");
        put_colour(w, level);
        put(w, "\" d=\"");
        begun = true;
      }
      put(w, "M%" PRId64 " %" PRId64 "h%" PRId64 "v1h-%" PRId64 "z", first, i, j - first,
          j - first);
    }
  if (begun)
    put(w, "\"/>\n");
}

static void draw_cells(writer *w, const layout *l, const float *weights, uint16_t *levels) {
  for (int64_t i = 0; i < l->query.n * l->key.n; i++)
    levels[i] = (uint16_t)level_of(weights[i], l->top);
  put(w, "<g transform=\"scale(%" PRId64 " %" PRId64 ")\" shape-rendering=\"crispEdges\">\n",
      l->key.cell, l->query.cell);
  for (int level = 0; level <= NOT_A_NUMBER; level++)
    draw_level(w, levels, l, level);
  put(w,
      "</g>\n<rect x=\"-0.5\" y=\"-0.5\" width=\"%" PRId64 "\" height=\"%" PRId64
      "\" fill=\"none\" stroke=\"#8a8a8a\"/>\n",
      l->key.side + 1, l->query.side + 1);
}

/* The weights as numbers, where a cell has room for one. */
static void draw_numbers(writer *w, const layout *l, const float *weights) {
  if (l->key.cell < NUMBERED_WIDTH || l->query.cell < NUMBERED_HEIGHT)
    return;
  put(w, "<g text-anchor=\"middle\" font-size=\"11\">\n");
  for (int64_t i = 0; i < l->query.n; i++)
    for (int64_t j = 0; j < l->key.n; j++) {
      const float weight = weights[i * l->key.n + j];
      const int level = level_of(weight, l->top);
      put(w, "<text x=\"%" PRId64 "\" y=\"%" PRId64 "\" dy=\"0.35em\"%s>",
          j * l->key.cell + l->key.cell / 2, i * l->query.cell + l->query.cell / 2,
          level >= DARK_LEVEL && level != NOT_A_NUMBER ? " fill=\"#ffffff\"" : "");
      put(w, level == NOT_A_NUMBER ? "nan</text>\n" : "%.2f</text>\n", (double)weight);
    }
  put(w, "</g>\n");
}

static void draw_query_labels(writer *w, const axis *a) {
  char number[NUMBER_BYTES];
  put(w, "<g text-anchor=\"end\">\n");
  for (int64_t i = 0; i < a->n; i += a->every) {
    put(w, "<text x=\"-%d\" y=\"%" PRId64 "\" dy=\"0.35em\">", (int)GAP, i * a->cell + a->cell / 2);
    put_label(w, label_at(a->labels, i, number));
    put(w, "</text>\n");
  }
  put(w, "</g>\n");
}

static void draw_key_labels(writer *w, const axis *a, int64_t y, bool upright) {
  char number[NUMBER_BYTES];
  put(w, "<g text-anchor=\"%s\">\n", upright ? "middle" : "end");
  for (int64_t j = 0; j < a->n; j += a->every) {
    const int64_t x = j * a->cell + a->cell / 2;
    if (upright)
      put(w, "<text x=\"%" PRId64 "\" y=\"%" PRId64 "\">", x, y + FONT);
    else
      put(w, "<text transform=\"translate(%" PRId64 " %" PRId64 ") rotate(-90)\" dy=\"0.35em\">", x,
          y);
    put_label(w, label_at(a->labels, j, number));
    put(w, "</text>\n");
  }
  put(w, "</g>\n");
}

/* Everything of one head, with the map's corner as the origin. */
static void draw_panel(writer *w, const layout *l, const mha_heat_maps *maps, int64_t entry,
                       int64_t head, uint16_t *levels) {
  const int64_t cells = maps->n_queries * maps->n_keys;
  const float *weights = maps->weights + (entry * maps->n_heads + head) * cells;
  const int64_t row = entry * l->rows_per_entry + head / l->per_row;
  const int64_t x = MARGIN + head % l->per_row * l->panel_width;
  const int64_t y = MARGIN + row * l->panel_height;
  const int64_t below = l->query.side + GAP;
  put(w, "<g transform=\"translate(%" PRId64 " %" PRId64 ")\">\n",
      x + TITLE + l->query.label_size + GAP, y + TITLE);
  put(w, "<text x=\"%" PRId64 "\" y=\"-7\" text-anchor=\"middle\" font-weight=\"bold\">",
      l->key.side / 2);
  if (maps->n_entries > 1)
    put(w, "entry %" PRId64 ", ", entry);
  put(w, "head %" PRId64 "</text>\n", head);
  draw_cells(w, l, weights, levels);
  draw_numbers(w, l, weights);
  draw_query_labels(w, &l->query);
  draw_key_labels(w, &l->key, below, l->upright);
  put(w, "<text x=\"%" PRId64 "\" y=\"%" PRId64 "\" text-anchor=\"middle\">key</text>\n",
      l->key.side / 2, below + l->key.label_size + TITLE_AWAY + FONT - GAP);
  put(w,
      "<text transform=\"translate(-%" PRId64 " %" PRId64
      ") rotate(-90)\" text-anchor=\"middle\">query</text>\n</g>\n",
      l->query.label_size + GAP + TITLE_AWAY, l->query.side / 2);
}

/* ---- The picture ----------------------------------------------------------------------------- */

static void draw_legend(writer *w, const layout *l) {
  const int height = BAR_STEPS * BAR_STEP;
  put(w,
      "<g transform=\"translate(%" PRId64 " %d)\">\n<text y=\"-12\" font-weight=\"bold\">weight"
      "</text>\n<g shape-rendering=\"crispEdges\">\n",
      l->width - MARGIN - LEGEND_WIDTH, MARGIN + TITLE);
  for (int i = 0; i < BAR_STEPS; i++) {
    put(w, "<rect y=\"%d\" width=\"%d\" height=\"%d\" fill=\"", height - (i + 1) * BAR_STEP,
        (int)BAR_WIDTH, (int)BAR_STEP);
    put_colour(w, (2 * i * (N_LEVELS - 1) + BAR_STEPS - 1) / (2 * (BAR_STEPS - 1)));
    put(w, "\"/>\n");
  }
  put(w,
      "</g>\n<rect x=\"-0.5\" y=\"-0.5\" width=\"%d\" height=\"%d\" fill=\"none\" "
      "stroke=\"#8a8a8a\"/>\n",
      BAR_WIDTH + 1, height + 1);
  for (int i = 0; i < N_TICKS; i++)
    put(w, "<text x=\"%d\" y=\"%d\" dy=\"0.35em\">%.4g</text>\n", BAR_WIDTH + GAP,
        height - i * height / (N_TICKS - 1), l->top * i / (N_TICKS - 1));
  if (l->not_a_number) {
    put(w, "<rect y=\"%d\" width=\"%d\" height=\"%d\" fill=\"", height + LINE, (int)BAR_WIDTH,
        (int)BAR_WIDTH);
    put_colour(w, NOT_A_NUMBER);
    put(w, "\"/>\n<text x=\"%d\" y=\"%d\" dy=\"0.35em\">nan</text>\n", BAR_WIDTH + GAP,
        height + LINE + BAR_WIDTH / 2);
  }
  put(w, "</g>\n");
}

static void draw(writer *w, const layout *l, const mha_heat_maps *maps, uint16_t *levels) {
  put(w,
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
      "<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" width=\"%" PRId64
      "\" height=\"%" PRId64 "\" viewBox=\"0 0 %" PRId64 " %" PRId64
      "\" font-family=\"sans-serif\" font-size=\"%d\" fill=\"#1c1c1c\">\n",
      l->width, l->height, l->width, l->height, (int)FONT);
  put(w,
      "<title>Attention weights: %" PRId64 " heads, %" PRId64 " queries, %" PRId64
      " keys</title>\n<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n",
      maps->n_heads, maps->n_queries, maps->n_keys);
  for (int64_t entry = 0; entry < maps->n_entries; entry++)
    for (int64_t head = 0; head < maps->n_heads && !w->status; head++)
      draw_panel(w, l, maps, entry, head, levels);
  draw_legend(w, l);
  put(w, "</svg>\n");
  flush(w);
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
  writer w = {.output = output, .error = error};
  output->has_temporary = 0;
  w.status = mha_svg_check(path, maps, error);
  if (w.status)
    return w.status;
  const layout l = make_layout(maps);
  const size_t bytes = (size_t)(maps->n_queries * maps->n_keys) * sizeof(uint16_t);
  uint16_t *levels = mha_memory_allocate(&memory, bytes);
  if (!levels)
    return mha_fail(error, MHA_ERROR_MEMORY, "no memory for the %zu bytes of a map", bytes);
  w.status = mha_output_open(path, output, error);
  if (!w.status)
    draw(&w, &l, maps, levels);
  mha_memory_release(&memory, levels, bytes);
  return w.status ? w.status : mha_output_sync(output, error);
}
