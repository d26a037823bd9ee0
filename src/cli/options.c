/* Owns the command line's syntax: which options there are, what their values look like. */
#include "options.h"

#include "base/error.h"
#include "base/memory.h"

#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Shapes of values. */
typedef enum value_kind {
  KIND_FLAG,     /* no value */
  KIND_PATH,     /* any word but the empty one and "-" */
  KIND_TEXT,     /* any word */
  KIND_INTEGER,  /* a whole number from lowest to highest */
  KIND_NUMBER,   /* a finite number; lowest is 0 or INT64_MIN, no bound */
  KIND_POSITIVE, /* one that is greater than 0 */
  KIND_LIST,     /* whole numbers of at least lowest */
  KIND_PAIR,     /* two of them */
  KIND_ALIGN,    /* top-left, bottom-right or an offset */
  KIND_ROPE,     /* halves or interleaved */
  KIND_STAGE     /* a name of stages */
} value_kind;

enum { DEMO = MHA_COMMAND_DEMO, RUN = MHA_COMMAND_RUN, INSPECT = MHA_COMMAND_INSPECT };

static const struct option_row {
  const char *name;     /* without dashes: a word that stands alone, shown by this name */
  const char *argument; /* as --help shows it; NULL for a flag and for a word that stands alone */
  value_kind kind;
  int commands;
  bool required;
  struct {
    int64_t lowest, highest;
  } range; /* of each number; {0, 0} where the kind has none */
  const char *help;
} table[MHA_N_OPTIONS] = {
    /* clang-format off */
    [MHA_OPTION_PATH] = {"FILE|DIR", NULL, KIND_PATH, INSPECT, true, {0, 0},
        "safetensors file, or folder of .npy files"},
    [MHA_OPTION_WEIGHTS] = {"--weights", "FILE|DIR", KIND_PATH, RUN, true, {0, 0},
        "safetensors file or folder of .npy files with the layer's tensors, named as PyTorch, "
        "Hugging Face or GPT-2 do, or W_Q, W_K, W_V, W_O and, where there are biases, b_Q, b_K, "
        "b_V, b_O"},
    [MHA_OPTION_PREFIX] = {"--prefix", "P", KIND_TEXT, RUN | INSPECT, false, {0, 0},
        "stands before the names of the layer's tensors as given, dot included; may be empty "
        "(default: whatever stands before them)"},
    [MHA_OPTION_HEADS] = {"--heads", "H", KIND_INTEGER, RUN, true, {1, INT32_MAX},
        "number of heads"},
    [MHA_OPTION_KV_HEADS] = {"--kv-heads", "G", KIND_INTEGER, RUN, false, {1, INT32_MAX},
        "number of key/value heads, which divides H (default H)"},
    [MHA_OPTION_NORM_EPSILON] = {"--norm-epsilon", "E", KIND_POSITIVE, RUN, false, {0, 0},
        "eps of the RMS normalisation of Q and K; needed where the weights have one"},
    [MHA_OPTION_ROPE] = {"--rope", "halves|interleaved", KIND_ROPE, RUN, false, {0, 0},
        "rotary positions: which elements of a head turn together, p and p + R/2 or 2p and "
        "2p + 1 (default: none)"},
    [MHA_OPTION_ROPE_BASE] = {"--rope-base", "B", KIND_POSITIVE, RUN, false, {0, 0},
        "pair p turns by position*B^(-2p/R) (default 10000)"},
    [MHA_OPTION_ROTARY] = {"--rotary", "R", KIND_INTEGER, RUN, false, {2, INT32_MAX},
        "elements of each head that turn, even (default: as the tables have it, or d)"},
    [MHA_OPTION_ROPE_COS] = {"--rope-cos", "C.npy", KIND_PATH, RUN, false, {0, 0},
        "cosines of the angles in place of --rope-base, [positions][R/2]"},
    [MHA_OPTION_ROPE_SIN] = {"--rope-sin", "S.npy", KIND_PATH, RUN, false, {0, 0},
        "the sines that go with --rope-cos"},
    [MHA_OPTION_INPUT] = {"--input", "X.npy", KIND_PATH, RUN, true, {0, 0},
        "queries, [Lq][Eq] or [B][Lq][Eq]"},
    [MHA_OPTION_KEY] = {"--key", "K.npy", KIND_PATH, RUN, false, {0, 0},
        "keys, [Lk][Ek] or [B][Lk][Ek] (default: the queries)"},
    [MHA_OPTION_VALUE] = {"--value", "V.npy", KIND_PATH, RUN, false, {0, 0},
        "values, [Lk][Ev] or [B][Lk][Ev]; needs --key (default: the keys)"},
    [MHA_OPTION_OUTPUT] = {"--output", "Y.npy", KIND_PATH, RUN, true, {0, 0},
        "where the result goes, [Lq][Eo] or [B][Lq][Eo], as the input"},
    [MHA_OPTION_ALIGN] = {"--align", "top-left|bottom-right|N", KIND_ALIGN, RUN, false, {0, 0},
        "key i + off is query i's own, with off = 0, Lk - Lq or N; serves causal, window "
        "and ALiBi (default top-left)"},
    [MHA_OPTION_CAUSAL] = {"--causal", NULL, KIND_FLAG, RUN, false, {0, 0},
        "a query sees no key after its own"},
    [MHA_OPTION_WINDOW] = {"--window", "L,R", KIND_PAIR, RUN, false, {-1, INT64_MAX},
        "a query sees L keys before its own and R after it; -1 = all"},
    [MHA_OPTION_LENGTHS] = {"--lengths", "N,...", KIND_LIST, RUN, false, {0, INT64_MAX},
        "number of keys in each batch entry (default Lk)"},
    [MHA_OPTION_QUERY_LENGTHS] = {"--query-lengths", "N,...", KIND_LIST, RUN, false, {0, INT64_MAX},
        "number of queries in each batch entry (default Lq)"},
    [MHA_OPTION_ATTEND] = {"--attend", "M.npy", KIND_PATH, RUN, false, {0, 0},
        "boolean mask, bool or uint8, nonzero = attend: [B|1][H|1][Lq|1][Lk], with fewer "
        "dimensions the last ones"},
    [MHA_OPTION_BIAS] = {"--bias", "A.npy", KIND_PATH, RUN, false, {0, 0},
        "numbers added to the scores, shaped as for --attend; -inf hides"},
    [MHA_OPTION_SCALE] = {"--scale", "S", KIND_NUMBER, RUN, false, {INT64_MIN, INT64_MAX},
        "factor of q.k (default 1/sqrt(d))"},
    [MHA_OPTION_SOFTCAP] = {"--softcap", "C", KIND_NUMBER, RUN, false, {0, INT64_MAX},
        "scores become C*tanh(score/C); 0 = none (default 0)"},
    [MHA_OPTION_ALIBI] = {"--alibi", "S.npy", KIND_PATH, RUN, false, {0, 0},
        "ALiBi slopes, [H]"},
    [MHA_OPTION_SINKS] = {"--sinks", "S.npy", KIND_PATH, RUN, false, {0, 0},
        "extra logits without a value, [H]"},
    [MHA_OPTION_ATTN_WEIGHTS] = {"--attn-weights", "P.npy", KIND_PATH, RUN, false, {0, 0},
        "where the attention weights go, [B][H][Lq][Lk], without B for an input without B"},
    [MHA_OPTION_STAGE] = {"--stage", "scaled|capped|final|weights", KIND_STAGE, RUN, false, {0, 0},
        "which numbers --attn-weights writes: the scaled scores, those after softcap, the final "
        "ones after bias and masks, or the weights after softmax (default weights)"},
    [MHA_OPTION_LSE] = {"--lse", "F.npy", KIND_PATH, RUN, false, {0, 0},
        "where the log-sum-exp of the scores goes, [B][H][Lq], without B for an input "
        "without B"},
    [MHA_OPTION_SVG] = {"--svg", "FILE", KIND_PATH, DEMO | RUN, false, {0, 0},
        "where a picture of the attention weights after softmax goes, a heat map for each head"},
    [MHA_OPTION_LABELS] = {"--labels", "TEXT", KIND_TEXT, DEMO | RUN, false, {0, 0},
        "the tokens' labels in the picture, with commas between or, without a comma, one "
        "character each (default: their numbers; in demo the article's sentence)"},
    [MHA_OPTION_STEPS] = {"--steps", NULL, KIND_FLAG, RUN, false, {0, 0},
        "compute token by token over a key/value cache; needs --causal and self attention"},
    [MHA_OPTION_TRACE] = {"--trace", NULL, KIND_FLAG, DEMO | RUN, false, {0, 0},
        "print name, shape and strides of each step"},
    [MHA_OPTION_THREADS] = {"--threads", "N", KIND_INTEGER, RUN, false, {0, 1024},
        "number of threads; 0 = as many as the BLAS would use (default 0)"},
    [MHA_OPTION_HELP] = {"--help", NULL, KIND_FLAG, DEMO | RUN | INSPECT, false, {0, 0},
        "print this"},
    /* clang-format on */
};

