/* Fuzz target: the reader of safetensors, and all that is done with what it accepts. */
#include "fuzz.h"
#include "header.h"
#include "weights_file.h"

#include "files/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool fuzz_accepted;

/* Returns whether the file was accepted. */
static bool use(const uint8_t *data, size_t size) {
  mha_safetensors parsed;
  mha_error error;
  memset(&error, 0x55, sizeof error);
  const mha_status status = mha_safetensors_parse("fuzz", data, size, NULL, &parsed, &error);
  FUZZ_CHECK(error.status == status);
  FUZZ_CHECK(memchr(error.message, '\0', sizeof error.message));
  FUZZ_CHECK((error.message[0] == '\0') == (status == MHA_OK));
  FUZZ_CHECK(status == MHA_OK || status == MHA_ERROR_FORMAT || status == MHA_ERROR_UNSUPPORTED);
  FUZZ_CHECK(status == MHA_OK || (parsed.n == 0 && !parsed.items));
  for (int64_t i = 0; i < parsed.n; i++) {
    FUZZ_CHECK(i == 0 || strcmp(parsed.items[i - 1].name, parsed.items[i].name) < 0);
    fuzz_use_tensor(&parsed.items[i], data, size);
  }
  if (status == MHA_OK) {
    const mha_raw_tensors tensors = {.n = parsed.n, .items = parsed.items};
    fuzz_use_names(&tensors);
    fuzz_use_file(data, size, parsed.n);
  }
  mha_safetensors_release(&parsed);
  return status == MHA_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz_accepted = use(data, size);
  uint8_t *copy = fuzz_end_header(data, size);
  if (copy)
    (void)use(copy, size);
  free(copy);
  return 0;
}
