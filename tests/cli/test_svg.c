/* The picture of attention weights, read back as a picture: well-formed, each cell drawn once in a
 * colour that tells its weight, labels that harm nothing. */
#define _XOPEN_SOURCE 700

#include "support.h"

#include "cli/svg.h"
#include "files/text.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- Drawing and reading --------------------------------------------------------------------- */

static char path[] = "test_svg.XXXXXX";
static char *text; /* the picture drawn last */

static void read_picture(void) {
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  assert_int_equal(fseek(file, 0, SEEK_END), 0);
  const long n = ftell(file);
  assert_true(n > 0);
  rewind(file);
  free(text);
  text = malloc((size_t)n + 1);
  assert_non_null(text);
  assert_int_equal(fread(text, 1, (size_t)n, file), n);
  text[n] = '\0';
  assert_int_equal(strlen(text), n);
  assert_int_equal(fclose(file), 0);
}

static bool is_entity(const char *at) {
  static const char *const names[] = {"&lt;", "&gt;", "&amp;", "&quot;"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (strncmp(at, names[i], strlen(names[i])) == 0)
      return true;
  return false;
}

/* Character data or an attribute's value up to `end`. */
static const char *check_data(const char *at, char end) {
  for (; *at != end; at++) {
    assert_true(*at != '\0' && *at != '<');
    assert_true(*at != '&' || is_entity(at));
  }
  return at;
}

static const char *check_name(const char *at) {
  assert_true(isalpha((unsigned char)*at));
  while (isalnum((unsigned char)*at) || *at == '-')
    at++;
  return at;
}

/* A tag behind its '<'; the names of open elements are a stack. */
static const char *check_tag(const char *at, char stack[16][32], int *depth) {
  const bool closes = *at == '/';
  at += closes;
  const char *end = check_name(at);
  const size_t n = (size_t)(end - at);
  assert_in_range(n, 1, 31);
  if (closes) {
    assert_true(--*depth >= 0);
    assert_true(strlen(stack[*depth]) == n && memcmp(stack[*depth], at, n) == 0);
    assert_int_equal(*end, '>');
    return end + 1;
  }
  assert_in_range(*depth, 0, 15);
  memcpy(stack[*depth], at, n);
  stack[(*depth)++][n] = '\0';
  for (at = end; *at == ' '; at++) {
    at = check_name(at + 1);
    assert_memory_equal(at, "=\"", 2);
    at = check_data(at + 2, '"');
  }
  if (*at == '/') {
    --*depth;
    at++;
  }
  assert_int_equal(*at, '>');
  return at + 1;
}

/* xmllint, where it is installed, agrees. */
static void check_by_xmllint(void) {
  int result = 0;
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    execlp("xmllint", "xmllint", "--noout", "--nonet", path, (char *)NULL);
    _exit(0); /* not installed */
  }
  assert_int_equal(waitpid(child, &result, 0), child);
  assert_true(WIFEXITED(result) && WEXITSTATUS(result) == 0);
}

/* Well-formed, as far as this writer goes: elements that close in order, quoted attributes, known
 * entities, UTF-8, and of the control characters only the end of a line. */
static void check_well_formed(void) {
  static const char prolog[] = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg ";
  char stack[16][32];
  int depth = 0;
  assert_memory_equal(text, prolog, sizeof prolog - 1);
  const char *at = strchr(text, '\n') + 1;
  do {
    assert_int_equal(*at, '<');
    at = check_tag(at + 1, stack, &depth);
    if (depth > 0)
      at = check_data(at, '<');
  } while (depth > 0);
  assert_string_equal(at, "\n");
  assert_null(strstr(text, "<script"));
  assert_null(strstr(text, "href"));
  assert_null(strstr(text, "\xEF\xBF\xBE"));
  for (char *line = text; *line != '\0';) {
    char *end = strchr(line, '\n');
    assert_non_null(end);
    *end = '\0';
    assert_null(mha_name_fault(line));
    *end = '\n';
    line = end + 1;
  }
  check_by_xmllint();
}

static void draw(const mha_heat_maps *maps) {
  mha_output output;
  mha_error error;
  test_expect(mha_svg_stage(path, maps, &output, &error), MHA_OK, &error);
  test_expect(mha_output_commit(&output, &error), MHA_OK, &error);
  read_picture();
  check_well_formed();
}

