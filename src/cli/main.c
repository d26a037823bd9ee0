/* Owns the command `mha`: which command runs, what is printed where, the exit status. */
#include "commands.h"
#include "signals.h"
#include "terminal.h"

#include "base/error.h"

#include <string.h>

#define COMMANDS "demo, run, inspect or convert"

static const struct {
  const char *name;
  const char *words; /* what follows it */
  const char *help;
  const char *letters; /* what its options' letters stand for; NULL = it has none */
  int bit;
  int (*run)(const mha_options *options, mha_error *error);
} commands[] = {
    {"demo", "[options]", "the article's example: each step's shape, and the output", NULL,
     MHA_COMMAND_DEMO, mha_demo},
    {"run", "[options]", "one layer over .npy files",
     "  B entries of a batch, Lq queries, Lk keys, H heads of queries, G heads of keys\n"
     "  and values, d numbers in a head, Eq Ek Ev Eo widths of what goes in and out",
     MHA_COMMAND_RUN, mha_run},
    {"inspect", "FILE|DIR [options]", "the tensors of a file, and the layers they make", NULL,
     MHA_COMMAND_INSPECT, mha_inspect},
    {"convert", "FILE|DIR OUT [options]", "a layer, its matrices in another type", NULL,
     MHA_COMMAND_CONVERT, mha_convert},
};

enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

/* One line, whatever a path, a word or a file may hold. */
static int fail(int exit_status, const char *message) {
  fputs("mha: ", stderr);
  (void)mha_terminal_print(message, strlen(message), stderr);
  fputc('\n', stderr);
  return exit_status;
}

/* Success, unless standard output did not take what was printed. */
static int finish(void) {
  return fflush(stdout) != 0 || ferror(stdout) ? fail(MHA_EXIT_DATA, "standard output cannot be "
                                                                     "written")
                                               : MHA_EXIT_OK;
}

static void print_usage(int command) {
  printf("mha %s %s   %s\n", commands[command].name, commands[command].words,
         commands[command].help);
  if (commands[command].letters)
    puts(commands[command].letters);
  mha_options_help(commands[command].bit, stdout);
}

static int print_help(void) {
  puts("mha - multi-head attention on the CPU\n");
  for (int i = 0; i < N_COMMANDS; i++) {
    print_usage(i);
    puts("");
  }
  puts("mha --help      print this; behind a command, its options\n"
       "mha --version   print the release and what the library runs on\n\n"
       "A value is the next word or follows '=', and may begin with '-'.\n"
       "A result replaces its file as a whole; streams, pipes and devices are refused.\n"
       "Exit status: 0, 1 for bad data or files, 2 for a bad command line.");
  return finish();
}

static int print_version(void) {
  char info[4096];
  const size_t length = mha_build_info(info, sizeof info);
  printf("mha %s\n%s", mha_version(), info);
  if (length > 0 && info[strlen(info) - 1] != '\n')
    puts("");
  return finish();
}

static int print_command_help(int command) {
  print_usage(command);
  return finish();
}

static int run_command(int command, const mha_options *options) {
  mha_error error;
  const int exit_status = commands[command].run(options, &error);
  if (exit_status == MHA_EXIT_OK)
    return finish();
  (void)fflush(stdout);
  return fail(exit_status, error.message);
}

static int parse_and_run(int command, int n_words, char **words) {
  mha_error error;
  mha_options options;
  int exit_status;
  const mha_status status =
      mha_options_parse(commands[command].bit, n_words, words, &options, &error);
  if (status)
    exit_status = fail(status == MHA_ERROR_MEMORY ? MHA_EXIT_DATA : MHA_EXIT_USAGE, error.message);
  else if (options.values[MHA_OPTION_HELP].given)
    exit_status = print_command_help(command);
  else
    exit_status = run_command(command, &options);
  mha_options_release(&options);
  return exit_status;
}

int main(int argc, char **argv) {
  mha_error error;
  mha_signals_prepare();
  if (argc < 2)
    return fail(MHA_EXIT_USAGE, "no command; rule: " COMMANDS ", and --help explains them");
  const bool alone = argc == 2;
  if (alone && strcmp(argv[1], "--help") == 0)
    return print_help();
  if (alone && strcmp(argv[1], "--version") == 0)
    return print_version();
  if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "--version") == 0) {
    (void)mha_fail(
        &error, MHA_ERROR_VALUE,
        "%s is given with \"%.64s\"; rule: it stands alone, and --help also behind " COMMANDS,
        argv[1], argv[2]);
    return fail(MHA_EXIT_USAGE, error.message);
  }
  for (int i = 0; i < N_COMMANDS; i++)
    if (strcmp(argv[1], commands[i].name) == 0)
      return parse_and_run(i, argc - 2, argv + 2);
  (void)mha_fail(&error, MHA_ERROR_VALUE,
                 "unknown command \"%.64s\"; rule: " COMMANDS ", and --help explains them",
                 argv[1]);
  return fail(MHA_EXIT_USAGE, error.message);
}
