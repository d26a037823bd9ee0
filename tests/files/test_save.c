/* mha_weights_save: what it writes is a safetensors file by the format's own rules, is the same
 * layer when it is loaded again, matrices of 16 bits too, and takes the place of an old file only
 * when it is complete. */
#define _XOPEN_SOURCE 700

#include "layer_file.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

/* ---- Layers ---------------------------------------------------------------------------------- */

/* Rows of matrices lie further apart than they are long. */
enum { GAP = 2 };

static const int64_t in_sizes[4] = {EQ, EK, EV, H *DV};
static const int64_t out_sizes[4] = {H * D, G *D, G *DV, EO};

typedef struct arrays {
  float matrices[4][22 * 22], biases[4][20], norms[2][12], sinks[H];
  unsigned char halves[4][2 * 22 * 22]; /* of the matrices that have 16 bits */
} arrays;

typedef struct options {
  bool out_in, biases, sinks, copy;
  int32_t norm;
  bool norm_weights[2];
  int32_t elements[4]; /* mha_element of the matrices, of 16 or 32 bits */
} options;

/* Those of 16 bits begin at an odd address. */
static const void *matrix_of(const arrays *a, const options *o, int k) {
  return o->elements[k] == MHA_F32 ? (const void *)a->matrices[k] : a->halves[k] + 1;
}

static mha_weights *make_layer(arrays *a, const options *o, const mha_allocator *allocator) {
  test_random random;
  mha_config config = layer_heads(H, G);
  mha_matrices m;
  mha_weights *weights = NULL;
  mha_error error;
  int64_t ld[4];
  test_random_seed(&random, 11);
  test_fill_normal(&random, (float *)(void *)a, sizeof *a / sizeof(float), 1.0);
  for (int k = 0; k < 4; k++) {
    for (size_t i = 0; i < sizeof a->halves[k]; i++) /* NaN and infinity are among them */
      a->halves[k][i] = (unsigned char)(test_random_bits(&random) & 0xFF);
    ld[k] = (o->out_in ? in_sizes[k] : out_sizes[k]) + GAP;
  }
  config.head_size = D;
  config.value_head_size = DV;
  config.query_width = EQ;
  config.key_width = EK;
  config.value_width = EV;
  config.output_width = EO;
  config.norm = o->norm;
  config.norm_epsilon = 1e-5F;
  config.allocator = allocator;
  MHA_INIT(&m);
  m.orientation = o->out_in ? MHA_OUT_IN : MHA_IN_OUT;
  m.ownership = o->copy ? MHA_COPY : MHA_BORROW;
  m.query = matrix_of(a, o, 0);
  m.key = matrix_of(a, o, 1);
  m.value = matrix_of(a, o, 2);
  m.output = matrix_of(a, o, 3);
  m.query_element = o->elements[0];
  m.key_element = o->elements[1];
  m.value_element = o->elements[2];
  m.output_element = o->elements[3];
  m.query_ld = ld[0];
  m.key_ld = ld[1];
  m.value_ld = ld[2];
  m.output_ld = ld[3];
  m.query_bias = o->biases ? a->biases[0] : NULL;
  m.key_bias = o->biases ? a->biases[1] : NULL;
  m.value_bias = o->biases ? a->biases[2] : NULL;
  m.output_bias = o->biases ? a->biases[3] : NULL;
  m.query_norm = o->norm_weights[0] ? a->norms[0] : NULL;
  m.key_norm = o->norm_weights[1] ? a->norms[1] : NULL;
  m.sinks = o->sinks ? a->sinks : NULL;
  test_expect(mha_weights_create(&config, &m, &weights, &error), MHA_OK, &error);
  return weights;
}

static const options plain = {.out_in = true, .biases = true};

/* ---- Reading the file with other eyes -------------------------------------------------------- */

enum { FILE_BYTES = 65536 };

typedef struct contents {
  unsigned char bytes[FILE_BYTES];
  size_t n, header_bytes;
  char header[FILE_BYTES];
} contents;

static void read_contents(const char *path, contents *c) {
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  c->n = fread(c->bytes, 1, sizeof c->bytes, file);
  assert_int_equal(fclose(file), 0);
  assert_in_range(c->n, 10, FILE_BYTES - 1);
  c->header_bytes = 0;
  for (int i = 7; i >= 0; i--)
    c->header_bytes = c->header_bytes << 8 | c->bytes[i];
  assert_in_range(c->header_bytes, 2, c->n - 8);
  memcpy(c->header, c->bytes + 8, c->header_bytes);
  c->header[c->header_bytes] = '\0';
  assert_int_equal(c->header[0], '{');
}

