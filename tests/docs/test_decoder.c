/* The program of docs/decoder.md as it stands there: what a small language model writes with it,
 * against what another program computed (data/stories260K), with weights and caches of smaller
 * types, with attention from a file of its own, and with files that are broken. */
#define _XOPEN_SOURCE 700

#include "folder.h"
#include "program.h"

#include <unistd.h>

int decoder_main(int argc, char **argv);
#define main decoder_main
#include "decoder.c" /* NOLINT(bugprone-suspicious-include) */
#undef main

#define DATA MHA_TEST_DATA_DIR "/stories260K/"

enum { TOKENS = 256, VOCABULARY = 512, LAYERS = 5, WIDTH = 64, KEY_WIDTH = 32 };

static char program[] = "decoder", model_path[] = DATA "stories260K.bin",
            vocabulary_path[] = DATA "tok512.bin";

/* ---- What the other program computed --------------------------------------------------------- */

static int64_t tokens[TOKENS];            /* the first begins the text */
static float logits[TOKENS * VOCABULARY]; /* n_logits rows */
static int64_t n_logits;                  /* of every token, or of each `logits_step`-th */
static int64_t logits_step;

/* The data behind the header of 128 bytes that NumPy writes, as many bytes as there are. */
static size_t read_npy(const char *path, const char *type, void *data, size_t bytes) {
  char header[129] = "";
  FILE *file = fopen(path, "rb");
  if (!file)
    test_failed("cannot open %s", path);
  assert_int_equal(fread(header, 1, 128, file), 128);
  assert_memory_equal(header, "\x93NUMPY\x01\x00\x76\x00", 10);
  assert_non_null(strstr(header + 10, type));
  const size_t n = fread(data, 1, bytes, file);
  assert_int_equal(fgetc(file), EOF);
  assert_int_equal(fclose(file), 0);
  return n;
}

static int read_expected(void **state) {
  (void)state;
  const char *path = MHA_DECODER_LOGITS[0] ? MHA_DECODER_LOGITS : DATA "logits.npy";
  if (read_npy(DATA "tokens.npy", "'<i8'", tokens, sizeof tokens) != sizeof tokens)
    return -1;
  n_logits =
      (int64_t)(read_npy(path, "'<f4'", logits, sizeof logits) / sizeof *logits / VOCABULARY);
  logits_step = n_logits == TOKENS ? 1 : 5;
  return n_logits != (TOKENS - 1) / logits_step + 1 || test_folder_enter("test_decoder");
}

static int leave(void **state) {
  (void)state;
  (void)unlink("file");
  return test_folder_leave();
}

/* ---- Running --------------------------------------------------------------------------------- */

/* Opens the model with weights and a cache of these types. Either may be another string too. */
static void open_with(decoder *m, const char *weights, const char *cache) {
  char names[2][32];
  char *argv[] = {program, model_path, vocabulary_path, names[0], names[1]};
  mha_error error;
  (void)snprintf(names[0], sizeof names[0], "%s", weights);
  (void)snprintf(names[1], sizeof names[1], "%s", cache);
  test_note("weights %s, cache %s", weights, cache);
  memset(m, 0, sizeof *m);
  test_expect(open_decoder(m, 5, argv, &error), MHA_OK, &error);
}

/* What comes after tokens[t]. */
static int32_t next_of(decoder *m, int64_t t) {
  mha_error error;
  test_expect(step(m, (int32_t)tokens[t], &error), MHA_OK, &error);
  return most_likely(m);
}

/* How many of them are computed. */
static int64_t n_steps(void) {
  return test_small() ? 64 : TOKENS;
}

/* How it did against the other program. */
typedef struct outcome {
  int64_t alike;     /* tokens that it writes too, one after the other, behind the given first */
  double difference; /* the largest of a logit after tokens[0 .. alike] */
} outcome;

static void compare_logits(const decoder *m, int64_t t, outcome *o) {
  for (int i = 0; i < VOCABULARY; i++) {
    const double expected = logits[t / logits_step * VOCABULARY + i];
    const double difference = fabs(m->logits[i] - expected);
    if (!(difference <= o->difference)) /* NaN too */
      o->difference = difference;
  }
}

