/* The words behind options as values. */
#ifndef MHA_SRC_CLI_OPTION_VALUES_H
#define MHA_SRC_CLI_OPTION_VALUES_H

#include "options.h"

/* Shapes of values. */
typedef enum mha_value_kind {
  MHA_KIND_FLAG,     /* no value */
  MHA_KIND_PATH,     /* any word but the empty one and "-" */
  MHA_KIND_TEXT,     /* any word */
  MHA_KIND_INTEGER,  /* a whole number from lowest to highest */
  MHA_KIND_NUMBER,   /* a finite number; lowest is 0 or INT64_MIN, no bound */
  MHA_KIND_POSITIVE, /* one that is greater than 0 */
  MHA_KIND_SHARE,    /* one from 0 that is below 1, as a float too */
  MHA_KIND_WORD,     /* a whole number of 64 bits without a sign */
  MHA_KIND_LIST,     /* whole numbers of at least lowest */
  MHA_KIND_PAIR,     /* two of them */
  MHA_KIND_ALIGN,    /* top-left, bottom-right or an offset */
  MHA_KIND_ROPE,     /* halves or interleaved */
  MHA_KIND_STAGE,    /* the name of a stage */
  MHA_KIND_ELEMENT   /* the name of an element type from lowest to highest, in either case */
} mha_value_kind;

/* An option, as the table of options has it. */
typedef struct mha_option_row {
  const char *name;     /* without dashes: a word that stands alone, shown by this name */
  const char *argument; /* as --help shows it; NULL for a flag and for a word that stands alone */
  mha_value_kind kind;
  int commands;
  bool required;
  struct {
    int64_t lowest, highest;
  } range; /* of each number; {0, 0} where the kind has none */
  const char *help;
} mha_option_row;

/* Reads value->text as the row's kind. Fails with MHA_ERROR_VALUE or MEMORY; release in any case.
 */
mha_status mha_option_value_take(const mha_option_row *row, mha_option_value *value,
                                 mha_error *error);

void mha_option_value_release(mha_option_value *value);

#endif