/* What one tensor's entry says. */
typedef struct entry {
  size_t begin, end;
  long long shape[2];
  int rank;
} entry;

/* The value of `key` within the entry; the text behind it. */
static const char *value_of(const char *from, const char *key) {
  char quoted[64];
  (void)snprintf(quoted, sizeof quoted, "\"%s\"", key);
  const char *at = strstr(from, quoted);
  assert_non_null(at);
  at += strlen(quoted);
  at += strspn(at, " :\n\t");
  return at;
}

static entry find_entry(const contents *c, const char *name, const char *type) {
  entry e = {0, 0, {0, 0}, 0};
  const char *from = value_of(c->header, name);
  assert_int_equal(*from, '{');
  char quoted[16];
  (void)snprintf(quoted, sizeof quoted, "\"%s\"", type);
  assert_int_equal(strncmp(value_of(from, "dtype"), quoted, strlen(quoted)), 0);
  const char *shape = value_of(from, "shape");
  e.rank = sscanf(shape, "[ %lld , %lld ]", &e.shape[0], &e.shape[1]);
  assert_int_equal(sscanf(value_of(from, "data_offsets"), "[ %zu , %zu ]", &e.begin, &e.end), 2);
  assert_true(e.begin < e.end && e.end <= c->n - 8 - c->header_bytes);
  return e;
}

/* Little-endian bytes, whatever this machine is. */
static uint32_t bits_at(const contents *c, const entry *e, size_t bytes, int64_t i) {
  const unsigned char *b = c->bytes + 8 + c->header_bytes + e->begin + (int64_t)bytes * i;
  uint32_t bits = 0;
  for (size_t k = 0; k < bytes; k++)
    bits |= (uint32_t)b[k] << 8 * k;
  return bits;
}

/* Those of number i in memory. */
static uint32_t bits_of(const void *numbers, size_t bytes, int64_t i) {
  const unsigned char *at = (const unsigned char *)numbers + (int64_t)bytes * i;
  uint32_t whole = 0;
  uint16_t half = 0;
  memcpy(bytes == 2 ? (void *)&half : (void *)&whole, at, bytes);
  return bytes == 2 ? half : whole;
}

/* Type, shape and numbers of one tensor; `covered` counts the bytes of all, which may not overlap.
 */
static void check_tensor(const contents *c, const char *prefix, const char *name, int32_t element,
                         int64_t rows, int64_t columns, const void *expected, int64_t ld,
                         unsigned char *used, size_t *covered) {
  char full[256];
  const size_t each = element == MHA_F32 ? 4 : 2;
  (void)snprintf(full, sizeof full, "%s%s", prefix, name);
  test_note("%s", full);
  const entry e = find_entry(c, full, mha_element_name(element));
  assert_int_equal(e.rank, columns ? 2 : 1);
  assert_int_equal(e.shape[0], rows);
  assert_int_equal(e.shape[1], columns);
  const int64_t row_length = columns ? columns : 1;
  assert_int_equal(e.end - e.begin, (size_t)(rows * row_length) * each);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < row_length; k++)
      assert_int_equal(bits_at(c, &e, each, r * row_length + k),
                       bits_of(expected, each, r * ld + k));
  for (size_t i = e.begin; i < e.end; i++)
    assert_int_equal(used[i]++, 0);
  *covered += e.end - e.begin;
}

