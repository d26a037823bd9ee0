/* Owns the judgement of one call: what holds of every error, of outputs after a failure and after a
 * success, and of the same call in another context. */
#include "session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- errors ---- */

/* Bytes of the UTF-8 character at `text`, 0 if it is none. */
static size_t character_bytes(const unsigned char *text) {
  size_t n = 1;
  if (text[0] >= 0xF0U)
    n = 4;
  else if (text[0] >= 0xE0U)
    n = 3;
  else if (text[0] >= 0xC0U)
    n = 2;
  else if (text[0] >= 0x80U)
    return 0;
  for (size_t k = 1; k < n; k++)
    if ((text[k] & 0xC0U) != 0x80U)
      return 0;
  return text[0] < 0xF8U ? n : 0;
}

static bool is_utf8(const char *text) {
  const unsigned char *at = (const unsigned char *)text;
  size_t n = 1;
  while (*at != '\0' && n > 0) {
    n = character_bytes(at);
    at += n;
  }
  return n > 0;
}

void fuzz_judge_error(mha_status status, const mha_error *error) {
  FUZZ_CHECK(status >= MHA_OK && status <= MHA_ERROR_FORMAT);
  if (!error)
    return;
  FUZZ_CHECK(error->status == status);
  FUZZ_CHECK(memchr(error->message, '\0', sizeof error->message));
  FUZZ_CHECK((error->message[0] == '\0') == (status == MHA_OK));
  FUZZ_CHECK(is_utf8(error->message));
  /* where the system refuses a file, its reason stands in the rule's place */
  FUZZ_CHECK(status == MHA_OK || status == MHA_ERROR_IO || strstr(error->message, "; rule: "));
}

static void judge_expectation(const fuzz_trial *t, mha_status status, const mha_error *error) {
  const bool right = t->expect == FUZZ_SUCCESS   ? status == MHA_OK
                     : t->expect == FUZZ_FAILURE ? status != MHA_OK
                                                 : true;
  if (!right)
    fprintf(stderr, "%s was expected, but the call came to %s: %s\n",
            t->expect == FUZZ_SUCCESS ? "success" : "failure", mha_status_name(status),
            t->without_error ? "(no error given)" : error->message);
  FUZZ_CHECK(right);
}

/* ---- a trial ---- */

void fuzz_trial_begin(fuzz_trial *trial, fuzz_session *session) {
  fuzz_reader *reader = session->reader;
  const fuzz_trial begin = {.session = session, .reader = reader, .expect = FUZZ_SUCCESS};
  *trial = begin;
  trial->hostile = fuzz_read_one_in(reader, 3);
  trial->without_error = fuzz_read_one_in(reader, 16);
  trial->left = fuzz_read_left(reader);
  trial->pool.shift = fuzz_read_one_in(reader, 4) ? (size_t)fuzz_read(reader, 1, 15) : 0;
  fuzz_caches_remember(session);
}

void fuzz_trial_spoil(fuzz_trial *trial, fuzz_expect expect) {
  trial->hostile = false;
  if (expect != FUZZ_SUCCESS)
    trial->expect = expect;
}

void fuzz_trial_refuse(fuzz_trial *trial, bool certain) {
  fuzz_trial_spoil(trial, certain ? FUZZ_FAILURE : FUZZ_ANYTHING);
}

uint32_t fuzz_choose_flags(fuzz_trial *trial, bool empty) {
  const bool meant = fuzz_read_one_in(trial->reader, 4) != empty;
  if (empty && !meant)
    trial->expect = FUZZ_FAILURE;
  return meant ? MHA_ALLOW_EMPTY : 0;
}