/* All steps, or as many as are alike. */
static outcome run(const char *weights, const char *cache) {
  decoder m;
  outcome o = {0, 0};
  open_with(&m, weights, cache);
  for (int64_t t = 0; t < n_steps(); t++) {
    const int32_t next = next_of(&m, t);
    if (t % logits_step == 0)
      compare_logits(&m, t, &o);
    if (t + 1 == n_steps() || next != tokens[t + 1])
      break;
    o.alike++;
  }
  close_decoder(&m);
  return o;
}

/* ---- Another program's numbers --------------------------------------------------------------- */

static void float32_writes_the_same_with_the_same_logits(void **state) {
  (void)state;
  const outcome o = run("F32", "F32");
  assert_int_equal(o.alike, n_steps() - 1);
  test_near("difference of logits", o.difference, 0, 1e-4);
}

/* Where the two best tokens are closest, 0.004 lie between them. The bounds are twice to three
 * times what was found; that a difference is there at all shows that the type counted. */
static void smaller_types_write_the_same(void **state) {
  (void)state;
  static const struct {
    const char *weights, *cache;
    double bound;
  } cases[] = {{"F16", "F32", 0.02}, {"BF16", "F32", 0.2}, {"Q8_0", "F32", 0.5},
               {"F32", "F16", 0.06}, {"F32", "BF16", 0.5}, {"BF16", "BF16", 0.6},
               {"Q8_0", "F16", 0.5}, {"Q8_0", "BF16", 0.8}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const outcome o = run(cases[i].weights, cases[i].cache);
    assert_int_equal(o.alike, n_steps() - 1);
    test_near("difference of logits", o.difference, 0, cases[i].bound);
    assert_true(o.difference > 1e-3);
  }
}

/* Four bits round each weight to a sixteenth of the largest of its block: enough to move logits by
 * 3, and 0.5 decide whether the park is followed by a full stop or by "with her friends". */
static void four_bits_write_another_story(void **state) {
  (void)state;
  assert_int_equal(run("Q4_0", "F32").alike, 30);
  assert_int_equal(run("Q4_0", "BF16").alike, 30);
}

static void the_program_tells_a_story_and_ends(void **state) {
  (void)state;
  static const char begin[] = "Once upon a time, there was a little girl named Lily. She loved to "
                              "play outside in the park. One day, she saw a big, red ball. She "
                              "wanted to play with it, but it was too high.\nLily's mom said, \"";
  static const char end[] = "\"Thank you, Lily! You are a good friend.\"\n";
  char *argv[] = {program, model_path, vocabulary_path};
  char printed[2048];
  assert_int_equal(test_run_program(decoder_main, 3, argv, printed, sizeof printed), 0);
  assert_memory_equal(printed, begin, sizeof begin - 1);
  assert_true(strlen(printed) > sizeof begin + sizeof end);
  assert_string_equal(printed + strlen(printed) - (sizeof end - 1), end);
}

/* ---- Attention from a file of its own -------------------------------------------------------- */

enum { QUERY_PART, KEY_PART, VALUE_PART, OUTPUT_PART, PARTS };

static const struct {
  const char *gguf, *safetensors;
  int kind;
  int64_t rows; /* of WIDTH numbers */
} parts[PARTS] = {{"attn_q", "q_proj", QUERY, WIDTH},
                  {"attn_k", "k_proj", KEY, KEY_WIDTH},
                  {"attn_v", "v_proj", VALUE, KEY_WIDTH},
                  {"attn_output", "o_proj", OUT, WIDTH}};

typedef struct bytes {
  char data[(1 << 20) + (1 << 14)];
  size_t n;
} bytes;

static void put(bytes *to, const void *data, size_t n) {
  assert_true(n <= sizeof to->data - to->n);
  memcpy(to->data + to->n, data, n);
  to->n += n;
}

static void put_u32(bytes *to, uint32_t number) {
  put(to, &number, sizeof number);
}

static void put_u64(bytes *to, uint64_t number) {
  put(to, &number, sizeof number);
}

static void put_string(bytes *to, const char *text) {
  put_u64(to, strlen(text));
  put(to, text, strlen(text));
}

/* The numbers of all parts of all layers, behind each other: sizes are multiples of 32 bytes. */
static void put_parts(bytes *to, const decoder *m, int32_t type) {
  static char converted[WIDTH * WIDTH * sizeof(float)];
  mha_error error;
  for (int l = 0; l < LAYERS; l++)
    for (int p = 0; p < PARTS; p++) {
      const int64_t n = parts[p].rows * WIDTH;
      test_expect(
          mha_element_convert(MHA_F32, part(m, parts[p].kind, l), type, converted, n, &error),
          MHA_OK, &error);
      put(to, converted, mha_element_bytes(type, n));
    }
}