/* Expects the layer's tensors in the file, with nothing between, before or behind them. */
static void check_file(const char *path, const char *prefix, const arrays *a, const options *o) {
  static const char *const norms[2] = {"q_norm.weight", "k_norm.weight"};
  static const float ones[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  static contents c;
  static unsigned char used[FILE_BYTES];
  size_t covered = 0;
  const layer_naming *as = &layer_namings[o->out_in ? LAYER_HUGGING_FACE : LAYER_ARTICLE];
  memset(used, 0, sizeof used);
  read_contents(path, &c);
  for (int k = 0; k < 4; k++) {
    const int64_t rows = o->out_in ? out_sizes[k] : in_sizes[k];
    const int64_t columns = o->out_in ? in_sizes[k] : out_sizes[k];
    check_tensor(&c, prefix, as->matrices[k], o->elements[k], rows, columns, matrix_of(a, o, k),
                 columns + GAP, used, &covered);
    if (o->biases)
      check_tensor(&c, prefix, as->biases[k], MHA_F32, out_sizes[k], 0, a->biases[k], 1, used,
                   &covered);
  }
  for (int k = 0; o->norm != MHA_NORM_NONE && k < 2; k++) {
    const int64_t length = o->norm == MHA_NORM_FULL ? out_sizes[k] : D;
    check_tensor(&c, prefix, norms[k], MHA_F32, length, 0, o->norm_weights[k] ? a->norms[k] : ones,
                 1, used, &covered);
  }
  if (o->sinks)
    check_tensor(&c, prefix, "sinks", MHA_F32, H, 0, a->sinks, 1, used, &covered);
  assert_int_equal(covered, c.n - 8 - c.header_bytes);
}

/* ---- Round trips ----------------------------------------------------------------------------- */

static float number_of(const mha_projection *p, int64_t i, int64_t o) {
  const size_t each = mha_element_bytes(p->element, 1);
  const size_t at = (size_t)(i * p->in_stride + o * p->out_stride) * each;
  float number = 0;
  mha_error error;
  test_expect(
      mha_element_convert(p->element, (const char *)p->matrix + at, MHA_F32, &number, 1, &error),
      MHA_OK, &error);
  return number;
}

/* Each matrix in the type that it has. A NaN stays one, whatever its payload becomes. */
static void same_projection(const mha_projection *a, const mha_projection *b) {
  assert_int_equal(a->in, b->in);
  assert_int_equal(a->out, b->out);
  for (int64_t i = 0; i < a->in; i++)
    for (int64_t o = 0; o < a->out; o++) {
      const float x = number_of(a, i, o);
      const float y = number_of(b, i, o);
      assert_true(test_equal_bits(x, y) || (isnan(x) && isnan(y)));
    }
  assert_int_equal(a->bias != NULL, b->bias != NULL);
  for (int64_t o = 0; a->bias && o < a->out; o++)
    assert_true(test_equal_bits(a->bias[o], b->bias[o]));
}

/* NULL stands for ones. */
static void same_vector(const float *a, const float *b, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    assert_true(test_equal_bits(a ? a[i] : 1.0F, b ? b[i] : 1.0F));
}

/* layer.st holds the layer that was saved. */
static void check_loaded(const mha_weights *saved, const char *prefix) {
  mha_config config = layer_heads(H, G);
  config.norm_epsilon = 1e-5F;
  mha_weights *loaded = layer_load(&config, prefix);
  assert_int_equal(loaded->orientation, saved->orientation);
  same_projection(&loaded->query, &saved->query);
  same_projection(&loaded->key, &saved->key);
  same_projection(&loaded->value, &saved->value);
  same_projection(&loaded->output, &saved->output);
  const bool full = saved->config.norm == MHA_NORM_FULL;
  assert_int_equal(loaded->config.norm, saved->config.norm);
  if (saved->config.norm != MHA_NORM_NONE) {
    same_vector(loaded->query_norm, saved->query_norm, full ? H * D : D);
    same_vector(loaded->key_norm, saved->key_norm, full ? G * D : D);
  }
  assert_int_equal(loaded->sinks != NULL, saved->sinks != NULL);
  if (saved->sinks)
    same_vector(loaded->sinks, saved->sinks, H);
  mha_weights_destroy(loaded);
}

/* Both orientations, borrowed and copied, with and without biases and sinks, all norms. */
static void every_layer_makes_the_round_trip(void **state) {
  static arrays a;
  static const char *const prefixes[] = {NULL, "", "model.layers.3.self_attn.", "ä\"\\."};
  (void)state;
  for (unsigned bits = 0; bits < 16; bits++)
    for (int32_t norm = MHA_NORM_NONE; norm <= MHA_NORM_FULL; norm++)
      for (int given = 0; given < (norm ? 4 : 1); given++) {
        const options o = {.out_in = bits & 1,
                           .biases = bits & 2,
                           .sinks = bits & 4,
                           .copy = bits & 8,
                           .norm = norm,
                           .norm_weights = {given & 1, given & 2}};
        const char *prefix = prefixes[(bits + (unsigned)given) % 4];
        mha_error error;
        memset(&error, 0xA5, sizeof error);
        mha_weights *weights = make_layer(&a, &o, NULL);
        test_note("bits %u, norm %d, given %d", bits, norm, given);
        test_expect(mha_weights_save(weights, "layer.st", prefix, &error), MHA_OK, &error);
        assert_string_equal(error.message, "");
        if ((bits + (unsigned)given) % 4 != 3) /* the eyes above know no escapes */
          check_file("layer.st", prefix ? prefix : "", &a, &o);
        test_note("bits %u, norm %d, given %d", bits, norm, given);
        check_loaded(weights, NULL);
        check_loaded(weights, prefix ? prefix : "");
        mha_weights_destroy(weights);
      }
}

/* Each of the three types for each matrix, beside each other; the bits are those in memory, and
 * loading has the same values. */
static void matrices_keep_their_types(void **state) {
  static arrays a;
  static const int32_t types[] = {MHA_F32, MHA_F16, MHA_BF16};
  (void)state;
  for (int which = 0; which < 3 * 3 * 3 * 3; which++) {
    const options o = {.out_in = which & 1,
                       .copy = which & 2,
                       .biases = which % 5 == 0,
                       .elements = {types[which % 3], types[which / 3 % 3], types[which / 9 % 3],
                                    types[which / 27]}};
    mha_error error;
    mha_weights *weights = make_layer(&a, &o, NULL);
    test_note("layer %d", which);
    test_expect(mha_weights_save(weights, "layer.st", "x.", &error), MHA_OK, &error);
    check_file("layer.st", "x.", &a, &o);
    test_note("layer %d", which);
    check_loaded(weights, "x.");
    mha_weights_destroy(weights);
  }
}

/* A layer whose numbers lie in a file may be saved to that very file. */
static void a_layer_replaces_its_own_file(void **state) {
  static arrays a;
  const mha_config config = layer_heads(H, G);
  mha_weights *weights = make_layer(&a, &plain, NULL);
  mha_error error;
  (void)state;
  test_expect(mha_weights_save(weights, "layer.st", "x.", &error), MHA_OK, &error);
  mha_weights *mapped = layer_load(&config, "x.");
  test_expect(mha_weights_save(mapped, "layer.st", "y.", &error), MHA_OK, &error);
  check_file("layer.st", "y.", &a, &plain);
  same_projection(&mapped->output, &weights->output);
  check_loaded(mapped, NULL);
  mha_weights_destroy(mapped);
  mha_weights_destroy(weights);
}

/* ---- What cannot be saved -------------------------------------------------------------------- */

static void check_refused(const mha_weights *weights, const char *path, const char *prefix,
                          mha_status status, const char *fragment) {
  mha_error error;
  memset(&error, 0xA5, sizeof error);
  test_expect(mha_weights_save(weights, path, prefix, &error), status, &error);
  if (!strstr(error.message, fragment))
    test_failed("\"%s\" lacks \"%s\"", error.message, fragment);
  assert_int_equal(mha_weights_save(weights, path, prefix, NULL), status);
}

static void an_absent_matrix_is_unsupported(void **state) {
  static const float square[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  static const char *const names[] = {"query", "key", "value", "output"};
  (void)state;
  for (int absent = 0; absent < 4; absent++) {
    mha_config config;
    mha_matrices m;
    mha_weights *weights = NULL;
    mha_error error;
    char fragment[64];
    mha_config_init(&config, 4, 2);
    MHA_INIT(&m);
    m.orientation = MHA_IN_OUT;
    m.query = absent == 0 ? NULL : square;
    m.key = absent == 1 ? NULL : square;
    m.value = absent == 2 ? NULL : square;
    m.output = absent == 3 ? NULL : square;
    test_expect(mha_weights_create(&config, &m, &weights, &error), MHA_OK, &error);
    (void)snprintf(fragment, sizeof fragment, "has no %s matrix; rule: ", names[absent]);
    check_refused(weights, "layer.st", NULL, MHA_ERROR_UNSUPPORTED, fragment);
    assert_false(test_exists("layer.st"));
    mha_weights_destroy(weights);
  }
}

/* The file that is there already is not touched. */
static void a_matrix_with_blocks_is_unsupported(void **state) {
  static const float square[32 * 32];
  static const char *const names[] = {"query", "key", "value", "output"};
  static const int32_t types[] = {MHA_Q8_0, MHA_Q4_0};
  static unsigned char blocks[32 * 34];
  (void)state;
  test_put_file("layer.st", "old", 3);
  for (int which = 0; which < 8; which++) {
    const int32_t element = types[which % 2];
    mha_config config;
    mha_matrices m;
    mha_weights *weights = NULL;
    mha_error error;
    char fragment[64];
    mha_config_init(&config, 32, 1);
    MHA_INIT(&m);
    m.orientation = MHA_OUT_IN;
    m.query = m.key = m.value = m.output = square;
    const void **matrices[] = {&m.query, &m.key, &m.value, &m.output};
    int32_t *elements[] = {&m.query_element, &m.key_element, &m.value_element, &m.output_element};
    *matrices[which / 2] = blocks;
    *elements[which / 2] = element;
    test_expect(mha_weights_create(&config, &m, &weights, &error), MHA_OK, &error);
    (void)snprintf(fragment, sizeof fragment, "the layer's %s matrix is %s; rule: F32, F16 or BF16",
                   names[which / 2], mha_element_name(element));
    check_refused(weights, "layer.st", NULL, MHA_ERROR_UNSUPPORTED, fragment);
    check_refused(weights, "absent.st", NULL, MHA_ERROR_UNSUPPORTED, fragment);
    assert_false(test_exists("absent.st"));
    mha_weights_destroy(weights);
  }
  FILE *file = fopen("layer.st", "rb");
  char old[8];
  assert_non_null(file);
  assert_int_equal(fread(old, 1, sizeof old, file), 3);
  assert_int_equal(fclose(file), 0);
  assert_memory_equal(old, "old", 3);
}

static void bad_arguments_are_refused(void **state) {
  static arrays a;
  static const char *const prefixes[] = {"\xff.",        "\xc3",  "a\xc0\x80.",
                                         "\xed\xa0\x80", "a\nb.", "\x01"};
  mha_weights *weights = make_layer(&a, &plain, NULL);
  (void)state;
  check_refused(NULL, "layer.st", NULL, MHA_ERROR_NULL, "weights is NULL");
  check_refused(weights, NULL, NULL, MHA_ERROR_NULL, "path is NULL");
  for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
    test_note("prefix %zu", i);
    check_refused(weights, "layer.st", prefixes[i], MHA_ERROR_VALUE, "; rule: ");
  }
  assert_false(test_exists("layer.st"));
  mha_weights_destroy(weights);
}

/* A limit on the size of files makes writing fail as a full disk does. */
static void what_was_there_survives_a_failure(void **state) {
  static arrays a;
  static contents before;
  static contents after;
  options other = plain;
  mha_weights *old = make_layer(&a, &plain, NULL);
  mha_error error;
  struct rlimit limit;
  (void)state;
  test_expect(mha_weights_save(old, "layer.st", "old.", &error), MHA_OK, &error);
  read_contents("layer.st", &before);
  other.sinks = true;
  mha_weights *new = make_layer(&a, &other, NULL);
  const int n_files = test_files_in(".");
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const struct rlimit small = {2000, limit.rlim_max};
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
  const mha_status status = mha_weights_save(new, "layer.st", "new.", &error);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
  test_expect(status, MHA_ERROR_IO, &error);
  check_refused(new, "absent/layer.st", NULL, MHA_ERROR_IO, "absent");
  check_refused(new, ".", NULL, MHA_ERROR_IO, ".");
  check_refused(new, "/dev/null", NULL, MHA_ERROR_IO, "/dev/null is not a regular file");
  check_refused(new, "/dev/fd/0", NULL, MHA_ERROR_IO, "/dev/fd/0 stands for an open file");
  read_contents("layer.st", &after);
  assert_int_equal(before.n, after.n);
  assert_memory_equal(before.bytes, after.bytes, before.n);
  assert_int_equal(test_files_in("."), n_files); /* nothing half written is left */
  mha_weights_destroy(old);
  mha_weights_destroy(new);
}

static void allocation_failures(void **state) {
  static arrays a;
  const options o = {.out_in = true, .norm = MHA_NORM_FULL};
  mha_status status = MHA_ERROR_MEMORY;
  test_allocator allocator;
  (void)state;
  test_allocator_init(&allocator);
  mha_weights *weights = make_layer(&a, &o, &allocator.mha);
  const int64_t live = allocator.live;
  int64_t nth = 0;
  while (status == MHA_ERROR_MEMORY) {
    mha_error error;
    allocator.fail_at = allocator.calls + ++nth;
    assert_false(test_exists("layer.st"));
    status = mha_weights_save(weights, "layer.st", NULL, &error);
    assert_int_equal(error.status, status);
    assert_int_equal(allocator.live, live);
  }
  assert_int_equal(status, MHA_OK);
  assert_true(nth > 1);
  check_file("layer.st", "", &a, &o);
  mha_weights_destroy(weights);
  test_allocator_check(&allocator);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(every_layer_makes_the_round_trip, layer_remove_file),
      cmocka_unit_test_teardown(matrices_keep_their_types, layer_remove_file),
      cmocka_unit_test_teardown(a_layer_replaces_its_own_file, layer_remove_file),
      cmocka_unit_test_teardown(an_absent_matrix_is_unsupported, layer_remove_file),
      cmocka_unit_test_teardown(a_matrix_with_blocks_is_unsupported, layer_remove_file),
      cmocka_unit_test_teardown(bad_arguments_are_refused, layer_remove_file),
      cmocka_unit_test_teardown(what_was_there_survives_a_failure, layer_remove_file),
      cmocka_unit_test_teardown(allocation_failures, layer_remove_file),
  };
  return cmocka_run_group_tests(tests, layer_enter_folder, layer_leave_folder);
}
