/* Owns the reading of a case of gradients: arrays, options, and the problem that they make. */
#include "gradients_case.h"

#include "files/mapping.h"
#include "folders.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- Arrays ---------------------------------------------------------------------------------- */

static const grad_array *take(grad_arrays *arrays, const char *name) {
  for (int i = 0; i < arrays->n; i++) {
    if (strcmp(arrays->items[i].name, name) == 0) {
      arrays->items[i].done = true;
      return &arrays->items[i];
    }
  }
  return NULL;
}

const grad_array *grad_input(grad_case *c, const char *name) {
  return take(&c->inputs, name);
}

const grad_array *grad_expected(grad_case *c, const char *name) {
  return take(&c->expected, name);
}

static const char *find_left(const grad_arrays *arrays) {
  for (int i = 0; i < arrays->n; i++) {
    if (!arrays->items[i].done)
      return arrays->items[i].name;
  }
  return NULL;
}

bool grad_all_done(grad_case *c) {
  const char *input = find_left(&c->inputs), *expected = find_left(&c->expected);
  if (input)
    return conf_fail(&c->base, "the input %s is not known", input);
  if (expected)
    return conf_fail(&c->base, "%s is expected and was not compared", expected);
  for (int i = 0; i < c->expected.n; i++)
    c->expected.items[i].done = false;
  return c->expected.n > 1 || conf_fail(&c->base, "no gradient was compared");
}

/* Number i of those that are to be compared. */
typedef struct actual {
  const char *whose;
  const float *floats; /* or else */
  const double *numbers;
  double relative, absolute;
} actual;

static double number_of(const actual *a, int64_t i) {
  return a->floats ? (double)a->floats[i] : a->numbers[i];
}

static bool compare(grad_case *c, const char *name, const actual *a, int64_t n, double *worst) {
  const grad_array *expected = grad_expected(c, name);
  double largest = 0;
  if (!expected)
    return true;
  if (expected->n != n)
    return conf_fail(&c->base, "%s has %lld numbers, %s %lld", name, (long long)expected->n,
                     a->whose, (long long)n);
  for (int64_t i = 0; i < n; i++)
    largest = fmax(largest, fabs(expected->numbers[i]));
  const double allowed = a->relative * largest + a->absolute;
  for (int64_t i = 0; i < n; i++) {
    const double error = fabs(number_of(a, i) - expected->numbers[i]);
    if (!(error <= allowed)) /* NaN fails */
      return conf_fail(&c->base, "element %lld of %s is %.9g, %s, expected %.9g within %.3g",
                       (long long)i, name, number_of(a, i), a->whose, expected->numbers[i],
                       allowed);
    *worst = fmax(*worst, error / allowed);
  }
  return true;
}

bool grad_compare(grad_case *c, const char *name, const float *numbers, int64_t n) {
  const actual a = {"the library's", numbers, NULL, 1e-5, 1e-6};
  return compare(c, name, &a, n, &c->worst_library);
}

bool grad_compare_judge(grad_case *c, const char *name, const double *numbers, int64_t n) {
  const actual a = {"the judge's", NULL, numbers, 1e-9, 1e-12};
  return compare(c, name, &a, n, &c->worst_judge);
}

/* The file's numbers, as they are and in double. */
static bool convert(grad_case *c, const mha_npy_header *header, const unsigned char *source,
                    grad_array *array) {
  array->n = header->n_elements;
  array->numbers = conf_doubles(&c->base, array->n);
  if (header->type == MHA_NPY_F4)
    array->floats = conf_floats(&c->base, array->n);
  if (header->type == MHA_NPY_U1)
    array->bytes = conf_bytes(&c->base, array->n);
  if (!array->numbers || (header->type == MHA_NPY_F4 && !array->floats) ||
      (header->type == MHA_NPY_U1 && !array->bytes))
    return false;
  if (array->floats)
    mha_npy_convert(header, 0, array->n, source, MHA_NPY_FLOATS, array->floats);
  else if (array->bytes)
    mha_npy_convert(header, 0, array->n, source, MHA_NPY_BYTES, array->bytes);
  else
    memcpy(array->numbers, source, (size_t)array->n * sizeof(double));
  for (int64_t i = 0; i < array->n; i++) {
    if (array->floats)
      array->numbers[i] = (double)array->floats[i];
    if (array->bytes)
      array->numbers[i] = (double)array->bytes[i];
  }
  return true;
}