static void put_gguf(bytes *to, const decoder *m, int32_t type, uint32_t gguf_type) {
  uint64_t offset = 0;
  char name[64];
  put(to, "GGUF", 4);
  put_u32(to, 3);
  put_u64(to, LAYERS * PARTS);
  put_u64(to, 1);
  put_string(to, "general.architecture");
  put_u32(to, 8); /* a string */
  put_string(to, "llama");
  for (int l = 0; l < LAYERS; l++)
    for (int p = 0; p < PARTS; p++) {
      (void)snprintf(name, sizeof name, "blk.%d.%s.weight", l, parts[p].gguf);
      put_string(to, name);
      put_u32(to, 2);
      put_u64(to, WIDTH); /* the fastest dimension first */
      put_u64(to, (uint64_t)parts[p].rows);
      put_u32(to, gguf_type);
      put_u64(to, offset);
      offset += mha_element_bytes(type, parts[p].rows * WIDTH);
    }
  while (to->n % 32 != 0)
    put(to, "", 1);
  put_parts(to, m, type);
}

static void put_safetensors(bytes *to, const decoder *m) {
  char header[8192] = "{", *end = header + 1;
  size_t begin = 0;
  for (int l = 0; l < LAYERS; l++)
    for (int p = 0; p < PARTS; p++) {
      const size_t n = (size_t)parts[p].rows * WIDTH * sizeof(float);
      end += snprintf(end, (size_t)(header + sizeof header - end),
                      "%s\"blk.%d.%s.weight\":{\"dtype\":\"F32\",\"shape\":[%d,%d],"
                      "\"data_offsets\":[%zu,%zu]}",
                      begin ? "," : "", l, parts[p].safetensors, (int)parts[p].rows, WIDTH, begin,
                      begin + n);
      begin += n;
    }
  *end++ = '}';
  while ((end - header) % 8 != 0)
    *end++ = ' ';
  put_u64(to, (uint64_t)(end - header));
  put(to, header, (size_t)(end - header));
  put_parts(to, m, MHA_F32);
}

/* The logits after a few tokens. */
static void few_steps(decoder *m, float *after) {
  for (int t = 0; t < 8; t++)
    (void)next_of(m, t);
  memcpy(after, m->logits, VOCABULARY * sizeof *after);
  close_decoder(m);
}

/* The attention of "file" gives the bits of the model's own with weights of a type. */
static void check_file(const char *weights) {
  static float from_file[VOCABULARY], own[VOCABULARY];
  decoder m;
  open_with(&m, "file", "F32");
  few_steps(&m, from_file);
  open_with(&m, weights, "F32");
  few_steps(&m, own);
  test_same_bits("logits", (test_shape){{VOCABULARY, 1, 1, 1}}, from_file, own);
}

static void attention_of_a_safetensors_file(void **state) {
  (void)state;
  static bytes file;
  decoder m;
  open_with(&m, "F32", "F32");
  put_safetensors(&file, &m);
  close_decoder(&m);
  test_put_file("file", file.data, file.n);
  check_file("F32");
}

static void attention_of_a_gguf_file(void **state) {
  (void)state;
  static const struct {
    int32_t type;
    uint32_t gguf_type;
  } cases[] = {{MHA_F32, 0}, {MHA_F16, 1}, {MHA_BF16, 30}, {MHA_Q8_0, 8}, {MHA_Q4_0, 2}};
  static bytes file;
  decoder m;
  open_with(&m, "F32", "F32");
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    file.n = 0;
    put_gguf(&file, &m, cases[i].type, cases[i].gguf_type);
    test_put_file("file", file.data, file.n);
    check_file(mha_element_name(cases[i].type));
  }
  close_decoder(&m);
}

/* ---- What it refuses ------------------------------------------------------------------------- */

/* The program ends with 1 and a message that holds `fragment`. */
static void expect_refused(int argc, char **argv, const char *fragment) {
  char printed[2048];
  test_note("%s", fragment);
  assert_int_equal(test_run_program(decoder_main, argc, argv, printed, sizeof printed), 1);
  if (!strstr(printed, fragment))
    test_failed("printed \"%s\"", printed);
}

