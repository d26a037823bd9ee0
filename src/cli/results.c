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

static mha_status check_earlier(const mha_result *results, int which, mha_error *error) {
  const mha_result *result = &results[which];
  for (int i = 0; i < which; i++)
    if (results[i].path && mha_output_meet(result->path, results[i].path))
      return mha_fail(error, MHA_ERROR_VALUE,
                      "%s is \"%s\", the file that %s names; rule: each result has its own",
                      result->name, mha_shown_path(result->path), results[i].name);
  return MHA_OK;
}

static mha_status check_writable(const mha_result *result, mha_error *error) {
  mha_error cause;
  bool exists = true;
  mha_status status =
      result->folder ? mha_output_check_folder(result->folder, &exists, &cause) : MHA_OK;
  if (!status && exists)
    status = mha_output_check(result->path, &cause);
  return status ? mha_fail(error, status, "%s: %s", result->name, cause.message) : MHA_OK;
}

mha_result mha_result_of(const mha_options *options, mha_option option) {
  const mha_option_value *value = &options->values[option];
  return (mha_result){mha_option_name(option), value->given ? value->text : NULL, NULL};
}

mha_status mha_results_check(const mha_options *options, const mha_result *results, int n,
                             mha_error *error) {
  mha_status status = MHA_OK;
  for (int i = 0; !status && i < n; i++) {
    if (!results[i].path)
      continue;
    status = check_streams(results[i].name, results[i].path, error);
    if (!status)
      status = check_weights(results[i].name, results[i].path, options, error);
    if (!status)
      status = check_earlier(results, i, error);
  }
  for (int i = 0; !status && i < n; i++)
    if (results[i].path)
      status = check_writable(&results[i], error);
  return status;
}