static int count(const char *piece) {
  int n = 0;
  for (const char *at = strstr(text, piece); at; at = strstr(at + 1, piece))
    n++;
  return n;
}

/* ---- Cells ----------------------------------------------------------------------------------- */

enum { MOST = 512 * 512 };

static unsigned colours[MOST]; /* of the map read last */
static bool drawn[MOST];

/* The next bytes alone: sscanf measures all that it is given first, and a picture is long. */
static const char *next_piece(const char *at) {
  static char piece[64];
  (void)snprintf(piece, sizeof piece, "%.*s", (int)sizeof piece - 1, at);
  return piece;
}

/* Marks the runs of one path's data, up to the quote. */
static const char *read_runs(const char *at, int rows, int columns, unsigned colour) {
  while (*at != '"') {
    int x = 0;
    int y = 0;
    int n = 0;
    int back = 0;
    int used = 0;
    assert_int_equal(sscanf(next_piece(at), "M%d %dh%dv1h-%dz%n", &x, &y, &n, &back, &used), 4);
    assert_true(used > 0 && n > 0 && back == n);
    assert_true(x >= 0 && x + n <= columns && y >= 0 && y < rows);
    for (int j = x; j < x + n; j++) {
      assert_false(drawn[y * columns + j]);
      drawn[y * columns + j] = true;
      colours[y * columns + j] = colour;
    }
    at += used;
  }
  return at;
}

/* Reads the map that begins behind `at`: every cell is there, and once. */
static const char *read_map(const char *at, int rows, int columns) {
  unsigned colour = 0;
  int used = 0;
  memset(drawn, 0, sizeof drawn);
  at = strstr(at, "shape-rendering=\"crispEdges\">\n<path");
  assert_non_null(at);
  at = strchr(at, '\n') + 1;
  for (; sscanf(next_piece(at), "<path fill=\"#%6x\" d=\"%n", &colour, &used) == 1; at += 4) {
    at = read_runs(at + used, rows, columns, colour);
    assert_memory_equal(at, "\"/>\n", 4);
  }
  for (int i = 0; i < rows * columns; i++)
    assert_true(drawn[i]);
  return at;
}

/* One channel of sRGB as light. */
static double light(unsigned channel) {
  const double c = channel / 255.0;
  return c <= 0.04045 ? c / 12.92 : pow((c + 0.055) / 1.055, 2.4);
}

/* L* of CIELAB, 0 to 100: how light a colour looks. */
static double lightness(unsigned colour) {
  const double y = 0.2126 * light(colour >> 16 & 0xFFU) + 0.7152 * light(colour >> 8 & 0xFFU) +
                   0.0722 * light(colour & 0xFFU);
  return y > 0.008856 ? 116 * cbrt(y) - 16 : 903.3 * y;
}

/* The scale falls evenly from 100 to 20. Half a level is 0.16; the rest is a colour's rounding to
 * whole numbers and the bend between anchors. */
static void check_colour(unsigned colour, double share) {
  test_near("lightness", lightness(colour), 100 - 80 * share, 1);
}

static mha_heat_maps one_map(int64_t n_queries, int64_t n_keys, const float *weights) {
  return (mha_heat_maps){
      .n_entries = 1, .n_heads = 1, .n_queries = n_queries, .n_keys = n_keys, .weights = weights};
}

static float numbers[MOST];

static void colours_follow_the_weights(void **state) {
  const mha_heat_maps maps = one_map(1, 512, numbers);
  (void)state;
  for (int j = 0; j < 512; j++)
    numbers[j] = (float)j / 511;
  draw(&maps);
  (void)read_map(text, 1, 512);
  assert_int_equal(colours[0], 0xFFFFFF);
  for (int j = 0; j < 512; j++)
    check_colour(colours[j], j / 511.0);
  for (int j = 1; j < 512; j++)
    assert_true(lightness(colours[j]) <= lightness(colours[j - 1]));
  for (int j = 4; j < 512; j++) /* two levels at least */
    assert_true(lightness(colours[j]) < lightness(colours[j - 4]));
}

