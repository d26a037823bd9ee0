/* Owns contexts: their making, a caller's thread pools, scratch that is reserved, and what a
 * callback may and may not do. */
#include "session.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- from within a call ---- */

/* A context that is inside a call refuses to be entered. */
static void knock(mha_context *context) {
  mha_error error;
  mha_shape shape;
  size_t bytes = 0;
  mha_status status = mha_context_trace(context, NULL, NULL, &error);
  fuzz_judge_error(status, &error);
  FUZZ_CHECK(status == MHA_ERROR_BUSY);
  MHA_INIT(&shape);
  shape.batch = shape.query_length = shape.n_heads = shape.value_head_size = 1;
  status = mha_context_reserve(context, NULL, &shape, &error);
  fuzz_judge_error(status, &error);
  FUZZ_CHECK(status == MHA_ERROR_BUSY);
  FUZZ_CHECK(mha_workspace_bytes(context, NULL, &shape, &bytes, &error) == MHA_OK && bytes > 0);
}

/* ---- a caller's thread pool ---- */

typedef struct member {
  mha_task *task;
  void *argument;
  int64_t index;
} member;

static void *run_member(void *argument) {
  const member *m = argument;
  m->task(m->argument, m->index);
  return NULL;
}

static void run_on_threads(int64_t n, mha_task *task, void *argument) {
  pthread_t threads[FUZZ_MOST_THREADS];
  member members[FUZZ_MOST_THREADS];
  for (int64_t i = 0; i < n; i++) {
    const member m = {task, argument, i};
    members[i] = m;
    FUZZ_CHECK(i == 0 || pthread_create(&threads[i], NULL, run_member, &members[i]) == 0);
  }
  if (n > 0)
    (void)run_member(&members[0]);
  for (int64_t i = 1; i < n; i++)
    FUZZ_CHECK(pthread_join(threads[i], NULL) == 0);
}

/* An mha_parallel_for. */
static void run_team(void *user, int64_t n, mha_task *task, void *argument) {
  const fuzz_team *team = user;
  FUZZ_CHECK(n >= 0 && n <= team->n_threads && n <= FUZZ_MOST_THREADS);
  knock(team->context);
  if (team->kind == FUZZ_THREADS)
    run_on_threads(n, task, argument);
  for (int64_t i = 0; team->kind != FUZZ_THREADS && i < n; i++)
    task(argument, team->kind == FUZZ_IN_ORDER    ? i
                   : team->kind == FUZZ_BACKWARDS ? n - 1 - i
                                                  : (i + n / 2 + 1) % n);
  knock(team->context);
}

/* ---- making one ---- */

typedef struct context_trial {
  fuzz_trial trial; /* first */
  const mha_context_options *options;
  mha_context *made[2];
  bool no_handle;
} context_trial;

static mha_status make_context(fuzz_trial *trial, mha_context *context, bool again,
                               mha_error *error) {
  context_trial *t = (context_trial *)trial;
  mha_context **made = &t->made[again];
  (void)context;
  *made = (mha_context *)trial; /* to be overwritten */
  const mha_status status = mha_context_create(t->options, t->no_handle ? NULL : made, error);
  FUZZ_CHECK(t->no_handle || (status == MHA_OK) == (*made != NULL));
  if (status || t->no_handle)
    *made = NULL;
  return status;
}

static void choose_options(context_trial *t, mha_context_options *o, mha_allocator *allocator) {
  fuzz_session *s = t->trial.session;
  fuzz_reader *r = t->trial.reader;
  o->n_threads = (int32_t)fuzz_read(r, 0, FUZZ_MOST_THREADS);
  s->team.n_threads = o->n_threads;
  s->team.kind = (fuzz_team_kind)fuzz_read(r, 0, FUZZ_N_TEAMS - 1);
  s->team.context = NULL;
  if (!fuzz_read_one_in(r, 8) && o->n_threads > 0) {
    o->parallel_for = run_team;
    o->parallel_user = &s->team;
  }
  if (fuzz_read_one_in(r, 8))
    o->flags = MHA_LEAVE_BLAS_ALONE;
  *allocator = s->memory.mha;
  o->allocator = allocator;
}

static void spoil_options(context_trial *t, mha_context_options *o) {
  fuzz_reader *r = t->trial.reader;
  const int64_t kind = fuzz_read(r, 0, 3);
  fuzz_trial_refuse(&t->trial, true);
  if (kind == 0)
    o->flags |= UINT32_C(2) << fuzz_read(r, 0, 30);
  else if (kind == 1)
    o->n_threads = fuzz_read_no_enumerator(r, 0, 1024);
  else if (kind == 2)
    t->no_handle = true;
  else
    t->options = fuzz_trial_struct(&t->trial, o, sizeof *o, true);
}

static mha_context *default_context(fuzz_allocator *memory, int32_t n_threads) {
  mha_context_options options;
  mha_context *context = NULL;
  MHA_INIT(&options);
  options.n_threads = n_threads;
  options.allocator = &memory->mha;
  FUZZ_CHECK(mha_context_create(&options, &context, NULL) == MHA_OK);
  return context;
}

void fuzz_make_context(fuzz_session *session) {
  context_trial t = {.options = NULL};
  mha_context_options o;
  mha_allocator allocator;
  fuzz_end_context(session);
  fuzz_trial_begin(&t.trial, session);
  t.trial.make = make_context;
  MHA_INIT(&o);
  choose_options(&t, &o, &allocator);
  if (t.trial.hostile)
    spoil_options(&t, &o);
  if (!t.options)
    t.options = fuzz_trial_struct(&t.trial, &o, sizeof o, false);
  session->plain = default_context(&session->plain_memory, 1);
  (void)fuzz_trial_run(&t.trial);
  session->context = t.made[0] ? t.made[0] : default_context(&session->memory, 1);
  session->team.context = session->context;
  mha_context_destroy(t.made[1]);
}

