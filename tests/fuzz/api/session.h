/* One input of the fuzzer: a context, layers and caches, and calls one after the other. Each call
 * is a trial: made twice, once in the context that the input describes and once in a plain one, and
 * judged. So that appending can be made twice too, each cache has a twin with the same history. */
#ifndef MHA_TESTS_FUZZ_SESSION_H
#define MHA_TESTS_FUZZ_SESSION_H

#include "../fuzz.h"
#include "memory.h"
#include "mha.h"
#include "reader.h"

#include <stdbool.h>

/* ---- what lives as long as the input ---- */

enum {
  FUZZ_N_LAYERS = 2,
  FUZZ_N_CACHES = 2,
  FUZZ_MOST_ENTRIES = 4,
  FUZZ_MOST_CAPACITY = 40,
  FUZZ_MOST_THREADS = 3
};

typedef struct fuzz_layer {
  mha_weights *weights; /* NULL = none yet */
  int references;
  mha_config config; /* all sizes filled in */
  int64_t ld[4];     /* of Wq, Wk, Wv and Wo as they were given, 0 = dense */
  fuzz_pool arrays;  /* that the layer goes on reading */
  float *borrowed;   /* one of them, or NULL */
} fuzz_layer;

typedef struct fuzz_cache {
  mha_cache *cache, *twin; /* NULL = none yet */
  mha_cache_options sizes; /* all filled in */
  /* what its entries must hold, before the call and behind it */
  int64_t lengths[FUZZ_MOST_ENTRIES], highest[FUZZ_MOST_ENTRIES];
  int64_t next_lengths[FUZZ_MOST_ENTRIES], next_highest[FUZZ_MOST_ENTRIES];
  bool touched[FUZZ_MOST_ENTRIES][FUZZ_MOST_CAPACITY]; /* rows that the call writes */
  char *keys_before, *values_before;
} fuzz_cache;

typedef enum fuzz_team_kind {
  FUZZ_IN_ORDER,
  FUZZ_BACKWARDS,
  FUZZ_ROTATED,
  FUZZ_THREADS,
  FUZZ_N_TEAMS
} fuzz_team_kind;

/* A caller's thread pool. */
typedef struct fuzz_team {
  int32_t n_threads;
  fuzz_team_kind kind;
  mha_context *context; /* that calls it */
} fuzz_team;

typedef struct fuzz_session {
  fuzz_reader *reader;
  mha_context *context, *plain;
  fuzz_allocator memory, plain_memory; /* of the contexts */
  fuzz_allocator home;                 /* of layers and caches */
  fuzz_team team;
  bool traced;
  fuzz_layer layers[FUZZ_N_LAYERS];
  fuzz_cache caches[FUZZ_N_CACHES];
} fuzz_session;

/* ---- one call ---- */

typedef enum fuzz_expect { FUZZ_ANYTHING, FUZZ_SUCCESS, FUZZ_FAILURE } fuzz_expect;

/* Begins with fuzz_trial_begin; whatever call it is embeds it as its first member. */
typedef struct fuzz_trial {
  fuzz_session *session;
  fuzz_reader *reader;
  fuzz_pool pool;     /* all that the call is given */
  fuzz_expect expect; /* of a call that memory is there for */
  bool hostile;       /* one thing in it is still to be made wrong */
  bool without_error; /* NULL in the place of the mha_error */
  bool no_allocation; /* scratch is reserved */
  int64_t left;       /* 0 to 15: a choice without a byte, see fuzz_read_left */
  mha_status (*make)(struct fuzz_trial *trial, mha_context *context, bool again, mha_error *error);
} fuzz_trial;

void fuzz_trial_begin(fuzz_trial *trial, fuzz_session *session);
/* Makes the call, judges what came of it, and forgets what it was given. Returns its status. */
mha_status fuzz_trial_run(fuzz_trial *trial);

/* What the one hostile thing does to the expectation. FUZZ_SUCCESS: nothing, it does not count. */
void fuzz_trial_spoil(fuzz_trial *trial, fuzz_expect expect);
/* The same where the contract refuses it, or may. */
void fuzz_trial_refuse(fuzz_trial *trial, bool certain);

/* Bits of flags: MHA_ALLOW_EMPTY, if a size that is 0 is meant; failure is expected if it is not.
 */
uint32_t fuzz_choose_flags(fuzz_trial *trial, bool empty);

/* Copies a struct that begins with its size into memory of exactly that size. A hostile one has a
 * size that is refused; otherwise it may have a tail of zeros. */
void *fuzz_trial_struct(fuzz_trial *trial, const void *given, size_t bytes, bool hostile);

/* What holds of every status with its error. */
void fuzz_judge_error(mha_status status, const mha_error *error);

/* ---- the kinds of calls: each makes one from the input's next bytes ---- */

void fuzz_make_context(fuzz_session *session);
void fuzz_end_context(fuzz_session *session);
void fuzz_try_scratch(fuzz_session *session);
/* Whether a shape is that of a call, or of larger ones too. */
void fuzz_enlarge_shape(fuzz_trial *trial, mha_shape *shape);
void fuzz_try_trace(fuzz_session *session);

void fuzz_make_layer(fuzz_session *session);
void fuzz_end_layer(fuzz_layer *layer);
void fuzz_try_layer(fuzz_session *session);
void fuzz_try_files(fuzz_session *session);

void fuzz_make_cache(fuzz_session *session);
void fuzz_end_cache(fuzz_cache *cache);
void fuzz_try_cache_entry(fuzz_session *session);
void fuzz_try_cache_append(fuzz_session *session);

void fuzz_try_forward(fuzz_session *session);
void fuzz_try_self_attention(fuzz_session *session);
void fuzz_try_attend(fuzz_session *session);
void fuzz_try_merge(fuzz_session *session);
void fuzz_try_small_functions(fuzz_session *session);

/* ---- for those that touch caches ---- */

/* Before a call: what the caches hold, and nothing is touched yet. */
void fuzz_caches_remember(fuzz_session *session);
/* The call failed: nothing has changed. */
void fuzz_caches_check_untouched(fuzz_session *session);
/* The call succeeded: what is not touched is as it was, cache and twin are equal, and what was to
 * come next has come. */
void fuzz_caches_check_changed(fuzz_session *session);
/* One of the caches that there are, or NULL. */
fuzz_cache *fuzz_choose_cache(fuzz_session *session);
/* The entries [B] that a call uses; NULL = b. */
int64_t *fuzz_choose_entries(fuzz_trial *trial, fuzz_cache *cache, int64_t B, bool distinct);
/* Counts [B] of 0..most; NULL = most. */
int64_t *fuzz_choose_counts(fuzz_trial *trial, int64_t B, int64_t most);
/* counts[b] rows, NULL = `rows`, go to each entry; failure is expected where they do not fit. */
void fuzz_cache_expect_appends(fuzz_trial *trial, fuzz_cache *cache, int64_t B, int64_t rows,
                               const int64_t *entries, const int64_t *counts);

#endif