/* The largest number of the scale is a round one that no weight exceeds. */
static void the_scale_ends_above_the_largest(void **state) {
  static const struct {
    float largest;
    const char *top, *half;
  } rows[] = {{1, ">1<", ">0.5<"},
              {1.0000001F, ">1<", ">0.5<"},
              {0.81F, ">1<", ">0.5<"},
              {0.61F, ">0.8<", ">0.4<"},
              {0.2F, ">0.2<", ">0.1<"},
              {0.21F, ">0.25<", ">0.125<"},
              {0.014F, ">0.015<", ">0.0075<"},
              {0, ">1<", ">0.5<"},
              {3e-8F, ">3e-08<", ">1.5e-08<"}};
  const mha_heat_maps maps = one_map(2, 2, numbers);
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    test_note("largest %g", (double)rows[i].largest);
    memset(numbers, 0, sizeof numbers);
    numbers[2] = rows[i].largest;
    draw(&maps);
    assert_non_null(strstr(text, rows[i].top));
    assert_non_null(strstr(text, rows[i].half));
    assert_non_null(strstr(text, ">0<"));
  }
}

/* Width and height that the picture says it has. */
static void read_size(int *width, int *height) {
  int again[2] = {0, 0};
  const char *at = strstr(text, " width=\"");
  assert_non_null(at);
  assert_int_equal(sscanf(at, " width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\"", width, height,
                          &again[0], &again[1]),
                   4);
  assert_int_equal(*width, again[0]);
  assert_int_equal(*height, again[1]);
}

static void every_cell_is_drawn_once(void **state) {
  static const struct {
    int64_t entries, heads, queries, keys;
    int most_width, most_height;
  } rows[] = {{1, 1, 1, 1, 400, 300},     {1, 2, 7, 7, 900, 400},   {1, 8, 72, 72, 1600, 900},
              {2, 3, 5, 9, 1600, 900},    {1, 1, 3, 512, 800, 300}, {1, 1, 512, 3, 400, 700},
              {1, 1, 512, 512, 800, 700}, {3, 1, 1, 2, 400, 900}};
  test_random random;
  (void)state;
  test_random_seed(&random, 1);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    const int64_t cells = rows[i].queries * rows[i].keys;
    const int64_t n = rows[i].entries * rows[i].heads;
    const mha_heat_maps maps = {.n_entries = rows[i].entries,
                                .n_heads = rows[i].heads,
                                .n_queries = rows[i].queries,
                                .n_keys = rows[i].keys,
                                .weights = numbers};
    int width = 0;
    int height = 0;
    test_note("row %zu", i);
    for (int64_t k = 0; k < n * cells; k++)
      numbers[k] = (float)test_random_uniform(&random, 0, 1);
    numbers[n * cells - 1] = 1; /* the end of the scale is then 1 */
    draw(&maps);
    const char *at = text;
    for (int64_t map = 0; map < n; map++) {
      at = read_map(at, (int)rows[i].queries, (int)rows[i].keys);
      for (int64_t k = 0; k < cells; k++)
        check_colour(colours[k], (double)numbers[map * cells + k]);
    }
    assert_null(strstr(at, "<path"));
    assert_int_equal(count(">key</text>"), n);
    assert_int_equal(count(">query</text>"), n);
    assert_int_equal(count("entry "), rows[i].entries > 1 ? n : 0);
    assert_non_null(strstr(text, rows[i].entries > 1 ? ">entry 1, head 0<" : ">head 0<"));
    read_size(&width, &height);
    assert_in_range(width, 100, rows[i].most_width);
    assert_in_range(height, 100, rows[i].most_height);
  }
}

static void not_a_number_has_its_own_colour(void **state) {
  const mha_heat_maps maps = one_map(2, 2, numbers);
  (void)state;
  numbers[0] = 0.5F;
  numbers[1] = numbers[2] = 0;
  numbers[3] = NAN;
  draw(&maps);
  (void)read_map(text, 2, 2);
  assert_int_equal(count(">nan<"), 2);                    /* in its cell, and beside the scale */
  assert_true((colours[3] >> 16) > (colours[3] & 0xFFU)); /* no blue */
  assert_true(colours[3] != colours[0] && colours[0] != colours[1]);
  numbers[3] = 0;
  draw(&maps);
  assert_int_equal(count("nan"), 0);
}