static void missing_files_and_unknown_types(void **state) {
  (void)state;
  char missing[] = "missing", four_bits[] = "Q4_0", blocks[] = "Q8_0", plain[] = "F32";
  expect_refused(1, (char *[]){program}, "usage: decoder MODEL");
  expect_refused(2, (char *[]){program, model_path}, "usage: decoder MODEL");
  expect_refused(3, (char *[]){program, missing, vocabulary_path}, "missing cannot be read");
  expect_refused(3, (char *[]){program, model_path, missing}, "missing cannot be read");
  expect_refused(4, (char *[]){program, model_path, vocabulary_path, missing}, "missing");
  expect_refused(5, (char *[]){program, model_path, vocabulary_path, plain, missing},
                 "options.type is 5");
  expect_refused(5, (char *[]){program, model_path, vocabulary_path, plain, four_bits},
                 "options.type is 4");
  expect_refused(5, (char *[]){program, model_path, vocabulary_path, plain, blocks},
                 "head sizes 8 and 8; rule: whole blocks of Q8_0");
}

/* Reads a whole file of the model's. */
static void read_data(const char *path, bytes *to) {
  FILE *from = fopen(path, "rb");
  assert_non_null(from);
  to->n = fread(to->data, 1, sizeof to->data, from);
  assert_int_equal(fclose(from), 0);
}

static void files_that_are_cut_or_too_long(void **state) {
  (void)state;
  static bytes model, vocabulary;
  char file[] = "file";
  char *with_model[] = {program, file, vocabulary_path};
  char *with_vocabulary[] = {program, model_path, file};
  read_data(model_path, &model);
  read_data(vocabulary_path, &vocabulary);
  const size_t model_lengths[] = {1,           24,          28,          1000,
                                  model.n - 4, model.n - 1, model.n + 1, model.n + 4};
  for (size_t i = 0; i < sizeof model_lengths / sizeof model_lengths[0]; i++) {
    test_put_file(file, model.data, model_lengths[i]);
    expect_refused(3, with_model, i < 2 ? "has a size that is 0" : "not as long");
  }
  const size_t vocabulary_lengths[] = {1, 4, 11, 12, 16, vocabulary.n - 8, vocabulary.n - 1};
  for (size_t i = 0; i < sizeof vocabulary_lengths / sizeof vocabulary_lengths[0]; i++) {
    test_put_file(file, vocabulary.data, vocabulary_lengths[i]);
    expect_refused(3, with_vocabulary, "file has fewer pieces");
  }
  test_put_file(file, "", 0);
  expect_refused(3, with_model, "file cannot be read");
}

/* Each of the seven sizes, beyond what is allowed; and heads that do not divide the width. */
static void sizes_that_no_model_has(void **state) {
  (void)state;
  static const int32_t wrong[] = {0, -1, INT32_MIN, 65537, INT32_MAX};
  char file[] = "file";
  char *argv[] = {program, file, vocabulary_path};
  for (int i = 0; i < 7; i++)
    for (size_t j = 0; j < sizeof wrong / sizeof wrong[0]; j++) {
      int32_t sizes[7] = {64, 172, 5, 8, 4, 512, 512};
      sizes[i] = wrong[j];
      test_put_file(file, sizes, sizeof sizes);
      expect_refused(3, argv, "file has a size that is 0, negative or too large");
    }
  int32_t odd[7 + 46] = {3, 1, 1, 2, 1, 1, 1}; /* and floats of 0 */
  test_put_file(file, odd, sizeof odd);
  expect_refused(3, argv, "; rule: ");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(float32_writes_the_same_with_the_same_logits),
      cmocka_unit_test(smaller_types_write_the_same),
      cmocka_unit_test(four_bits_write_another_story),
      cmocka_unit_test(the_program_tells_a_story_and_ends),
      cmocka_unit_test(attention_of_a_safetensors_file),
      cmocka_unit_test(attention_of_a_gguf_file),
      cmocka_unit_test(missing_files_and_unknown_types),
      cmocka_unit_test(files_that_are_cut_or_too_long),
      cmocka_unit_test(sizes_that_no_model_has),
  };
  return cmocka_run_group_tests(tests, read_expected, leave);
}
