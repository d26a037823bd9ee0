/* mha-conformance FOLDER [FAMILY...]: puts every case of the families (all of them if none is
 * named) to the library and reports each by name:
 *
 *   pass NAME (max error E of ATOL + RTOL·|expected|)[; not the library's: OUTPUT...]
 *   FAIL NAME: reason
 *   cannot NAME: reason                 the library cannot express the case
 *
 * Exit status 0 if all passed but for the expected "cannot"s; 1 if one failed, there was none, or
 * the "cannot"s are not the expected ones; 2 for a bad command line; 77 if FOLDER is "". */
#include "case.h"
#include "families.h"
#include "folders.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_USAGE = 2, EXIT_SKIPPED = 77 };

static const struct {
  const char *name;
  conf_translator *translate;
} families[] = {{"ort-attention", conf_translate_ort},
                {"onnx-attention", conf_translate_onnx},
                {"onnx-flexattention", conf_translate_onnx},
                {"mha-projection", conf_translate_projection}};

enum { N_FAMILIES = sizeof families / sizeof families[0] };

/* The cases that the library cannot express, with the reason that holds. Today it can express all;
 * the last line ends the table. */
static const struct {
  const char *family;
  const char *name;
  const char *reason;
} expected_cannots[] = {{NULL, NULL, NULL}};

typedef struct tally {
  int passed, failed, cannot;
  bool surprising; /* a "cannot" that is not in the table, or one there that did not come */
} tally;

/* ---- Reports ----------------------------------------------------------------------------------
 */

static void report(const conf_case *c, const char *name) {
  if (c->outcome == CONF_FAIL)
    printf("FAIL %s: %s\n", name, c->reason);
  else if (c->outcome == CONF_CANNOT)
    printf("cannot %s: %s\n", name, c->reason);
  else
    printf("pass %s (max error %.2g of %.2g + %.2g·|expected|)%s%s\n", name, c->max_error, c->atol,
           c->rtol, c->left_out[0] ? "; not the library's: " : "", c->left_out);
}

static bool is_expected_cannot(const char *family, const char *name, const char *reason) {
  for (int i = 0; expected_cannots[i].name; i++) {
    if (strcmp(expected_cannots[i].family, family) == 0 &&
        strcmp(expected_cannots[i].name, name) == 0)
      return strcmp(expected_cannots[i].reason, reason) == 0;
  }
  return false;
}

static int count_expected_cannots(const char *family) {
  int n = 0;
  for (int i = 0; expected_cannots[i].name; i++)
    n += strcmp(expected_cannots[i].family, family) == 0;
  return n;
}

static void count(const conf_case *c, const char *family, const char *name, tally *t) {
  t->passed += c->outcome == CONF_PASS;
  t->failed += c->outcome == CONF_FAIL;
  t->cannot += c->outcome == CONF_CANNOT;
  if (c->outcome == CONF_CANNOT && !is_expected_cannot(family, name, c->reason))
    t->surprising = true;
}

/* ---- Families ---------------------------------------------------------------------------------
 */

typedef struct family_run {
  int family;
  mha_context *context;
  tally tally;
} family_run;

static void run_case(const char *path, const char *name, void *user) {
  family_run *run = user;
  conf_case c;
  if (conf_case_open(path, &c) && strcmp(conf_text(&c, "name"), name) != 0)
    conf_fail(&c, "case.json is that of \"%s\"", conf_text(&c, "name"));
  if (c.outcome == CONF_PASS)
    families[run->family].translate(&c, run->context);
  report(&c, name);
  count(&c, families[run->family].name, name, &run->tally);
  conf_case_release(&c);
}

/* Whether the family came out as it should. */
static bool run_family(const char *root, int family, mha_context *context) {
  const char *name = families[family].name;
  family_run run = {.family = family, .context = context};
  char path[MHA_PATH_BYTES];
  if (!conf_join(path, root, name) || !conf_walk(path, run_case, &run)) {
    printf("FAIL %s: the folder %s/%s cannot be read\n", name, root, name);
    return false;
  }
  const tally *t = &run.tally;
  const int expected = count_expected_cannots(name);
  printf("%s: %d passed, %d failed, %d cannot (expected: %d)\n", name, t->passed, t->failed,
         t->cannot, expected);
  if (t->passed + t->failed + t->cannot == 0)
    printf("FAIL %s: there is no case\n", name);
  if (t->surprising || t->cannot != expected)
    printf("FAIL %s: the cases that cannot be expressed are not the expected ones\n", name);
  return t->passed > 0 && t->failed == 0 && !t->surprising && t->cannot == expected;
}

static int find_family(const char *name) {
  for (int i = 0; i < N_FAMILIES; i++) {
    if (strcmp(families[i].name, name) == 0)
      return i;
  }
  return -1;
}

/* A family that nobody translates must not go unnoticed. */
static void check_known(const char *path, const char *name, void *user) {
  bool *known = user;
  if (find_family(name) >= 0)
    return;
  printf("FAIL %s: no translator knows the folder %s\n", name, path);
  *known = false;
}

static bool run_families(const char *root, int n, char **names, mha_context *context) {
  bool passed = true;
  if (!conf_walk(root, check_known, &passed)) {
    printf("FAIL %s: the folder cannot be read\n", root);
    return false;
  }
  for (int i = 0; i < (n ? n : N_FAMILIES); i++)
    passed = run_family(root, n ? find_family(names[i]) : i, context) && passed;
  return passed;
}

static bool are_families(int n, char **names) {
  for (int i = 0; i < n; i++) {
    if (find_family(names[i]) < 0) {
      fprintf(stderr, "mha-conformance: FAMILY is \"%s\"; rule: one of", names[i]);
      for (int j = 0; j < N_FAMILIES; j++)
        fprintf(stderr, " %s", families[j].name);
      fprintf(stderr, "\n");
      return false;
    }
  }
  return true;
}

int main(int argc, char **argv) {
  mha_context *context = NULL;
  mha_error error;
  if (argc < 2) {
    fprintf(stderr, "usage: mha-conformance FOLDER [FAMILY...]\n");
    return EXIT_USAGE;
  }
  if (!argv[1][0]) {
    printf("SKIPPED: no folder of conformance data is given (MHA_CONFORMANCE_DIR)\n");
    return EXIT_SKIPPED;
  }
  if (!are_families(argc - 2, argv + 2))
    return EXIT_USAGE;
  if (mha_context_create(NULL, &context, &error)) {
    fprintf(stderr, "mha-conformance: %s\n", error.message);
    return EXIT_FAILURE;
  }
  const bool passed = run_families(argv[1], argc - 2, argv + 2, context);
  mha_context_destroy(context);
  return passed ? EXIT_SUCCESS : EXIT_FAILURE;
}