/* Whether the header is what case.json says, in the one layout that is read here. */
static bool check_header(grad_case *c, const mha_npy_header *header, json_t *json,
                         grad_array *array) {
  static const struct {
    const char *dtype;
    mha_npy_type type;
  } types[] = {{"float32", MHA_NPY_F4}, {"float64", MHA_NPY_F8}, {"uint8", MHA_NPY_U1}};
  const char *dtype = json_string_value(json_array_get(json, 0));
  json_t *shape = json_array_get(json, 1);
  bool fits = header->big_endian == mha_machine_is_big_endian() || header->type == MHA_NPY_U1;
  bool known = false;
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    known = known || (dtype && strcmp(dtype, types[i].dtype) == 0 && header->type == types[i].type);
  fits = fits && known && !header->column_major && header->rank <= GRAD_MAX_RANK &&
         json_array_size(shape) == (size_t)header->rank;
  array->rank = header->rank;
  for (int i = 0; fits && i < header->rank; i++) {
    array->shape[i] = header->shape[i];
    fits = json_integer_value(json_array_get(shape, (size_t)i)) == header->shape[i];
  }
  return fits ||
         conf_fail(&c->base, "%s is not of the type and shape that case.json says", array->name);
}

static bool read_array(grad_case *c, const char *folder, json_t *json, grad_array *array) {
  char name[256], path[MHA_PATH_BYTES];
  mha_mapping mapping = {0};
  mha_npy_header header;
  mha_error error;
  const int length = snprintf(name, sizeof name, "%s.npy", array->name);
  if (length < 0 || (size_t)length >= sizeof name || !conf_join(path, folder, name))
    return conf_fail(&c->base, "the name %s is too long", array->name);
  if (!conf_expect(&c->base, mha_mapping_open(path, true, NULL, &mapping, &error), &error))
    return false;
  const bool read = conf_expect(&c->base,
                                mha_npy_parse(path, mapping.bytes, mapping.n_bytes,
                                              (int64_t)mapping.n_bytes, &header, &error),
                                &error) &&
                    check_header(c, &header, json, array) &&
                    convert(c, &header, mapping.bytes + header.data_offset, array);
  mha_mapping_close(&mapping);
  return read;
}

static bool read_arrays(grad_case *c, const char *folder, const char *section,
                        grad_arrays *arrays) {
  const char *name;
  json_t *json;
  json_object_foreach(json_object_get(c->base.json, section), name, json) {
    if (arrays->n == CONF_MAX_ARRAYS)
      return conf_fail(&c->base, "there are more than %d %s", CONF_MAX_ARRAYS, section);
    grad_array *array = &arrays->items[arrays->n++];
    array->name = name;
    if (!read_array(c, folder, json, array))
      return false;
  }
  return true;
}

/* ---- Options --------------------------------------------------------------------------------- */

typedef struct integers {
  int64_t n;
  int64_t *numbers;
} integers;

typedef enum option_kind { WHOLE, REAL, LIST, WORD } option_kind;

typedef struct option {
  const char *name;
  option_kind kind;
  void *target;      /* int64_t, double, integers, int64_t */
  const char *words; /* of WORD: separated by spaces; the target is the number of the word */
} option;

/* What the options say, before it is known whether it fits. Numbers left out are 0. */
typedef struct options {
  int64_t causal, alignment, orientation, rope, norm;
  integers window, query_lengths, key_lengths, query_starts, key_starts;
} options;

static bool read_list(grad_case *c, json_t *json, integers *list) {
  list->n = (int64_t)json_array_size(json);
  list->numbers = conf_integers(&c->base, list->n);
  for (int64_t i = 0; list->numbers && i < list->n; i++) {
    json_t *number = json_array_get(json, (size_t)i);
    if (!json_is_integer(number))
      return false;
    list->numbers[i] = json_integer_value(number);
  }
  return list->numbers && json_is_array(json);
}

/* The place of a word among `words`, or -1. */
static int64_t find_word(const char *words, const char *word) {
  for (int64_t place = 0; word && *words; place++) {
    const size_t length = strcspn(words, " ");
    if (strlen(word) == length && strncmp(words, word, length) == 0)
      return place;
    words += length + (words[length] == ' ');
  }
  return -1;
}

static bool read_option(grad_case *c, const option *o, json_t *json) {
  switch (o->kind) {
  case WHOLE:
    *(int64_t *)o->target = json_integer_value(json);
    return json_is_integer(json);
  case REAL:
    *(double *)o->target = json_number_value(json);
    return json_is_number(json);
  case LIST:
    return read_list(c, json, o->target);
  case WORD:
    *(int64_t *)o->target = find_word(o->words, json_string_value(json));
    return *(int64_t *)o->target >= 0;
  }
  return false;
}

