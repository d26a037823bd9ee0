/* Owns statuses and messages. */
#include "error.h"

#include "arithmetic.h"

#include <stdarg.h>
#include <stdio.h>

const char *mha_status_name(mha_status status) {
  switch (status) {
  case MHA_OK:
    return "MHA_OK";
  case MHA_ERROR_NULL:
    return "MHA_ERROR_NULL";
  case MHA_ERROR_STRUCT_SIZE:
    return "MHA_ERROR_STRUCT_SIZE";
  case MHA_ERROR_SIZE:
    return "MHA_ERROR_SIZE";
  case MHA_ERROR_HEADS:
    return "MHA_ERROR_HEADS";
  case MHA_ERROR_STRIDE:
    return "MHA_ERROR_STRIDE";
  case MHA_ERROR_OVERFLOW:
    return "MHA_ERROR_OVERFLOW";
  case MHA_ERROR_VALUE:
    return "MHA_ERROR_VALUE";
  case MHA_ERROR_LENGTH:
    return "MHA_ERROR_LENGTH";
  case MHA_ERROR_WEIGHTS:
    return "MHA_ERROR_WEIGHTS";
  case MHA_ERROR_OVERLAP:
    return "MHA_ERROR_OVERLAP";
  case MHA_ERROR_BUSY:
    return "MHA_ERROR_BUSY";
  case MHA_ERROR_MEMORY:
    return "MHA_ERROR_MEMORY";
  case MHA_ERROR_UNSUPPORTED:
    return "MHA_ERROR_UNSUPPORTED";
  case MHA_ERROR_IO:
    return "MHA_ERROR_IO";
  case MHA_ERROR_FORMAT:
    return "MHA_ERROR_FORMAT";
  case MHA_ERROR_COMMUNICATION:
    return "MHA_ERROR_COMMUNICATION";
  }
  return "unknown status";
}

/* A text of n bytes that was cut there may end within a UTF-8 sequence, whose later bytes are
 * 10xxxxxx and whose first tells their number. */
static void cut_between_characters(char *text, size_t n) {
  size_t begin = n;
  while (begin > 0 && ((unsigned char)text[begin - 1] & 0xC0U) == 0x80U)
    begin--;
  if (begin > 0 && (unsigned char)text[begin - 1] >= 0xC0U)
    text[begin - 1] = '\0';
}

mha_status mha_fail(mha_error *error, mha_status status, const char *format, ...) {
  if (error) {
    va_list arguments;
    va_start(arguments, format);
    error->status = status;
    const int length = vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    if (length >= (int)sizeof error->message)
      cut_between_characters(error->message, sizeof error->message - 1);
  }
  return status;
}

mha_status mha_succeed(mha_error *error) {
  if (error) {
    error->status = MHA_OK;
    error->message[0] = '\0';
  }
  return MHA_OK;
}

mha_status mha_explain(mha_status status, mha_error *error) {
  if (status == MHA_ERROR_MEMORY)
    return mha_fail(error, status,
                    "the BLAS finds no memory for its own buffers; rule: it needs some for each "
                    "thread that multiplies");
  return status ? mha_fail(error, status,
                           "a product has a size or a stride beyond the BLAS's integer; rule: all "
                           "of them are at most %lld",
                           (long long)MHA_BLAS_MAX)
                : MHA_OK;
}
