/* Owns the rules for the files that results go to. */
#define _XOPEN_SOURCE 700

#include "results.h"

#include "base/error.h"
#include "files/output.h"

#include <unistd.h>

/* A result takes its file's place as a whole, so that what a shell sends to the same file would be
 * lost. */
static mha_status check_streams(const char *name, const char *path, mha_error *error) {
  const bool to_stdout = mha_output_replaces(path, STDOUT_FILENO);
  if (!to_stdout && !mha_output_replaces(path, STDERR_FILENO))
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_VALUE,
                  "%s is \"%s\", to which standard %s goes; rule: a result has a file of its own",
                  name, mha_shown_path(path), to_stdout ? "output" : "error");
}

/* All inputs are read before a result is written, so that a result may replace an array; weights
 * hold more than one. */
static mha_status check_weights(const char *name, const char *path, const mha_options *options,
                                mha_error *error) {
  static const mha_option sources[] = {MHA_OPTION_WEIGHTS, MHA_OPTION_PATH};
  for (size_t i = 0; i < sizeof sources / sizeof sources[0]; i++) {
    const mha_option_value *weights = &options->values[sources[i]];
    if (weights->given && mha_output_meet(path, weights->text))
      return mha_fail(error, MHA_ERROR_VALUE,
                      "%s is \"%s\", which %s names too; rule: a result replaces no weights", name,
                      mha_shown_path(path), mha_option_name(sources[i]));
  }
  return MHA_OK;
}

static mha_status check_earlier(const mha_options *options, const mha_option *results, int which,
                                mha_error *error) {
  const char *path = options->values[results[which]].text;
  for (int i = 0; i < which; i++) {
    const mha_option_value *earlier = &options->values[results[i]];
    if (earlier->given && mha_output_meet(path, earlier->text))
      return mha_fail(error, MHA_ERROR_VALUE,
                      "%s is \"%s\", the file that %s names; rule: each result has its own",
                      mha_option_name(results[which]), mha_shown_path(path),
                      mha_option_name(results[i]));
  }
  return MHA_OK;
}

static mha_status check_writable(const char *name, const char *path, mha_error *error) {
  mha_error cause;
  const mha_status status = mha_output_check(path, &cause);
  return status ? mha_fail(error, status, "%s: %s", name, cause.message) : MHA_OK;
}

mha_status mha_results_check(const mha_options *options, const mha_option *results, int n,
                             mha_error *error) {
  mha_status status = MHA_OK;
  for (int i = 0; !status && i < n; i++) {
    const mha_option_value *value = &options->values[results[i]];
    const char *name = mha_option_name(results[i]);
    if (!value->given)
      continue;
    status = check_streams(name, value->text, error);
    if (!status)
      status = check_weights(name, value->text, options, error);
    if (!status)
      status = check_earlier(options, results, i, error);
  }
  for (int i = 0; !status && i < n; i++)
    if (options->values[results[i]].given)
      status = check_writable(mha_option_name(results[i]), options->values[results[i]].text, error);
  return status;
}
