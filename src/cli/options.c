/* Owns the command line's syntax: which options there are, how words become options. */
#include "options.h"

#include "option_values.h"

#include "base/error.h"

#include <string.h>

enum {
  DEMO = MHA_COMMAND_DEMO,
  RUN = MHA_COMMAND_RUN,
  INSPECT = MHA_COMMAND_INSPECT,
  CONVERT = MHA_COMMAND_CONVERT
};

static const mha_option_row table[MHA_N_OPTIONS] = {
    /* clang-format off */
    [MHA_OPTION_PATH] = {"FILE|DIR", NULL, MHA_KIND_PATH, INSPECT | CONVERT, true, {0, 0},
        "safetensors or GGUF file, or folder of .npy files"},
    [MHA_OPTION_TARGET] = {"OUT", NULL, MHA_KIND_PATH, CONVERT, true, {0, 0},
        "safetensors file that the layer goes to"},
    [MHA_OPTION_TYPE] = {"--type", "f32|f16|bf16", MHA_KIND_ELEMENT, CONVERT, true,
        {MHA_F32, MHA_BF16},
        "what the numbers of the matrices become; safetensors has no types with blocks"},
    [MHA_OPTION_WEIGHTS] = {"--weights", "FILE|DIR", MHA_KIND_PATH, RUN, true, {0, 0},
        "safetensors or GGUF file, or folder of .npy files, with the layer's tensors, named as "
        "PyTorch, Hugging Face or GPT-2 do, or W_Q, W_K, W_V, W_O and, where there are biases, "
        "b_Q, b_K, b_V, b_O"},
    [MHA_OPTION_PREFIX] = {"--prefix", "P", MHA_KIND_TEXT, RUN | INSPECT | CONVERT, false, {0, 0},
        "stands before the names of the layer's tensors as given, dot included; may be empty "
        "(default: whatever stands before them)"},
    [MHA_OPTION_HEADS] = {"--heads", "H", MHA_KIND_INTEGER, RUN | CONVERT, false, {1, INT32_MAX},
        "number of heads; needed unless the file tells it, as GGUF files do"},
    [MHA_OPTION_KV_HEADS] = {"--kv-heads", "G", MHA_KIND_INTEGER, RUN | CONVERT, false,
        {1, INT32_MAX},
        "number of key/value heads, which divides H (default: as the file tells it, or H)"},
    [MHA_OPTION_KEEP_TYPE] = {"--keep-type", NULL, MHA_KIND_FLAG, RUN, false, {0, 0},
        "keep matrices of 16 bits or with blocks as the file has them, and multiply them so "
        "(default: they become float32 when they are loaded)"},
    [MHA_OPTION_NORM_EPSILON] = {"--norm-epsilon", "E", MHA_KIND_POSITIVE, RUN, false, {0, 0},
        "eps of the RMS normalisation of Q and K; needed where the weights have one, unless the "
        "file tells it"},
    [MHA_OPTION_ROPE] = {"--rope", "halves|interleaved", MHA_KIND_ROPE, RUN, false, {0, 0},
        "rotary positions: which elements of a head turn together, p and p + R/2 or 2p and "
        "2p + 1 (default: none)"},
    [MHA_OPTION_ROPE_BASE] = {"--rope-base", "B", MHA_KIND_POSITIVE, RUN, false, {0, 0},
        "pair p turns by position*B^(-2p/R) (default: as the file tells it, or 10000)"},
    [MHA_OPTION_ROTARY] = {"--rotary", "R", MHA_KIND_INTEGER, RUN, false, {2, INT32_MAX},
        "elements of each head that turn, even (default: as the tables have it, as the file tells "
        "it, or d)"},
    [MHA_OPTION_ROPE_COS] = {"--rope-cos", "C.npy", MHA_KIND_PATH, RUN, false, {0, 0},
        "cosines of the angles in place of --rope-base, [positions][R/2]"},
    [MHA_OPTION_ROPE_SIN] = {"--rope-sin", "S.npy", MHA_KIND_PATH, RUN, false, {0, 0},
        "the sines that go with --rope-cos"},
    [MHA_OPTION_INPUT] = {"--input", "X.npy", MHA_KIND_PATH, RUN, true, {0, 0},
        "queries, [Lq][Eq] or [B][Lq][Eq]"},
    [MHA_OPTION_KEY] = {"--key", "K.npy", MHA_KIND_PATH, RUN, false, {0, 0},
        "keys, [Lk][Ek] or [B][Lk][Ek] (default: the queries)"},
    [MHA_OPTION_VALUE] = {"--value", "V.npy", MHA_KIND_PATH, RUN, false, {0, 0},
        "values, [Lk][Ev] or [B][Lk][Ev]; needs --key (default: the keys)"},
    [MHA_OPTION_OUTPUT] = {"--output", "Y.npy", MHA_KIND_PATH, RUN, true, {0, 0},
        "where the result goes, [Lq][Eo] or [B][Lq][Eo], as the input"},
    [MHA_OPTION_ALIGN] = {"--align", "top-left|bottom-right|N", MHA_KIND_ALIGN, RUN, false, {0, 0},
        "key i + off is query i's own, with off = 0, Lk - Lq or N; serves causal, window "
        "and ALiBi (default top-left)"},
    [MHA_OPTION_CAUSAL] = {"--causal", NULL, MHA_KIND_FLAG, RUN, false, {0, 0},
        "a query sees no key after its own"},
    [MHA_OPTION_WINDOW] = {"--window", "L,R", MHA_KIND_PAIR, RUN, false, {-1, INT64_MAX},
        "a query sees L keys before its own and R after it; -1 = all"},
    [MHA_OPTION_LENGTHS] = {"--lengths", "N,...", MHA_KIND_LIST, RUN, false, {0, INT64_MAX},
        "number of keys in each batch entry (default Lk)"},
    [MHA_OPTION_QUERY_LENGTHS] = {"--query-lengths", "N,...", MHA_KIND_LIST, RUN, false,
        {0, INT64_MAX},
        "number of queries in each batch entry (default Lq)"},
    [MHA_OPTION_ATTEND] = {"--attend", "M.npy", MHA_KIND_PATH, RUN, false, {0, 0},
        "boolean mask, bool or uint8, nonzero = attend: [B|1][H|1][Lq|1][Lk], with fewer "
        "dimensions the last ones"},
    [MHA_OPTION_BIAS] = {"--bias", "A.npy", MHA_KIND_PATH, RUN, false, {0, 0},
        "numbers added to the scores, shaped as for --attend; -inf hides"},
    [MHA_OPTION_SCALE] = {"--scale", "S", MHA_KIND_NUMBER, RUN, false, {INT64_MIN, INT64_MAX},
        "factor of q.k (default 1/sqrt(d))"},
    [MHA_OPTION_SOFTCAP] = {"--softcap", "C", MHA_KIND_NUMBER, RUN, false, {0, INT64_MAX},
        "scores become C*tanh(score/C); 0 = none (default 0)"},
    [MHA_OPTION_ALIBI] = {"--alibi", "S.npy", MHA_KIND_PATH, RUN, false, {0, 0},
        "ALiBi slopes, [H]"},
    [MHA_OPTION_SINKS] = {"--sinks", "S.npy", MHA_KIND_PATH, RUN, false, {0, 0},
        "extra logits without a value, [H]"},
    [MHA_OPTION_DROPOUT] = {"--dropout", "P", MHA_KIND_SHARE, RUN, false, {0, 0},
        "probability with which a weight becomes 0 after the softmax; the others are multiplied "
        "by 1/(1 - P) (default 0)"},
    [MHA_OPTION_SEED] = {"--seed", "N", MHA_KIND_WORD, RUN, false, {0, 0},
        "seed of the random numbers of --dropout (default 0)"},
    [MHA_OPTION_CALL] = {"--call", "N", MHA_KIND_WORD, RUN, false, {0, 0},
        "number of the call, such as the training step: another one drops other weights "
        "(default 0)"},
    [MHA_OPTION_ATTN_WEIGHTS] = {"--attn-weights", "P.npy", MHA_KIND_PATH, RUN, false, {0, 0},
        "where the attention weights go, [B][H][Lq][Lk], without B for an input without B"},
    [MHA_OPTION_STAGE] = {"--stage", "scaled|capped|final|weights", MHA_KIND_STAGE, RUN, false,
        {0, 0},
        "which numbers --attn-weights writes: the scaled scores, those after softcap, the final "
        "ones after bias and masks, or the weights after softmax (default weights)"},
    [MHA_OPTION_LSE] = {"--lse", "F.npy", MHA_KIND_PATH, RUN, false, {0, 0},
        "where the log-sum-exp of the scores goes, [B][H][Lq], without B for an input "
        "without B"},
    [MHA_OPTION_SVG] = {"--svg", "FILE", MHA_KIND_PATH, DEMO | RUN, false, {0, 0},
        "where a picture of the attention weights after softmax goes, a heat map for each head"},
    [MHA_OPTION_LABELS] = {"--labels", "TEXT", MHA_KIND_TEXT, DEMO | RUN, false, {0, 0},
        "the tokens' labels in the picture, with commas between or, without a comma, one "
        "character each (default: their numbers; in demo the article's sentence)"},
    [MHA_OPTION_BACKWARD] = {"--backward", "DY.npy", MHA_KIND_PATH, RUN, false, {0, 0},
        "gradient of a loss with respect to the output, shaped as that: compute the way back too; "
        "needs --gradients"},
    [MHA_OPTION_GRADIENTS] = {"--gradients", "FOLDER", MHA_KIND_PATH, RUN, false, {0, 0},
        "where the gradients go, each as the thing itself is shaped: d_query.npy, d_wq.npy, ... "
        "of all that the layer and the call have; made if there is none"},
    [MHA_OPTION_STEPS] = {"--steps", NULL, MHA_KIND_FLAG, RUN, false, {0, 0},
        "compute token by token over a key/value cache; needs --causal and self attention"},
    [MHA_OPTION_CACHE_TYPE] = {"--cache-type", "f32|f16|bf16|q8_0", MHA_KIND_ELEMENT, RUN, false,
        {MHA_F32, MHA_Q8_0},
        "what keys and values are rounded to in the cache; q8_0 needs head sizes that are "
        "multiples of 32 (default f32)"},
    [MHA_OPTION_CACHE_PAGES] = {"--cache-pages", "T", MHA_KIND_INTEGER, RUN, false,
        {0, INT32_MAX},
        "tokens of a page of the cache, a power of two from 16 on; 0 = no pages (default 0)"},
    [MHA_OPTION_TRACE] = {"--trace", NULL, MHA_KIND_FLAG, DEMO | RUN, false, {0, 0},
        "print name, shape and strides of each step"},
    [MHA_OPTION_THREADS] = {"--threads", "N", MHA_KIND_INTEGER, RUN, false, {0, 1024},
        "number of threads; 0 = as many as the BLAS would use (default 0)"},
    [MHA_OPTION_HELP] = {"--help", NULL, MHA_KIND_FLAG, DEMO | RUN | INSPECT | CONVERT, false,
        {0, 0},
        "print this"},
    /* clang-format on */
};