void *fuzz_trial_struct(fuzz_trial *trial, const void *given, size_t bytes, bool hostile) {
  static const size_t garbage[] = {SIZE_MAX,        SIZE_MAX / 2, MHA_MAX_STRUCT_BYTES + 1,
                                   (size_t)1 << 32, SIZE_MAX - 7, (size_t)0xA5A5A5A5A5A5A5A5};
  fuzz_reader *r = trial->reader;
  size_t size = bytes;
  size_t lent = bytes;
  const int64_t kind = hostile ? fuzz_read(r, 0, 2) : 3;
  if (kind == 0)
    size = (size_t)fuzz_read(r, 0, (int64_t)bytes - 1);
  else if (kind == 1)
    size = garbage[fuzz_read(r, 0, sizeof garbage / sizeof *garbage - 1)];
  else if (kind == 2 || fuzz_read_one_in(r, 16))
    lent = size = bytes + (size_t)fuzz_read(r, 1, 24);
  if (kind == 0)
    lent = size < sizeof size ? sizeof size : size;
  const size_t shift = trial->pool.shift;
  trial->pool.shift = shift / sizeof size * sizeof size;
  unsigned char *copy = fuzz_pool_take(&trial->pool, (int64_t)lent, 1);
  trial->pool.shift = shift;
  memset(copy, 0, lent);
  memcpy(copy, given, lent < bytes ? lent : bytes);
  memcpy(copy, &size, sizeof size);
  if (kind == 2)
    copy[fuzz_read(r, (int64_t)bytes, (int64_t)size - 1)] = 1;
  return copy;
}

static mha_status attempt(fuzz_trial *t, mha_context *context, bool again, mha_error *error) {
  mha_error *given = t->without_error ? NULL : error;
  memset(error, 0x55, sizeof *error);
  fuzz_pool_close(&t->pool);
  const mha_status status = t->make(t, context, again, given);
  fuzz_pool_open(&t->pool);
  fuzz_judge_error(status, given);
  return status;
}

static void check_untouched(fuzz_trial *t) {
  fuzz_pool_check_untouched(&t->pool);
  fuzz_caches_check_untouched(t->session);
}

static void arm(fuzz_session *s, int64_t fail_in) {
  s->memory.fail_in = fail_in;
  s->home.fail_in = fail_in;
}

/* With an allocator that may fail, and once more if it did. */
static mha_status first_run(fuzz_trial *t, mha_error *error) {
  fuzz_session *s = t->session;
  const int64_t calls = s->memory.calls;
  if (fuzz_read_one_in(t->reader, 8))
    arm(s, fuzz_read(t->reader, 1, 4));
  mha_status status = attempt(t, s->context, false, error);
  arm(s, 0);
  if (status == MHA_ERROR_MEMORY) {
    check_untouched(t);
    status = attempt(t, s->context, false, error);
  }
  FUZZ_CHECK(!t->no_allocation || status || s->memory.calls == calls);
  return status;
}

/* In the plain context the same bits come out, or the same sentence. */
static void second_run(fuzz_trial *t, mha_status status, const mha_error *error) {
  mha_error other;
  fuzz_pool_rewind(&t->pool);
  const mha_status again = attempt(t, t->session->plain, true, &other);
  if (status == MHA_ERROR_MEMORY || again == MHA_ERROR_MEMORY)
    return; /* more threads need more scratch */
  FUZZ_CHECK(again == status);
  if (status) {
    FUZZ_CHECK(t->without_error || strcmp(error->message, other.message) == 0);
    check_untouched(t);
    return;
  }
  fuzz_pool_check_written(&t->pool, FUZZ_SECOND_RUN);
  fuzz_pool_check_same(&t->pool);
  fuzz_caches_check_changed(t->session);
}

mha_status fuzz_trial_run(fuzz_trial *trial) {
  mha_error error;
  fuzz_pool_remember(&trial->pool);
  const mha_status status = first_run(trial, &error);
  judge_expectation(trial, status, &error);
  if (status)
    check_untouched(trial);
  else
    fuzz_pool_check_written(&trial->pool, FUZZ_FIRST_RUN);
  second_run(trial, status, &error);
  fuzz_pool_free(&trial->pool);
  return status;
}