/* ---- Labels ---------------------------------------------------------------------------------- */

#define YUAN     "\xE8\xBF\x9C"
#define ELLIPSIS "\xE2\x80\xA6"

static void labels_are_counted(void **state) {
  static const struct {
    const char *text;
    int64_t n;
    const char *last;
  } rows[] = {
      {"", 0, NULL},
      {"a", 1, "a"},
      {"abc", 3, "c"},
      {"a,b", 2, "b"},
      {"ab,cd,", 3, ""},
      {",", 2, ""},
      {",,x", 3, "x"},
      {"one two,three", 2, "three"},
      {YUAN "\xE6\x96\xB9", 2, "\xE6\x96\xB9"},
      {YUAN "," YUAN YUAN, 2, YUAN YUAN},
      {"e\xCC\x81", 2, "\xCC\x81"}, /* e and a combining accent */
      {"a\xF0\x9F\x8D\x8E"
       "b",
       3, "b"}, /* four bytes */
      {"\xE2\x80\xAE"
       "x",
       2, "x"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_labels labels = {0};
    mha_error error;
    char fragment[64];
    test_note("row %zu", i);
    assert_int_equal(mha_labels_cut(rows[i].text, rows[i].n, &labels, NULL), MHA_OK);
    assert_int_equal(labels.n, rows[i].n);
    if (rows[i].last) {
      const mha_label last = labels.items[labels.n - 1];
      assert_int_equal(last.bytes, strlen(rows[i].last));
      assert_memory_equal(last.text, rows[i].last, last.bytes);
    }
    mha_labels_release(&labels);
    assert_null(labels.items);
    assert_int_equal(mha_labels_cut(rows[i].text, rows[i].n + 1, &labels, &error),
                     MHA_ERROR_LENGTH);
    (void)snprintf(fragment, sizeof fragment, "--labels has %d labels for %d tokens",
                   (int)rows[i].n, (int)rows[i].n + 1);
    assert_non_null(strstr(error.message, fragment));
    assert_null(labels.items);
  }
  mha_labels none = {0};
  assert_int_equal(mha_labels_cut(NULL, 5, &none, NULL), MHA_OK);
  assert_null(none.items);
}

/* What a label may hold, and how it stands in the file. */
static void hostile_labels_harm_nothing(void **state) {
  static const char *const rows[][2] = {
      {"</text><script>", ">&lt;/text&gt;&lt;script&gt;<"},
      {"a&b\"c'", ">a&amp;b&quot;c'<"},
      {"&amp;", ">&amp;amp;<"},
      {"]]>", ">]]&gt;<"},
      {"\x1b[2J\n\t\x7f", ">\\x1B[2J\\x0A\\x09\\x7F<"},
      {"\xC2\x85x", ">\\xC2\\x85x<"},
      {"\xE2\x80\xAE\xD8\x9C", ">\\xE2\\x80\\xAE\\xD8\\x9C<"},
      {"\xFF\xC0\x80\xED\xA0\x80", ">\\xFF\\xC0\\x80\\xED" ELLIPSIS "<"},
      {"\xEF\xBF\xBE\xEF\xBF\xBF", ">\\xEF\\xBF\\xBE\\xEF" ELLIPSIS "<"},
      {"\xEF\xBF\xBD", ">\xEF\xBF\xBD<"},
      {YUAN, ">" YUAN "<"},
      {"\xF0\x9F\x8D\x8E", ">\xF0\x9F\x8D\x8E<"},
      {"", "><"},
      {"exactly twenty wide.", ">exactly twenty wide.<"},
      {"twenty-one letters it", ">twenty-one letters " ELLIPSIS "<"},
      {YUAN YUAN YUAN YUAN YUAN YUAN YUAN YUAN YUAN YUAN YUAN,
       ">" YUAN YUAN YUAN YUAN YUAN YUAN YUAN YUAN YUAN "" ELLIPSIS "<"},
  };
  enum { N = sizeof rows / sizeof rows[0] };
  mha_label labels[N];
  mha_heat_maps maps = one_map(N, N, numbers);
  (void)state;
  for (int i = 0; i < N; i++)
    labels[i] = (mha_label){rows[i][0], strlen(rows[i][0])};
  maps.query_labels = maps.key_labels = labels;
  memset(numbers, 0, sizeof numbers);
  draw(&maps);
  for (int i = 0; i < N; i++) {
    test_note("label %d", i);
    if (count(rows[i][1]) < 2)
      test_failed("not twice there: %s in\n%s", rows[i][1], text);
  }
}

/* Texts at the left of a map. */
static int query_labels(void) {
  int n = 0;
  const char *at = strstr(text, "<g text-anchor=\"end\">\n");
  assert_non_null(at);
  for (at = strchr(at, '\n') + 1; strncmp(at, "<text", 5) == 0; at = strchr(at, '\n') + 1)
    n++;
  return n;
}

static void many_labels_are_thinned(void **state) {
  static const struct {
    int n, given, numbered;
  } rows[] = {{7, 7, 7}, {20, 20, 20}, {40, 40, 20}, {72, 15, 15}, {512, 26, 26}};
  static mha_label labels[512];
  (void)state;
  memset(numbers, 0, sizeof numbers);
  for (int i = 0; i < 512; i++)
    labels[i] = (mha_label){"word", 4};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_heat_maps maps = one_map(rows[i].n, rows[i].n, numbers);
    test_note("%d tokens", rows[i].n);
    draw(&maps);
    assert_int_equal(query_labels(), rows[i].numbered);
    maps.query_labels = maps.key_labels = labels;
    draw(&maps);
    assert_int_equal(query_labels(), rows[i].given);
    assert_int_equal(count(">word<"), 2 * rows[i].given);
  }
}