/* Options that mean nothing alone. */
static const struct {
  mha_option option, needed;
} needs[] = {
    {MHA_OPTION_ROPE_BASE, MHA_OPTION_ROPE},     {MHA_OPTION_ROTARY, MHA_OPTION_ROPE},
    {MHA_OPTION_ROPE_COS, MHA_OPTION_ROPE},      {MHA_OPTION_VALUE, MHA_OPTION_KEY},
    {MHA_OPTION_STAGE, MHA_OPTION_ATTN_WEIGHTS}, {MHA_OPTION_LABELS, MHA_OPTION_SVG},
    {MHA_OPTION_STEPS, MHA_OPTION_CAUSAL},       {MHA_OPTION_CACHE_TYPE, MHA_OPTION_STEPS},
    {MHA_OPTION_CACHE_PAGES, MHA_OPTION_STEPS},  {MHA_OPTION_KV_HEADS, MHA_OPTION_HEADS},
    {MHA_OPTION_SEED, MHA_OPTION_DROPOUT},       {MHA_OPTION_CALL, MHA_OPTION_DROPOUT},
    {MHA_OPTION_BACKWARD, MHA_OPTION_GRADIENTS}, {MHA_OPTION_GRADIENTS, MHA_OPTION_BACKWARD}};

/* ---- Words ----------------------------------------------------------------------------------- */