void fuzz_end_context(fuzz_session *session) {
  mha_context_destroy(session->context);
  mha_context_destroy(session->plain);
  session->context = session->plain = NULL;
  session->traced = false;
}

/* ---- scratch ---- */

typedef struct scratch_trial {
  fuzz_trial trial; /* first */
  const mha_weights *weights;
  const mha_shape *shape;
  size_t bytes[2];
  bool reserve, no_context, no_bytes, no_shape;
} scratch_trial;

static mha_status ask_for_scratch(fuzz_trial *trial, mha_context *context, bool again,
                                  mha_error *error) {
  scratch_trial *t = (scratch_trial *)trial;
  size_t *bytes = &t->bytes[again];
  if (t->no_context)
    context = NULL;
  if (t->reserve)
    return mha_context_reserve(context, t->weights, t->shape, error);
  *bytes = 7;
  const mha_status status =
      mha_workspace_bytes(context, t->weights, t->shape, t->no_bytes ? NULL : bytes, error);
  FUZZ_CHECK(status == MHA_OK || *bytes == 7);
  return status;
}

static void spoil_shape(scratch_trial *t, mha_shape *shape) {
  fuzz_reader *r = t->trial.reader;
  int64_t *sizes[] = {&shape->batch, &shape->query_length, &shape->key_length, &shape->n_heads,
                      &shape->value_head_size};
  const int64_t kind = fuzz_read(r, 0, 8);
  fuzz_trial_refuse(&t->trial, true);
  if (kind < 5) {
    *sizes[kind] = fuzz_read_one_in(r, 4) ? fuzz_read_any(r) : fuzz_read_no_size(r);
    fuzz_trial_refuse(&t->trial, *sizes[kind] < 0 && (kind < 3 || !t->weights));
  } else if (kind == 5) {
    t->no_context = true;
  } else if (kind == 6 && !t->reserve) {
    t->no_bytes = true;
  } else if (kind == 7) {
    t->shape = fuzz_trial_struct(&t->trial, shape, sizeof *shape, true);
  } else {
    t->no_shape = true;
  }
}

/* Small shapes, so that memory for them is there. */
void fuzz_try_scratch(fuzz_session *session) {
  scratch_trial t = {.weights = session->layers[0].weights};
  mha_shape shape;
  fuzz_trial_begin(&t.trial, session);
  fuzz_reader *r = t.trial.reader;
  t.trial.make = ask_for_scratch;
  t.reserve = fuzz_read_one_in(r, 2);
  if (fuzz_read_one_in(r, 2))
    t.weights = NULL;
  MHA_INIT(&shape);
  shape.packed = (int32_t)fuzz_read(r, 0, 1);
  shape.cached = (int32_t)fuzz_read(r, 0, 1);
  shape.batch = fuzz_read(r, 0, 3);
  shape.query_length = fuzz_read(r, 0, 20);
  shape.key_length = fuzz_read(r, 0, 40);
  shape.n_heads = fuzz_read(r, 1, 6);
  shape.value_head_size = fuzz_read(r, 1, 8);
  if (t.trial.hostile)
    spoil_shape(&t, &shape);
  if (!t.shape && !t.no_shape)
    t.shape = fuzz_trial_struct(&t.trial, &shape, sizeof shape, false);
  (void)fuzz_trial_run(&t.trial);
}

void fuzz_enlarge_shape(fuzz_trial *trial, mha_shape *shape) {
  if (shape->key_length == 0)
    shape->key_length = 1; /* 0 would be the query's */
  shape->batch += fuzz_read(trial->reader, 0, 2);
  shape->query_length += fuzz_read(trial->reader, 0, 9);
  shape->key_length += shape->cached ? 0 : fuzz_read(trial->reader, 0, 9);
}

/* ---- trace ---- */

/* From within a call that may be changing it. */
static void look_at_cache(const mha_cache *cache) {
  mha_error error;
  int64_t length = -1;
  if (!cache)
    return;
  const mha_status status = mha_cache_length(cache, 0, &length, &error);
  fuzz_judge_error(status, &error);
  FUZZ_CHECK(status == MHA_OK ? length >= 0 : status == MHA_ERROR_BUSY && length == -1);
}

/* An mha_trace_function: every number that is shown can be read. */
static void look(void *user, const mha_trace_step *step) {
  const fuzz_session *s = user;
  volatile float sum = 0.0f;
  FUZZ_CHECK(step->name && (step->rank == 3 || step->rank == 4));
  const int64_t last = step->rank == 4 ? step->shape[3] : 1;
  for (int64_t a = 0; a < step->shape[0]; a++)
    for (int64_t b = 0; b < step->shape[1]; b++)
      for (int64_t c = 0; c < step->shape[2]; c++)
        for (int64_t d = 0; d < last; d++)
          sum = sum + step->data[a * step->strides[0] + b * step->strides[1] +
                                 c * step->strides[2] + d * (last > 1 ? step->strides[3] : 0)];
  knock(s->context);
  for (int i = 0; i < FUZZ_N_CACHES; i++)
    look_at_cache(s->caches[i].cache);
}

void fuzz_try_trace(fuzz_session *session) {
  mha_error error;
  session->traced = fuzz_read_one_in(session->reader, 2);
  mha_status status =
      mha_context_trace(session->context, session->traced ? look : NULL, session, &error);
  fuzz_judge_error(status, &error);
  FUZZ_CHECK(status == MHA_OK);
  status = mha_context_trace(NULL, look, session, &error);
  fuzz_judge_error(status, &error);
  FUZZ_CHECK(status == MHA_ERROR_NULL);
}
