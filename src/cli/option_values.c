/* Owns the reading of options' values: what each kind looks like, and the sentence for what looks
 * otherwise. */
#include "option_values.h"

#include "base/error.h"
#include "base/memory.h"

#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Files are mapped or replaced as a whole, which a stream is not fit for. */
static mha_status take_path(const mha_option_row *row, const mha_option_value *value,
                            mha_error *error) {
  if (*value->text == '\0')
    return mha_fail(error, MHA_ERROR_VALUE, "%s is empty; rule: a path", row->name);
  if (strcmp(value->text, "-") == 0)
    return mha_fail(error, MHA_ERROR_VALUE,
                    "%s is \"-\"; rule: a path, and no stream; ./- is the file of that name",
                    row->name);
  return MHA_OK;
}

/* strtoll and strtof skip leading spaces; a value has none. */
static bool begins_number(const char *text) {
  return *text != '\0' && !isspace((unsigned char)*text);
}

/* A whole number that ends at `end`, a comma or the word's end. */
static bool scan_integer(const char *text, const char **end, int64_t *value) {
  char *stop = NULL;
  if (!begins_number(text))
    return false;
  errno = 0;
  const long long number = strtoll(text, &stop, 10);
  if (errno != 0 || stop == text || (*stop != '\0' && *stop != ','))
    return false;
  *value = number;
  *end = stop;
  return true;
}

static mha_status take_integer(const mha_option_row *row, mha_option_value *value,
                               mha_error *error) {
  const char *end = NULL;
  if (scan_integer(value->text, &end, &value->integer) && *end == '\0' &&
      value->integer >= row->range.lowest && value->integer <= row->range.highest)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_VALUE,
                  "%s is \"%.64s\"; rule: a whole number from %" PRId64 " to %" PRId64, row->name,
                  value->text, row->range.lowest, row->range.highest);
}

static mha_status take_number(const mha_option_row *row, mha_option_value *value,
                              mha_error *error) {
  char *end = NULL;
  const bool positive = row->kind == MHA_KIND_POSITIVE;
  const bool bounded = row->range.lowest == 0;
  if (begins_number(value->text)) {
    value->number = strtod(value->text, &end);
    if (end != value->text && *end == '\0' && fabs(value->number) <= (double)FLT_MAX &&
        (!bounded || value->number >= 0) && (!positive || (float)value->number > 0))
      return MHA_OK;
  }
  return mha_fail(error, MHA_ERROR_VALUE, "%s is \"%.64s\"; rule: a finite number%s", row->name,
                  value->text,
                  positive  ? " greater than 0"
                  : bounded ? ", at least 0"
                            : "");
}

static mha_status take_share(const mha_option_row *row, mha_option_value *value, mha_error *error) {
  char *end = NULL;
  if (begins_number(value->text)) {
    value->number = strtod(value->text, &end);
    if (end != value->text && *end == '\0' && value->number >= 0 && (float)value->number < 1)
      return MHA_OK;
  }
  return mha_fail(error, MHA_ERROR_VALUE, "%s is \"%.64s\"; rule: a number from 0 and below 1",
                  row->name, value->text);
}

/* strtoull takes a minus sign. */
static mha_status take_word(const mha_option_row *row, mha_option_value *value, mha_error *error) {
  char *end = NULL;
  if (isdigit((unsigned char)*value->text)) {
    errno = 0;
    const unsigned long long number = strtoull(value->text, &end, 10);
    value->word = number;
    if (errno == 0 && *end == '\0' && number <= UINT64_MAX)
      return MHA_OK;
  }
  return mha_fail(error, MHA_ERROR_VALUE,
                  "%s is \"%.64s\"; rule: a whole number from 0 to %" PRIu64, row->name,
                  value->text, UINT64_MAX);
}

static mha_status take_alignment(const mha_option_row *row, mha_option_value *value,
                                 mha_error *error) {
  const char *end = NULL;
  value->alignment = MHA_ALIGN_OFFSET;
  if (strcmp(value->text, "top-left") == 0)
    value->alignment = MHA_ALIGN_TOP_LEFT;
  else if (strcmp(value->text, "bottom-right") == 0)
    value->alignment = MHA_ALIGN_BOTTOM_RIGHT;
  else if (!scan_integer(value->text, &end, &value->integer) || *end != '\0')
    return mha_fail(error, MHA_ERROR_VALUE,
                    "%s is \"%.64s\"; rule: top-left, bottom-right or a whole number", row->name,
                    value->text);
  return MHA_OK;
}

static mha_status take_rope(const mha_option_row *row, mha_option_value *value, mha_error *error) {
  value->rope = strcmp(value->text, "halves") == 0        ? MHA_ROPE_HALVES
                : strcmp(value->text, "interleaved") == 0 ? MHA_ROPE_INTERLEAVED
                                                          : MHA_ROPE_NONE;
  if (value->rope != MHA_ROPE_NONE)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_VALUE, "%s is \"%.64s\"; rule: %s", row->name, value->text,
                  row->argument);
}