static bool read_options(grad_case *c, options *o) {
  oracle_problem *p = &c->problem;
  const option known[] = {{"n_heads", WHOLE, &p->H, NULL},
                          {"n_kv_heads", WHOLE, &p->G, NULL},
                          {"head_size", WHOLE, &p->d, NULL},
                          {"value_head_size", WHOLE, &p->dv, NULL},
                          {"rotary_size", WHOLE, &p->rotary, NULL},
                          {"query_position", WHOLE, &c->query_position, NULL},
                          {"causal", WHOLE, &o->causal, NULL},
                          {"scale", REAL, &p->scale, NULL},
                          {"softcap", REAL, &p->softcap, NULL},
                          {"rope_base", REAL, &p->rope_base, NULL},
                          {"norm_epsilon", REAL, &p->epsilon, NULL},
                          {"window", LIST, &o->window, NULL},
                          {"query_lengths", LIST, &o->query_lengths, NULL},
                          {"key_lengths", LIST, &o->key_lengths, NULL},
                          {"query_starts", LIST, &o->query_starts, NULL},
                          {"key_starts", LIST, &o->key_starts, NULL},
                          {"alignment", WORD, &o->alignment, "top_left bottom_right"},
                          {"orientation", WORD, &o->orientation, "in_out out_in"},
                          {"rope", WORD, &o->rope, "none halves interleaved"},
                          {"norm", WORD, &o->norm, "none per_head full"}};
  const char *name;
  json_t *json;
  json_object_foreach(json_object_get(c->base.json, "options"), name, json) {
    size_t i = 0;
    while (i < sizeof known / sizeof *known && strcmp(known[i].name, name) != 0)
      i++;
    if (i == sizeof known / sizeof *known)
      return conf_fail(&c->base, "the option %s is not known", name);
    if (!read_option(c, &known[i], json))
      return conf_fail(&c->base, "the option %s has a value that is not known", name);
  }
  return true;
}

/* ---- The problem ----------------------------------------------------------------------------- */

/* n numbers from 0 to `most`, which rise if they are starts: the judge trusts them. */
static bool check_list(grad_case *c, const char *name, const integers *list, int64_t n,
                       int64_t most, bool starts) {
  if (list->numbers && list->n != n)
    return conf_fail(&c->base, "%s has %lld numbers, not %lld", name, (long long)list->n,
                     (long long)n);
  for (int64_t i = 0; i < list->n; i++) {
    const int64_t least = starts && i > 0 ? list->numbers[i - 1] : 0;
    if (list->numbers[i] < least || list->numbers[i] > (starts && i == 0 ? 0 : most))
      return conf_fail(&c->base, "%s has a number that is out of range", name);
  }
  return true;
}

static bool check_lists(grad_case *c, const options *o) {
  const oracle_problem *p = &c->problem;
  return check_list(c, "query_lengths", &o->query_lengths, p->B, p->Lq, false) &&
         check_list(c, "key_lengths", &o->key_lengths, p->B, p->Lk, false) &&
         check_list(c, "query_starts", &o->query_starts, p->B + 1, p->Lq, true) &&
         check_list(c, "key_starts", &o->key_starts, p->B + 1, p->Lk, true) &&
         (!o->window.numbers || o->window.n == 2 ||
          conf_fail(&c->base, "window has %lld numbers, not 2", (long long)o->window.n)) &&
         (!o->query_starts.numbers ||
          (c->query->shape[0] == 1 && (!c->key || o->key_starts.numbers)) ||
          conf_fail(&c->base, "packed input has one batch entry and starts of its own keys"));
}

/* Sizes that the shapes of the inputs tell. Packed input has one batch entry of B sequences. */
static bool take_inputs(grad_case *c, const options *o) {
  oracle_problem *p = &c->problem;
  c->query = grad_input(c, "query");
  c->key = grad_input(c, "key");
  c->value = grad_input(c, "value");
  c->dy = grad_input(c, "dy");
  const grad_array *all[] = {c->query, c->dy, c->key, c->value};
  for (int i = 0; i < 4; i++) {
    if (i < 2 && !all[i])
      return conf_fail(&c->base, "there is no query or no dy");
    if (all[i] && (all[i]->rank != 3 || !all[i]->floats || all[i]->shape[0] != all[0]->shape[0]))
      return conf_fail(&c->base, "%s is not [B][L][width] of float32", all[i]->name);
  }
  const grad_array *key = c->key ? c->key : c->query, *value = c->value ? c->value : key;
  p->B = o->query_starts.numbers ? o->query_starts.n - 1 : c->query->shape[0];
  p->Lq = c->query->shape[1], p->Lk = key->shape[1];
  p->Eq = c->query->shape[2], p->Ek = key->shape[2];
  p->Ev = value->shape[2], p->Eo = c->dy->shape[2];
  p->query = c->query->numbers, p->key = key->numbers, p->value = value->numbers;
  return (c->dy->shape[1] == p->Lq && value->shape[1] == p->Lk && (!c->value || c->key)) ||
         conf_fail(&c->base, "the lengths of query, key, value and dy do not fit");
}

