/* Fuzz target: the public functions. The bytes are a list of calls with arguments, good ones and
 * ones with a single thing wrong; api/ makes and judges them. */
#include "api/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool fuzz_accepted;

/* Longer inputs make no other calls, only more of them. */
enum { MOST_CALLS = 32 };

typedef void try_function(fuzz_session *session);

static try_function *const functions[] = {
    fuzz_try_forward,      fuzz_try_attend,         fuzz_make_cache,      fuzz_try_cache_append,
    fuzz_try_cache_entry,  fuzz_try_self_attention, fuzz_make_layer,      fuzz_try_forward,
    fuzz_try_scratch,      fuzz_try_trace,          fuzz_try_layer,       fuzz_try_forward,
    fuzz_make_context,     fuzz_try_attend,         fuzz_try_files,       fuzz_try_small_functions,
    fuzz_try_cache_append, fuzz_try_cache_entry,    fuzz_try_cache_entry, fuzz_try_forward,
    fuzz_try_merge};

enum { N_FUNCTIONS = sizeof functions / sizeof *functions };

static void begin(fuzz_session *session, fuzz_reader *reader) {
  memset(session, 0, sizeof *session);
  session->reader = reader;
  fuzz_allocator_init(&session->memory);
  fuzz_allocator_init(&session->plain_memory);
  fuzz_allocator_init(&session->home);
  fuzz_make_context(session);
  fuzz_make_layer(session);
  if (fuzz_read_one_in(reader, 2))
    fuzz_make_cache(session);
}

static void end(fuzz_session *session) {
  for (int i = 0; i < FUZZ_N_CACHES; i++)
    fuzz_end_cache(&session->caches[i]);
  for (int i = 0; i < FUZZ_N_LAYERS; i++)
    fuzz_end_layer(&session->layers[i]);
  fuzz_end_context(session);
  fuzz_allocator_check(&session->memory);
  fuzz_allocator_check(&session->plain_memory);
  fuzz_allocator_check(&session->home);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static fuzz_session session; /* large */
  fuzz_reader reader = {data, size, 0, 0};
  begin(&session, &reader);
  for (int n = 0; n < MOST_CALLS && !fuzz_read_is_over(&reader); n++)
    functions[fuzz_read(&reader, 0, N_FUNCTIONS - 1)](&session);
  end(&session);
  fuzz_accepted = true;
  return 0;
}