/* Options that mean nothing alone. */
static const struct {
  mha_option option, needed;
} needs[] = {{MHA_OPTION_ROPE_BASE, MHA_OPTION_ROPE},     {MHA_OPTION_ROTARY, MHA_OPTION_ROPE},
             {MHA_OPTION_ROPE_COS, MHA_OPTION_ROPE},      {MHA_OPTION_VALUE, MHA_OPTION_KEY},
             {MHA_OPTION_STAGE, MHA_OPTION_ATTN_WEIGHTS}, {MHA_OPTION_LABELS, MHA_OPTION_SVG},
             {MHA_OPTION_STEPS, MHA_OPTION_CAUSAL}};

/* ---- Values ---------------------------------------------------------------------------------- */

/* Files are mapped or replaced as a whole, which a stream is not fit for. */
static mha_status take_path(const struct option_row *row, const mha_option_value *value,
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

static mha_status take_integer(const struct option_row *row, mha_option_value *value,
                               mha_error *error) {
  const char *end = NULL;
  if (scan_integer(value->text, &end, &value->integer) && *end == '\0' &&
      value->integer >= row->range.lowest && value->integer <= row->range.highest)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_VALUE,
                  "%s is \"%.64s\"; rule: a whole number from %" PRId64 " to %" PRId64, row->name,
                  value->text, row->range.lowest, row->range.highest);
}