/* Takes an input of n numbers in all, if there is one. */
static bool take_floats(grad_case *c, const char *name, int64_t n, const double **numbers) {
  const grad_array *array = grad_input(c, name);
  if (array && (array->n != n || !array->floats))
    return conf_fail(&c->base, "%s is not %lld numbers of float32", name, (long long)n);
  *numbers = array ? array->numbers : NULL;
  return true;
}

static bool take_matrix(grad_case *c, const char *name, const char *bias, int64_t in, int64_t out,
                        oracle_matrix *matrix) {
  matrix->out_in = c->out_in;
  matrix->ld = c->out_in ? in : out;
  return take_floats(c, name, in * out, &matrix->numbers) &&
         take_floats(c, bias, out, &matrix->bias) &&
         (matrix->numbers || c->core || conf_fail(&c->base, "there is no %s", name));
}

static bool has_matrix(const grad_case *c) {
  for (int i = 0; i < c->inputs.n; i++) {
    if (c->inputs.items[i].name[0] == 'w')
      return true;
  }
  return false;
}

static bool take_layer(grad_case *c) {
  oracle_problem *p = &c->problem;
  const bool full = p->norm == ORACLE_NORM_FULL;
  c->core = !has_matrix(c);
  return take_matrix(c, "wq", "bq", p->Eq, p->H * p->d, &p->wq) &&
         take_matrix(c, "wk", "bk", p->Ek, p->G * p->d, &p->wk) &&
         take_matrix(c, "wv", "bv", p->Ev, p->G * p->dv, &p->wv) &&
         take_matrix(c, "wo", "bo", p->H * p->dv, p->Eo, &p->wo) &&
         take_floats(c, "q_norm", full ? p->H * p->d : p->d, &p->query_norm) &&
         take_floats(c, "k_norm", full ? p->G * p->d : p->d, &p->key_norm) &&
         take_floats(c, "alibi_slopes", p->H, &p->slopes) &&
         take_floats(c, "sinks", p->H, &p->sinks);
}

/* A mask or bias at its full extents; its own are 1 or full. */
static bool widen_mask(grad_case *c, const char *name, const grad_array **array, double **full) {
  const oracle_problem *p = &c->problem;
  const int64_t extents[] = {p->B, p->H, p->Lq, p->Lk};
  *array = grad_input(c, name);
  if (!*array)
    return true;
  const int64_t *s = (*array)->shape;
  bool fits = (*array)->rank == 4 && s[3] == p->Lk && !p->query_starts;
  for (int i = 0; fits && i < 3; i++)
    fits = s[i] == 1 || s[i] == extents[i];
  if (!fits)
    return conf_fail(&c->base, "%s is not [B or 1][H or 1][Lq or 1][Lk]", name);
  *full = conf_doubles(&c->base, p->B * p->H * p->Lq * p->Lk);
  for (int64_t at = 0; *full && at < p->B * p->H * p->Lq * p->Lk; at++) {
    const int64_t j = at % p->Lk, i = at / p->Lk % p->Lq, h = at / p->Lk / p->Lq % p->H,
                  b = at / p->Lk / p->Lq / p->H;
    (*full)[at] = (*array)->numbers[((b % s[0] * s[1] + h % s[1]) * s[2] + i % s[2]) * s[3] + j];
  }
  return *full != NULL;
}

static bool take_masks(grad_case *c) {
  oracle_problem *p = &c->problem;
  const grad_array *attend = NULL, *bias = NULL;
  double *wide_attend = NULL, *wide_bias = NULL;
  if (!widen_mask(c, "attend", &attend, &wide_attend) || !widen_mask(c, "bias", &bias, &wide_bias))
    return false;
  if ((attend && !attend->bytes) || (bias && !bias->floats))
    return conf_fail(&c->base, "attend is not uint8, or bias not float32");
  const int64_t n = p->B * p->H * p->Lq * p->Lk;
  uint8_t *bytes = attend ? conf_bytes(&c->base, n) : NULL;
  for (int64_t i = 0; bytes && i < n; i++)
    bytes[i] = wide_attend[i] != 0;
  p->attend = bytes;
  p->bias = wide_bias;
  return !attend || bytes;
}

