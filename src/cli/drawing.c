/* Owns what a picture is drawn with: its text on the way to the file, its labels, its colours. */
#include "drawing.h"

#include "terminal.h"

#include "base/error.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- Writing --------------------------------------------------------------------------------- */

enum { PIECE_BYTES = 512 }; /* more than any one call of mha_drawing_put writes */

void mha_drawing_flush(mha_drawing *d) {
  if (!d->status && d->used > 0)
    d->status = mha_output_write(d->output, d->buffer, d->used, d->error);
  d->used = 0;
}

void mha_drawing_put(mha_drawing *d, const char *format, ...) {
  va_list values;
  if (sizeof d->buffer - d->used < PIECE_BYTES)
    mha_drawing_flush(d);
  va_start(values, format);
  d->used += (size_t)vsnprintf(d->buffer + d->used, PIECE_BYTES, format, values);
  va_end(values);
}

/* ---- Labels ---------------------------------------------------------------------------------- */

enum { MAX_COLUMNS = 20, ESCAPED_COLUMNS = 4 };

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

static void put_character(mha_drawing *d, const char *text, size_t bytes) {
  static const struct {
    char character;
    const char *name;
  } names[] = {{'<', "&lt;"}, {'>', "&gt;"}, {'&', "&amp;"}, {'"', "&quot;"}};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (text[0] == names[i].character) {
      mha_drawing_put(d, "%s", names[i].name);
      return;
    }
  if (bytes > 0)
    mha_drawing_put(d, "%.*s", (int)bytes, text);
  else
    mha_drawing_put(d, "\\x%02X", (unsigned)(unsigned char)text[0]);
}

enum { NUMBER_BYTES = 24 };

/* The label of token i: given, or its index written into `number`. */
static mha_label label_at(const mha_label *labels, int64_t i, char number[NUMBER_BYTES]) {
  if (labels)
    return labels[i];
  const int bytes = snprintf(number, NUMBER_BYTES, "%" PRId64, i);
  return (mha_label){number, (size_t)bytes};
}

/* What is too long ends with an ellipsis. */
void mha_drawing_put_label(mha_drawing *d, const mha_label *labels, int64_t i) {
  char number[NUMBER_BYTES];
  const mha_label label = label_at(labels, i, number);
  const bool fits = label_columns(label) <= MAX_COLUMNS;
  int left = fits ? MAX_COLUMNS : MAX_COLUMNS - 1;
  for (size_t at = 0; at < label.bytes;) {
    const size_t bytes = drawn_bytes(label.text + at, label.bytes - at);
    left -= columns_of(label.text + at, bytes);
    if (left < 0)
      break;
    put_character(d, label.text + at, bytes);
    at += bytes > 0 ? bytes : 1;
  }
  if (!fits)
    mha_drawing_put(d, "\xE2\x80\xA6");
}

int mha_drawing_label_width(const mha_label *labels, int64_t n) {
  char number[NUMBER_BYTES];
  int columns = 1;
  for (int64_t i = labels ? 0 : n - 1; i < n; i++) {
    const int here = label_columns(label_at(labels, i, number));
    columns = here > columns ? here : columns;
  }
  return MHA_COLUMN * (columns < MAX_COLUMNS ? columns : MAX_COLUMNS);
}

/* ---- Colours --------------------------------------------------------------------------------- */

enum { DARK_LEVEL = 140 };

/* Between anchors whose lightness (L* of CIELAB) is 100, 80, 60, 40 and 20: equal steps of the
 * weight look equal. */
void mha_drawing_put_colour(mha_drawing *d, int level) {
  static const int anchors[][3] = {
      {255, 255, 255}, {172, 204, 232}, {96, 148, 200}, {38, 96, 156}, {12, 48, 96}};
  enum { N_SPANS = sizeof anchors / sizeof anchors[0] - 1 };
  if (level == MHA_LEVEL_NAN) {
    mha_drawing_put(d, "#e08a2c");
    return;
  }
  const double at = (double)level / (MHA_N_LEVELS - 1) * N_SPANS;
  const int span = at < N_SPANS ? (int)at : N_SPANS - 1;
  mha_drawing_put(d, "#");
  for (int channel = 0; channel < 3; channel++) {
    const double from = anchors[span][channel];
    const double to = anchors[span + 1][channel];
    mha_drawing_put(d, "%02x", (unsigned)lround(from + (to - from) * (at - span)));
  }
}

int mha_drawing_level(float weight, double top) {
  if (isnan(weight))
    return MHA_LEVEL_NAN;
  return (int)lround(fmin(fmax((double)weight / top, 0), 1) * (MHA_N_LEVELS - 1));
}

bool mha_drawing_level_is_dark(int level) {
  return level >= DARK_LEVEL && level != MHA_LEVEL_NAN;
}

double mha_drawing_top(float largest) {
  static const double steps[] = {1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8};
  if (!(largest > 0 && largest < 1))
    return 1;
  const double unit = pow(10, floor(log10((double)largest)));
  for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++)
    if ((double)largest <= steps[i] * unit * (1 + (double)FLT_EPSILON))
      return steps[i] * unit;
  return 10 * unit;
}
