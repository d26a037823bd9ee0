/* Owns what signals do to the command. */
#define _XOPEN_SOURCE 700

#include "signals.h"

#include <stdatomic.h>
#include <stddef.h>
#include <unistd.h>

static const int ending[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXCPU};

enum { N_ENDING = sizeof ending / sizeof ending[0] };

static const mha_output *volatile watched;
static volatile sig_atomic_t n_watched;
static const char *volatile watched_folder;

static sigset_t before_hold;

/* Calls async-signal-safe functions alone. The signal comes again when this returns, and is not
 * caught any more. */
static void clean_up(int number) {
  for (int i = 0; i < n_watched; i++)
    mha_output_remove(&watched[i]);
  if (watched_folder)
    (void)rmdir(watched_folder);
  (void)signal(number, SIG_DFL);
  (void)raise(number);
}

void mha_signals_prepare(void) {
  struct sigaction action = {.sa_handler = clean_up};
  const struct sigaction ignore = {.sa_handler = SIG_IGN};
  (void)sigemptyset(&action.sa_mask);
  for (int i = 0; i < N_ENDING; i++)
    (void)sigaddset(&action.sa_mask, ending[i]);
  for (int i = 0; i < N_ENDING; i++) {
    struct sigaction before;
    if (sigaction(ending[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
      (void)sigaction(ending[i], &action, NULL);
  }
  (void)sigaction(SIGXFSZ, &ignore, NULL);
}

void mha_signals_hold(void) {
  sigset_t set;
  (void)sigemptyset(&set);
  for (int i = 0; i < N_ENDING; i++)
    (void)sigaddset(&set, ending[i]);
  (void)sigprocmask(SIG_BLOCK, &set, &before_hold);
}

void mha_signals_let_go(void) {
  (void)sigprocmask(SIG_SETMASK, &before_hold, NULL);
}

void mha_signals_watch(const mha_output *outputs, int n) {
  n_watched = 0;
  atomic_signal_fence(memory_order_seq_cst);
  watched = outputs;
  atomic_signal_fence(memory_order_seq_cst);
  n_watched = n;
}

void mha_signals_watch_folder(const char *path) {
  watched_folder = path;
}