/* Positions count from the start of each sequence; keys of their own begin with 0. */
static bool list_positions(grad_case *c, int64_t rows, int64_t length, const int64_t *starts,
                           int64_t first, const int64_t **positions) {
  int64_t *list = conf_integers(&c->base, rows);
  for (int64_t r = 0; list && r < rows; r++) {
    int64_t start = r / length * length;
    for (int64_t b = 0; starts && b < c->problem.B; b++)
      start = starts[b] <= r ? starts[b] : start;
    list[r] = r - start + first;
  }
  *positions = list;
  return list != NULL;
}

static bool apply_options(grad_case *c, const options *o) {
  oracle_problem *p = &c->problem;
  json_t *given = json_object_get(c->base.json, "options");
  const int64_t *starts = o->query_starts.numbers;
  const int64_t *key_starts = o->key_starts.numbers ? o->key_starts.numbers : starts;
  const int64_t batch = c->query->shape[0];
  if (!check_lists(c, o))
    return false;
  if (p->H < 1 || p->G < 1 || p->H % p->G || p->d < 1 || p->dv < 1 || p->B < 1)
    return conf_fail(&c->base, "the options lack numbers of heads or sizes that fit");
  p->scale_given = json_object_get(given, "scale") != NULL;
  p->causal = o->causal != 0;
  p->windowed = o->window.numbers != NULL;
  p->window_left = p->windowed ? o->window.numbers[0] : 0;
  p->window_right = p->windowed ? o->window.numbers[1] : 0;
  p->alignment = o->alignment ? ORACLE_BOTTOM_RIGHT : ORACLE_TOP_LEFT;
  p->rope = (oracle_rope)o->rope;
  p->norm = (oracle_norm)o->norm;
  p->query_lengths = o->query_lengths.numbers, p->key_lengths = o->key_lengths.numbers;
  p->query_starts = starts, p->key_starts = starts ? key_starts : NULL;
  c->out_in = o->orientation == 1;
  return list_positions(c, batch * p->Lq, p->Lq, starts, c->query_position, &p->query_positions) &&
         list_positions(c, batch * p->Lk, p->Lk, p->key_starts, c->key ? 0 : c->query_position,
                        &p->key_positions);
}

/* ---- The whole ------------------------------------------------------------------------------- */

static void check_file(const char *path, const char *name, void *user) {
  grad_case *c = user;
  char expected[256];
  bool known = strcmp(name, "case.json") == 0;
  (void)path;
  for (int i = 0; i < c->inputs.n + c->expected.n; i++) {
    const grad_array *array =
        i < c->inputs.n ? &c->inputs.items[i] : &c->expected.items[i - c->inputs.n];
    (void)snprintf(expected, sizeof expected, "%s.npy", array->name);
    known = known || strcmp(name, expected) == 0;
  }
  if (!known)
    conf_fail(&c->base, "case.json does not name the file %s", name);
}

static bool check_sections(grad_case *c) {
  const char *name;
  json_t *json;
  json_object_foreach(c->base.json, name, json) {
    if (find_word("name seed options inputs expected", name) < 0)
      return conf_fail(&c->base, "%s in case.json is not known", name);
  }
  return true;
}

bool grad_case_open(const char *folder, grad_case *c) {
  char path[MHA_PATH_BYTES];
  json_error_t error;
  options o = {0};
  memset(c, 0, sizeof *c);
  if (!conf_join(path, folder, "case.json"))
    return conf_fail(&c->base, "the path is too long");
  c->base.json = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
  if (!c->base.json)
    return conf_fail(&c->base, "case.json cannot be read: %s (line %d)", error.text, error.line);
  if (!check_sections(c) || !read_options(c, &o) || !read_arrays(c, folder, "inputs", &c->inputs) ||
      !read_arrays(c, folder, "expected", &c->expected))
    return false;
  if (!conf_walk_files(folder, check_file, c))
    return conf_fail(&c->base, "the folder cannot be read");
  return c->base.outcome == CONF_PASS && take_inputs(c, &o) && apply_options(c, &o) &&
         take_layer(c) && take_masks(c);
}

void grad_case_release(grad_case *c) {
  conf_case_release(&c->base);
}
