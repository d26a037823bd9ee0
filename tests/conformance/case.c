/* Owns the reading of a case, its memory and its outcome. */
#include "case.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Outcome ----------------------------------------------------------------------------------
 */

static bool settle(conf_case *c, conf_outcome outcome, const char *format, va_list arguments) {
  if (c->outcome == CONF_PASS) {
    c->outcome = outcome;
    vsnprintf(c->reason, sizeof c->reason, format, arguments);
  }
  return false;
}

bool conf_fail(conf_case *c, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  settle(c, CONF_FAIL, format, arguments);
  va_end(arguments);
  return false;
}

bool conf_cannot(conf_case *c, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  settle(c, CONF_CANNOT, format, arguments);
  va_end(arguments);
  return false;
}

bool conf_expect(conf_case *c, mha_status status, const mha_error *error) {
  return status == MHA_OK || conf_fail(c, "%s: %s", mha_status_name(status), error->message);
}

/* ---- Memory -----------------------------------------------------------------------------------
 */

static void *allocate(conf_case *c, int64_t n, size_t item_bytes) {
  void *block = NULL;
  if (n >= 0 && c->n_blocks < CONF_MAX_BLOCKS)
    block = calloc((size_t)n + 1, item_bytes); /* one more: never NULL for nothing */
  if (block)
    c->blocks[c->n_blocks++] = block;
  else
    conf_fail(c, "there is no memory for %lld numbers", (long long)n);
  return block;
}

float *conf_floats(conf_case *c, int64_t n) {
  float *numbers = allocate(c, n, sizeof *numbers);
  for (int64_t i = 0; numbers && i < n; i++)
    numbers[i] = NAN;
  return numbers;
}

double *conf_doubles(conf_case *c, int64_t n) {
  return allocate(c, n, sizeof(double));
}

uint8_t *conf_bytes(conf_case *c, int64_t n) {
  return allocate(c, n, sizeof(uint8_t));
}

int64_t *conf_integers(conf_case *c, int64_t n) {
  return allocate(c, n, sizeof(int64_t));
}

/* ---- Reading ----------------------------------------------------------------------------------
 */

static bool find_kind(conf_case *c, const conf_array *array, json_t *json, mha_npy_kind *kind) {
  static const struct {
    const char *dtype;
    mha_npy_kind kind;
  } table[] = {{"float16", MHA_NPY_FLOATS}, {"float32", MHA_NPY_FLOATS},
               {"float64", MHA_NPY_FLOATS}, {"bool", MHA_NPY_BYTES},
               {"uint8", MHA_NPY_BYTES},    {"int32", MHA_NPY_INTEGERS},
               {"int64", MHA_NPY_INTEGERS}};
  const char *dtype = json_string_value(json_object_get(json, "dtype"));
  for (size_t i = 0; dtype && i < sizeof table / sizeof table[0]; i++) {
    if (strcmp(dtype, table[i].dtype) == 0) {
      *kind = table[i].kind;
      return true;
    }
  }
  return conf_cannot(c, "%s is of the type %s", array->name, dtype ? dtype : "(none)");
}

static bool has_stated_shape(const conf_array *array, json_t *shape) {
  const mha_npy_array *numbers = &array->numbers;
  if (!json_is_array(shape) || json_array_size(shape) != (size_t)numbers->rank)
    return false;
  for (int i = 0; i < numbers->rank; i++) {
    if (json_integer_value(json_array_get(shape, (size_t)i)) != numbers->shape[i])
      return false;
  }
  return true;
}

static bool read_array(conf_case *c, const char *folder, json_t *json, conf_array *array) {
  char path[MHA_PATH_BYTES];
  mha_error error;
  const char *file = json_string_value(json_object_get(json, "file"));
  if (!find_kind(c, array, json, &array->kind))
    return false;
  const int length = snprintf(path, sizeof path, "%s/%s", folder, file ? file : "");
  if (!file || length < 0 || (size_t)length >= sizeof path)
    return conf_fail(c, "%s names no file", array->name);
  if (!conf_expect(c, mha_npy_read(path, array->kind, NULL, &array->numbers, &error), &error))
    return false;
  if (!has_stated_shape(array, json_object_get(json, "shape")))
    return conf_fail(c, "%s has another shape in its file than in case.json", array->name);
  return true;
}

static bool read_arrays(conf_case *c, const char *folder, const char *section,
                        conf_arrays *arrays) {
  const char *name;
  json_t *json;
  json_object_foreach(json_object_get(c->json, section), name, json) {
    if (arrays->n == CONF_MAX_ARRAYS)
      return conf_fail(c, "there are more than %d %s", CONF_MAX_ARRAYS, section);
    conf_array *array = &arrays->items[arrays->n++];
    array->name = name;
    if (!read_array(c, folder, json, array))
      return false;
  }
  return true;
}

static bool read_tolerance(conf_case *c) {
  json_t *tolerance = json_object_get(c->json, "suggested_tolerance");
  json_t *atol = json_object_get(tolerance, "atol");
  json_t *rtol = json_object_get(tolerance, "rtol");
  c->atol = json_number_value(atol);
  c->rtol = json_number_value(rtol);
  if (json_is_number(atol) && json_is_number(rtol) && c->atol >= 0 && c->rtol >= 0)
    return true;
  return conf_fail(c, "suggested_tolerance lacks atol or rtol, numbers of at least 0");
}