static mha_status take_number(const struct option_row *row, mha_option_value *value,
                              mha_error *error) {
  char *end = NULL;
  const bool positive = row->kind == KIND_POSITIVE;
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

static mha_status take_alignment(const struct option_row *row, mha_option_value *value,
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

static mha_status take_rope(const struct option_row *row, mha_option_value *value,
                            mha_error *error) {
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
static mha_status take_stage(const struct option_row *row, mha_option_value *value,
                             mha_error *error) {
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

static int64_t count_items(const char *text) {
  int64_t n = 1;
  for (const char *comma = strchr(text, ','); comma; comma = strchr(comma + 1, ','))
    n++;
  return n;
}

static mha_status take_list(const struct option_row *row, mha_option_value *value,
                            mha_error *error) {
  const mha_allocator memory = mha_memory_allocator(NULL);
  const int64_t n = count_items(value->text);
  const char *at = value->text;
  bool good = row->kind == KIND_LIST || n == 2;
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
                  row->name, value->text, row->kind == KIND_PAIR ? "two " : "", row->range.lowest,
                  row->kind == KIND_PAIR ? "a comma" : "commas");
}

static mha_status take_value(const struct option_row *row, mha_option_value *value,
                             mha_error *error) {
  switch (row->kind) {
  case KIND_FLAG:
  case KIND_TEXT:
    return MHA_OK;
  case KIND_PATH:
    return take_path(row, value, error);
  case KIND_INTEGER:
    return take_integer(row, value, error);
  case KIND_NUMBER:
  case KIND_POSITIVE:
    return take_number(row, value, error);
  case KIND_LIST:
  case KIND_PAIR:
    return take_list(row, value, error);
  case KIND_ALIGN:
    return take_alignment(row, value, error);
  case KIND_ROPE:
    return take_rope(row, value, error);
  case KIND_STAGE:
    return take_stage(row, value, error);
  }
  return MHA_ERROR_VALUE;
}

/* ---- Words ----------------------------------------------------------------------------------- */

static bool has_name(const char *word) {
  return word[0] == '-';
}

/* The option of `command` whose name `word` is or begins with before a '=', or that stands without
 * a name; -1 if none. */
static int find_option(int command, const char *word) {
  const size_t length = strcspn(word, "=");
  for (int i = 0; i < MHA_N_OPTIONS; i++) {
    if (!(table[i].commands & command) || has_name(table[i].name) != has_name(word))
      continue;
    if (!has_name(word) ||
        (strlen(table[i].name) == length && memcmp(table[i].name, word, length) == 0))
      return i;
  }
  return -1;
}

/* Takes the option at words[*next] with its value, which is the next word or follows '='. */
static mha_status take_option(int command, int n_words, char **words, int *next,
                              mha_options *options, mha_error *error) {
  const char *word = words[(*next)++];
  const int option = find_option(command, word);
  const char *equals = has_name(word) ? strchr(word, '=') : NULL;
  if (option < 0)
    return mha_fail(error, MHA_ERROR_VALUE, "%s \"%.64s\"; rule: --help lists the options",
                    has_name(word) ? "unknown option" : "unexpected word", word);
  const struct option_row *row = &table[option];
  mha_option_value *value = &options->values[option];
  if (value->given)
    return mha_fail(error, MHA_ERROR_VALUE, "%s is given twice; rule: once", row->name);
  if (row->kind == KIND_FLAG && equals)
    return mha_fail(error, MHA_ERROR_VALUE, "\"%.64s\" has a value; rule: %s takes none", word,
                    row->name);
  if (row->argument && !equals && *next == n_words)
    return mha_fail(error, MHA_ERROR_VALUE, "%s has no value; rule: %s %s", row->name, row->name,
                    row->argument);
  value->given = true;
  if (row->argument)
    value->text = equals ? equals + 1 : words[(*next)++];
  else if (row->kind != KIND_FLAG)
    value->text = word;
  return take_value(row, value, error);
}

static mha_status fail_missing(const struct option_row *row, mha_error *error) {
  return mha_fail(error, MHA_ERROR_VALUE, "%s is missing; rule: %s%s%s", row->name,
                  row->argument ? row->name : "a path", row->argument ? " " : "",
                  row->argument ? row->argument : "");
}

/* After the last word: whether all is there. */
static mha_status check_complete(int command, const mha_option_value *values, mha_error *error) {
  for (int i = 0; i < MHA_N_OPTIONS; i++)
    if (table[i].required && (table[i].commands & command) && !values[i].given)
      return fail_missing(&table[i], error);
  for (size_t i = 0; i < sizeof needs / sizeof needs[0]; i++)
    if (values[needs[i].option].given && !values[needs[i].needed].given)
      return mha_fail(error, MHA_ERROR_VALUE, "%s is given without %s; rule: it needs that one",
                      table[needs[i].option].name, table[needs[i].needed].name);
  return MHA_OK;
}

mha_status mha_options_parse(int command, int n_words, char **words, mha_options *options,
                             mha_error *error) {
  mha_status status = MHA_OK;
  memset(options, 0, sizeof *options);
  for (int next = 0; !status && next < n_words;)
    status = take_option(command, n_words, words, &next, options, error);
  if (status || options->values[MHA_OPTION_HELP].given)
    return status;
  return check_complete(command, options->values, error);
}

const char *mha_option_name(mha_option option) {
  return table[option].name;
}

void mha_options_release(mha_options *options) {
  const mha_allocator memory = mha_memory_allocator(NULL);
  for (int i = 0; i < MHA_N_OPTIONS; i++) {
    mha_option_value *value = &options->values[i];
    mha_memory_release(&memory, value->list, (size_t)value->list_count * sizeof *value->list);
    value->list = NULL;
  }
}

/* ---- Help ------------------------------------------------------------------------------------ */

enum { HELP_INDENT = 10, HELP_WIDTH = 78 };

/* Prints `text` in lines of at most HELP_WIDTH, broken at spaces. */
static void print_wrapped(const char *text, FILE *stream) {
  int column = 0;
  while (*text != '\0') {
    const int length = (int)strcspn(text, " ");
    if (column == 0 || column + 1 + length > HELP_WIDTH) {
      fprintf(stream, "%s%*s", column == 0 ? "" : "\n", HELP_INDENT, "");
      column = HELP_INDENT;
    } else {
      fputc(' ', stream);
      column++;
    }
    fprintf(stream, "%.*s", length, text);
    column += length;
    text += length + (text[length] == ' ');
  }
  fputc('\n', stream);
}

void mha_options_help(int command, FILE *stream) {
  for (int i = 0; i < MHA_N_OPTIONS; i++) {
    if (!(table[i].commands & command))
      continue;
    fprintf(stream, "  %s%s%s%s\n", table[i].name, table[i].argument ? " " : "",
            table[i].argument ? table[i].argument : "", table[i].required ? "  (required)" : "");
    print_wrapped(table[i].help, stream);
  }
}
