/* mha-conformance-gradients FOLDER: puts every case of gradients in FOLDER to the judge and to the
 * library, without a tape and with one, and reports each by name:
 *
 *   pass NAME (errors of what is allowed: judge J, library E)
 *   FAIL NAME: reason
 *
 * Exit status 0 if all passed; 1 if one failed or there was none; 2 for a bad command line; 77 if
 * FOLDER is "". */
#include "folders.h"
#include "gradients_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_USAGE = 2, EXIT_SKIPPED = 77 };

typedef struct cases {
  mha_context *context;
  int passed, failed;
} cases;

static void report(const grad_case *c, const char *name) {
  if (c->base.outcome == CONF_PASS)
    printf("pass %s (errors of what is allowed: judge %.2g, library %.2g)\n", name, c->worst_judge,
           c->worst_library);
  else
    printf("FAIL %s: %s\n", name, c->base.reason);
}

static void run_case(const char *path, const char *name, void *user) {
  cases *all = user;
  grad_case c;
  if (grad_case_open(path, &c) && strcmp(conf_text(&c.base, "name"), name) != 0)
    conf_fail(&c.base, "case.json is that of \"%s\"", conf_text(&c.base, "name"));
  if (c.base.outcome == CONF_PASS && grad_judge(&c) && grad_all_done(&c) &&
      grad_run(&c, all->context))
    grad_all_done(&c);
  report(&c, name);
  all->passed += c.base.outcome == CONF_PASS;
  all->failed += c.base.outcome != CONF_PASS;
  grad_case_release(&c);
}

static bool run(const char *root, mha_context *context) {
  cases all = {context, 0, 0};
  if (!conf_walk(root, run_case, &all)) {
    printf("FAIL: the folder %s cannot be read\n", root);
    return false;
  }
  printf("gradients: %d passed, %d failed\n", all.passed, all.failed);
  if (all.passed + all.failed == 0)
    printf("FAIL: there is no case in %s\n", root);
  return all.passed > 0 && all.failed == 0;
}

int main(int argc, char **argv) {
  mha_context *context = NULL;
  mha_error error;
  if (argc != 2) {
    fprintf(stderr, "usage: mha-conformance-gradients FOLDER\n");
    return EXIT_USAGE;
  }
  if (!argv[1][0]) {
    printf("SKIPPED: no folder of gradients is given (MHA_GRADIENTS_DIR)\n");
    return EXIT_SKIPPED;
  }
  if (mha_context_create(NULL, &context, &error)) {
    fprintf(stderr, "mha-conformance-gradients: %s\n", error.message);
    return EXIT_FAILURE;
  }
  const bool passed = run(argv[1], context);
  mha_context_destroy(context);
  return passed ? EXIT_SUCCESS : EXIT_FAILURE;
}