/* ---- Refusals -------------------------------------------------------------------------------- */

static void other_sizes_are_refused(void **state) {
  static const mha_heat_maps rows[] = {
      {.n_entries = 1, .n_heads = 1, .n_queries = 513, .n_keys = 1},
      {.n_entries = 1, .n_heads = 1, .n_queries = 1, .n_keys = 513},
      {.n_entries = 1, .n_heads = 9, .n_queries = 512, .n_keys = 512},
      {.n_entries = 9, .n_heads = 1, .n_queries = 512, .n_keys = 512},
      {.n_entries = INT64_MAX, .n_heads = 2, .n_queries = 1, .n_keys = 1},
      {.n_entries = INT64_MAX / 2, .n_heads = 2, .n_queries = 2, .n_keys = 1},
      {.n_entries = 0, .n_heads = 1, .n_queries = 1, .n_keys = 1},
      {.n_entries = 1, .n_heads = 1, .n_queries = 0, .n_keys = 0},
      {.n_entries = 1, .n_heads = 1, .n_queries = INT64_MAX, .n_keys = INT64_MAX},
  };
  static const mha_heat_maps most = {.n_entries = 1, .n_heads = 8, .n_queries = 512, .n_keys = 512};
  mha_output output;
  mha_error error;
  (void)state;
  assert_int_equal(mha_svg_check("p.svg", &most, NULL), MHA_OK);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    test_note("row %zu", i);
    assert_int_equal(mha_svg_stage("absent/p.svg", &rows[i], &output, &error), MHA_ERROR_SIZE);
    assert_non_null(strstr(error.message, "absent/p.svg would show "));
    assert_int_equal(output.temporary[0], '\0');
  }
  const mha_heat_maps maps = one_map(1, 1, numbers);
  assert_int_equal(mha_svg_stage("absent/p.svg", &maps, &output, &error), MHA_ERROR_IO);
}

static int make_file(void **state) {
  (void)state;
  const int file = mkstemp(path);
  return file < 0 || close(file) != 0;
}

static int remove_file(void **state) {
  (void)state;
  free(text);
  return unlink(path);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(colours_follow_the_weights),
      cmocka_unit_test(the_scale_ends_above_the_largest),
      cmocka_unit_test(every_cell_is_drawn_once),
      cmocka_unit_test(not_a_number_has_its_own_colour),
      cmocka_unit_test(labels_are_counted),
      cmocka_unit_test(hostile_labels_harm_nothing),
      cmocka_unit_test(many_labels_are_thinned),
      cmocka_unit_test(other_sizes_are_refused),
  };
  return cmocka_run_group_tests(tests, make_file, remove_file);
}