/* In the order of computation. */
static const struct {
  const char *name;
  mha_stage stage;
} stages[] = {{"scaled", MHA_STAGE_SCALED},
              {"capped", MHA_STAGE_CAPPED},
              {"final", MHA_STAGE_FINAL},
              {"weights", MHA_STAGE_WEIGHTS}};

enum { N_STAGES = sizeof stages / sizeof stages[0] };

/* A number is refused, since C's enumeration and the order of computation count differently; which
 * name it may stand for is told. */
static mha_status take_stage(const mha_option_row *row, mha_option_value *value, mha_error *error) {
  const char *text = value->text;
  for (int i = 0; i < N_STAGES; i++)
    if (strcmp(text, stages[i].name) == 0) {
      value->stage = (int32_t)stages[i].stage;
      return MHA_OK;
    }
  if (text[0] >= '0' && text[0] < '0' + N_STAGES && text[1] == '\0')
    return mha_fail(error, MHA_ERROR_VALUE,
                    "%s is \"%s\"; rule: a name, %s; counted from 0 in this order it is %s",
                    row->name, text, row->argument, stages[text[0] - '0'].name);
  return mha_fail(error, MHA_ERROR_VALUE, "%s is \"%.64s\"; rule: %s", row->name, text,
                  row->argument);
}

static bool is_name(const char *text, const char *name) {
  while (*text != '\0' && toupper((unsigned char)*text) == *name)
    text++, name++;
  return *text == '\0' && *name == '\0';
}

/* A type that there is, but not here, is refused with the reason: only files leave out so many. */
static mha_status take_element(const mha_option_row *row, mha_option_value *value,
                               mha_error *error) {
  value->element = MHA_F32;
  while (value->element <= MHA_Q4_0 && !is_name(value->text, mha_element_name(value->element)))
    value->element++;
  if (value->element >= row->range.lowest && value->element <= row->range.highest)
    return MHA_OK;
  const bool blocks = value->element <= MHA_Q4_0 && row->range.highest < MHA_Q8_0;
  return mha_fail(error, MHA_ERROR_VALUE, "%s is \"%.64s\"; rule: %s%s", row->name, value->text,
                  row->argument, blocks ? ", since safetensors has no types with blocks" : "");
}

static int64_t count_items(const char *text) {
  int64_t n = 1;
  for (const char *comma = strchr(text, ','); comma; comma = strchr(comma + 1, ','))
    n++;
  return n;
}

static mha_status take_list(const mha_option_row *row, mha_option_value *value, mha_error *error) {
  const mha_allocator memory = mha_memory_allocator(NULL);
  const int64_t n = count_items(value->text);
  const char *at = value->text;
  bool good = row->kind == MHA_KIND_LIST || n == 2;
  value->list = mha_memory_allocate(&memory, (size_t)n * sizeof *value->list);
  if (!value->list)
    return mha_fail(error, MHA_ERROR_MEMORY, "no memory for the %" PRId64 " numbers of %s", n,
                    row->name);
  value->list_count = n;
  for (int64_t i = 0; good && i < n; i++) {
    good = scan_integer(at, &at, &value->list[i]) && value->list[i] >= row->range.lowest &&
           (*at == '\0') == (i == n - 1);
    at += good && *at == ',';
  }
  if (good)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_VALUE,
                  "%s is \"%.64s\"; rule: %swhole numbers of at least %" PRId64 " with %s between",
                  row->name, value->text, row->kind == MHA_KIND_PAIR ? "two " : "",
                  row->range.lowest, row->kind == MHA_KIND_PAIR ? "a comma" : "commas");
}

mha_status mha_option_value_take(const mha_option_row *row, mha_option_value *value,
                                 mha_error *error) {
  switch (row->kind) {
  case MHA_KIND_FLAG:
  case MHA_KIND_TEXT:
    return MHA_OK;
  case MHA_KIND_PATH:
    return take_path(row, value, error);
  case MHA_KIND_INTEGER:
    return take_integer(row, value, error);
  case MHA_KIND_NUMBER:
  case MHA_KIND_POSITIVE:
    return take_number(row, value, error);
  case MHA_KIND_SHARE:
    return take_share(row, value, error);
  case MHA_KIND_WORD:
    return take_word(row, value, error);
  case MHA_KIND_LIST:
  case MHA_KIND_PAIR:
    return take_list(row, value, error);
  case MHA_KIND_ALIGN:
    return take_alignment(row, value, error);
  case MHA_KIND_ROPE:
    return take_rope(row, value, error);
  case MHA_KIND_STAGE:
    return take_stage(row, value, error);
  case MHA_KIND_ELEMENT:
    return take_element(row, value, error);
  }
  return MHA_ERROR_VALUE;
}

void mha_option_value_release(mha_option_value *value) {
  const mha_allocator memory = mha_memory_allocator(NULL);
  mha_memory_release(&memory, value->list, (size_t)value->list_count * sizeof *value->list);
  value->list = NULL;
}
