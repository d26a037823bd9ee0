/* The command line: one table of options, from which parsing and --help both come. */
#ifndef MHA_SRC_CLI_OPTIONS_H
#define MHA_SRC_CLI_OPTIONS_H

#include "mha.h"

#include <stdbool.h>
#include <stdio.h>

/* Commands, as bits: an option belongs to one or more of them. */
enum {
  MHA_COMMAND_DEMO = 1,
  MHA_COMMAND_RUN = 2,
  MHA_COMMAND_INSPECT = 4,
  MHA_COMMAND_CONVERT = 8
};

typedef enum mha_option {
  MHA_OPTION_PATH,   /* the first word that stands without a name before it */
  MHA_OPTION_TARGET, /* the second */
  MHA_OPTION_TYPE,
  MHA_OPTION_WEIGHTS,
  MHA_OPTION_PREFIX,
  MHA_OPTION_HEADS,
  MHA_OPTION_KV_HEADS,
  MHA_OPTION_KEEP_TYPE,
  MHA_OPTION_NORM_EPSILON,
  MHA_OPTION_ROPE,
  MHA_OPTION_ROPE_BASE,
  MHA_OPTION_ROTARY,
  MHA_OPTION_ROPE_COS,
  MHA_OPTION_ROPE_SIN,
  MHA_OPTION_INPUT,
  MHA_OPTION_KEY,
  MHA_OPTION_VALUE,
  MHA_OPTION_OUTPUT,
  MHA_OPTION_ALIGN,
  MHA_OPTION_CAUSAL,
  MHA_OPTION_WINDOW,
  MHA_OPTION_LENGTHS,
  MHA_OPTION_QUERY_LENGTHS,
  MHA_OPTION_ATTEND,
  MHA_OPTION_BIAS,
  MHA_OPTION_SCALE,
  MHA_OPTION_SOFTCAP,
  MHA_OPTION_ALIBI,
  MHA_OPTION_SINKS,
  MHA_OPTION_DROPOUT,
  MHA_OPTION_SEED,
  MHA_OPTION_CALL,
  MHA_OPTION_ATTN_WEIGHTS,
  MHA_OPTION_STAGE,
  MHA_OPTION_LSE,
  MHA_OPTION_SVG,
  MHA_OPTION_LABELS,
  MHA_OPTION_BACKWARD,
  MHA_OPTION_GRADIENTS,
  MHA_OPTION_STEPS,
  MHA_OPTION_CACHE_TYPE,
  MHA_OPTION_CACHE_PAGES,
  MHA_OPTION_TRACE,
  MHA_OPTION_THREADS,
  MHA_OPTION_HELP,
  MHA_N_OPTIONS
} mha_option;

/* What an option was given; the members that its kind does not use are 0. */
typedef struct mha_option_value {
  bool given;
  const char *text;  /* the word as it stands in argv */
  int64_t integer;   /* a number, or the offset of --align */
  int32_t alignment; /* mha_alignment of --align */
  int32_t rope;      /* mha_rope of --rope */
  int32_t stage;     /* mha_stage of --stage; 0, the weights, without it */
  int32_t element;   /* mha_element of --type and --cache-type; 0, float32, without it */
  double number;     /* finite as a float too */
  uint64_t word;     /* --seed, --call */
  int64_t *list;     /* --window, --lengths, --query-lengths */
  int64_t list_count;
} mha_option_value;

typedef struct mha_options {
  mha_option_value values[MHA_N_OPTIONS];
} mha_options;

/* Reads the words behind the command's name. Fails with MHA_ERROR_VALUE (or MEMORY) on the first
 * one that is wrong, or if one is missing; with --help nothing is. Release in any case. */
mha_status mha_options_parse(int command, int n_words, char **words, mha_options *options,
                             mha_error *error);

/* As it is written, dashes included. */
const char *mha_option_name(mha_option option);

void mha_options_release(mha_options *options);

/* Prints the options of a command, a line or two for each. */
void mha_options_help(int command, FILE *stream);

#endif