static bool has_name(const char *word) {
  return word[0] == '-';
}

/* The option of `command` whose name `word` is or begins with before a '='; -1 if none. */
static int find_named(int command, const char *word) {
  const size_t length = strcspn(word, "=");
  for (int i = 0; i < MHA_N_OPTIONS; i++)
    if ((table[i].commands & command) && strlen(table[i].name) == length &&
        memcmp(table[i].name, word, length) == 0)
      return i;
  return -1;
}

/* The first option of `command` that stands without a name and is not given yet, else the last one;
 * -1 if there is none. */
static int find_nameless(int command, const mha_option_value *values) {
  int last = -1;
  for (int i = 0; i < MHA_N_OPTIONS && (last < 0 || values[last].given); i++)
    if ((table[i].commands & command) && !has_name(table[i].name))
      last = i;
  return last;
}

/* Takes the option at words[*next] with its value, which is the next word or follows '='. */
static mha_status take_option(int command, int n_words, char **words, int *next,
                              mha_options *options, mha_error *error) {
  const char *word = words[(*next)++];
  const int option =
      has_name(word) ? find_named(command, word) : find_nameless(command, options->values);
  const char *equals = has_name(word) ? strchr(word, '=') : NULL;
  if (option < 0)
    return mha_fail(error, MHA_ERROR_VALUE, "%s \"%.64s\"; rule: --help lists the options",
                    has_name(word) ? "unknown option" : "unexpected word", word);
  const mha_option_row *row = &table[option];
  mha_option_value *value = &options->values[option];
  if (value->given)
    return mha_fail(error, MHA_ERROR_VALUE, "%s is given twice; rule: once", row->name);
  if (row->kind == MHA_KIND_FLAG && equals)
    return mha_fail(error, MHA_ERROR_VALUE, "\"%.64s\" has a value; rule: %s takes none", word,
                    row->name);
  if (row->argument && !equals && *next == n_words)
    return mha_fail(error, MHA_ERROR_VALUE, "%s has no value; rule: %s %s", row->name, row->name,
                    row->argument);
  value->given = true;
  if (row->argument)
    value->text = equals ? equals + 1 : words[(*next)++];
  else if (row->kind != MHA_KIND_FLAG)
    value->text = word;
  return mha_option_value_take(row, value, error);
}

static mha_status fail_missing(const mha_option_row *row, mha_error *error) {
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
  for (int i = 0; i < MHA_N_OPTIONS; i++)
    mha_option_value_release(&options->values[i]);
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