bool conf_case_open(const char *folder, conf_case *c) {
  char path[MHA_PATH_BYTES];
  json_error_t error;
  memset(c, 0, sizeof *c);
  const int length = snprintf(path, sizeof path, "%s/case.json", folder);
  if (length < 0 || (size_t)length >= sizeof path)
    return conf_fail(c, "the path is too long");
  c->json = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
  if (!c->json)
    return conf_fail(c, "case.json cannot be read: %s (line %d)", error.text, error.line);
  return read_tolerance(c) && read_arrays(c, folder, "inputs", &c->inputs) &&
         read_arrays(c, folder, "outputs", &c->outputs);
}

static void release_arrays(conf_arrays *arrays) {
  for (int i = 0; i < arrays->n; i++)
    mha_npy_array_release(&arrays->items[i].numbers);
}

void conf_case_release(conf_case *c) {
  release_arrays(&c->inputs);
  release_arrays(&c->outputs);
  for (int i = 0; i < c->n_blocks; i++)
    free(c->blocks[i]);
  json_decref(c->json);
}

/* ---- What the JSON says -----------------------------------------------------------------------
 */

const char *conf_text(const conf_case *c, const char *name) {
  const char *text = json_string_value(json_object_get(c->json, name));
  return text ? text : "";
}

bool conf_attribute(const conf_case *c, const char *name, double *value) {
  json_t *json = json_object_get(json_object_get(c->json, "attributes"), name);
  if (!json_is_number(json))
    return false;
  *value = json_number_value(json);
  return true;
}

bool conf_know_attributes(conf_case *c, const char *const *known) {
  const char *name;
  json_t *json;
  json_object_foreach(json_object_get(c->json, "attributes"), name, json) {
    int i = 0;
    while (known[i] && strcmp(known[i], name) != 0)
      i++;
    if (!known[i])
      return conf_cannot(c, "the attribute %s is not translated", name);
  }
  return true;
}

bool conf_dimension(conf_case *c, const char *name, int64_t *value) {
  json_t *json = json_object_get(json_object_get(c->json, "dims"), name);
  *value = json_integer_value(json);
  if (json_is_integer(json) && *value >= 0)
    return true;
  return conf_fail(c, "dims lacks %s, an integer of at least 0", name);
}

/* ---- Arrays -----------------------------------------------------------------------------------
 */

static int find_array(const conf_arrays *arrays, const char *name) {
  for (int i = 0; i < arrays->n; i++) {
    if (strcmp(arrays->items[i].name, name) == 0)
      return i;
  }
  return -1;
}

const conf_array *conf_input(conf_case *c, const char *name) {
  const int i = find_array(&c->inputs, name);
  if (i < 0)
    return NULL;
  c->inputs.items[i].done = true;
  return &c->inputs.items[i];
}

bool conf_floats_input(conf_case *c, const char *name, const conf_array **array) {
  *array = conf_input(c, name);
  if (!*array)
    return conf_fail(c, "there is no input %s", name);
  if ((*array)->kind != MHA_NPY_FLOATS)
    return conf_cannot(c, "%s does not hold floating-point numbers", name);
  return true;
}

bool conf_all_taken(conf_case *c) {
  for (int i = 0; i < c->inputs.n; i++) {
    if (!c->inputs.items[i].done)
      return conf_cannot(c, "the input %s is not translated", c->inputs.items[i].name);
  }
  return true;
}

bool conf_has_output(const conf_case *c, const char *name) {
  return find_array(&c->outputs, name) >= 0;
}

void conf_leave_out(conf_case *c, const char *name) {
  const int i = find_array(&c->outputs, name);
  if (i < 0 || c->outputs.items[i].done)
    return;
  c->outputs.items[i].done = true;
  const size_t length = strlen(c->left_out);
  snprintf(c->left_out + length, sizeof c->left_out - length, "%s%s", length ? ", " : "", name);
}

bool conf_all_compared(conf_case *c) {
  for (int i = 0; i < c->outputs.n; i++) {
    if (!c->outputs.items[i].done)
      return conf_cannot(c, "the output %s is not translated", c->outputs.items[i].name);
  }
  return c->n_compared > 0 || conf_fail(c, "no output was compared");
}

/* ---- Comparison -------------------------------------------------------------------------------
 */

/* Whether the two agree; the error of finite numbers raises the maximum. */
static bool agree(conf_case *c, double actual, double expected) {
  if (isnan(expected))
    return isnan(actual);
  if (isinf(expected) || !isfinite(actual))
    return actual == expected;
  const double error = fabs(actual - expected);
  c->max_error = fmax(c->max_error, error);
  return error <= c->atol + c->rtol * fabs(expected);
}

static bool report_difference(conf_case *c, const conf_array *output, int64_t place, double actual,
                              double expected) {
  char index[128] = "";
  for (int i = output->numbers.rank - 1; i >= 0; i--) {
    char tail[sizeof index];
    memcpy(tail, index, sizeof tail);
    snprintf(index, sizeof index, "[%lld]%.90s", (long long)(place % output->numbers.shape[i]),
             tail);
    place /= output->numbers.shape[i];
  }
  return conf_fail(c, "%s%s is %.9g, expected %.9g within %.3g", output->name, index, actual,
                   expected, c->atol + c->rtol * fabs(expected));
}

bool conf_compare(conf_case *c, const char *name, const float *actual, int64_t n) {
  const int found = find_array(&c->outputs, name);
  if (found < 0)
    return true;
  conf_array *output = &c->outputs.items[found];
  if (output->kind != MHA_NPY_FLOATS || output->numbers.n_elements != n)
    return conf_fail(c, "%s should be %lld floating-point numbers", name, (long long)n);
  output->done = true;
  c->n_compared++;
  const float *expected = output->numbers.data;
  for (int64_t i = 0; i < n; i++) {
    if (!agree(c, (double)actual[i], (double)expected[i]))
      return report_difference(c, output, i, (double)actual[i], (double)expected[i]);
  }
  return true;
}
