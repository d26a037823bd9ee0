/* Fuzz target: the header parser of .npy, and the conversion of what it accepts. */
#include "fuzz.h"

#include "files/npy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool fuzz_accepted;

/* Converts in one piece and in two, into memory of exactly the size that the header promises. */
static void convert(const mha_npy_header *header, const uint8_t *numbers, mha_npy_kind kind) {
  static const size_t sizes[] = {
      [MHA_NPY_FLOATS] = sizeof(float), [MHA_NPY_BYTES] = 1, [MHA_NPY_INTEGERS] = sizeof(int64_t)};
  const size_t bytes = (size_t)header->n_elements * sizes[kind];
  const int64_t half = header->n_elements / 2;
  const size_t half_bytes = (size_t)half * mha_npy_item_bytes(header);
  void *whole = malloc(bytes + (bytes == 0));
  void *halves = malloc(bytes + (bytes == 0));
  FUZZ_CHECK(whole && halves);
  memset(whole, 0x55, bytes);
  memset(halves, 0xAA, bytes);
  mha_npy_convert(header, 0, header->n_elements, numbers, kind, whole);
  mha_npy_convert(header, half, header->n_elements - half, numbers + half_bytes, kind, halves);
  mha_npy_convert(header, 0, half, numbers, kind, halves);
  FUZZ_CHECK(memcmp(whole, halves, bytes) == 0);
  free(whole);
  free(halves);
}

static void use(const mha_npy_header *header, const uint8_t *data, size_t size) {
  const mha_npy_kind kinds[] = {MHA_NPY_FLOATS, MHA_NPY_BYTES, MHA_NPY_INTEGERS};
  FUZZ_CHECK(header->rank >= 0 && header->rank <= MHA_NPY_MAX_RANK);
  FUZZ_CHECK(header->data_offset >= 0 && (size_t)header->data_offset <= size);
  FUZZ_CHECK((size_t)header->n_elements * mha_npy_item_bytes(header) ==
             size - (size_t)header->data_offset);
  int n_kinds = 0;
  for (int i = 0; i < 3; i++) {
    if (mha_npy_check_kind("fuzz.npy", header, kinds[i], NULL))
      continue;
    convert(header, data + header->data_offset, kinds[i]);
    n_kinds++;
  }
  FUZZ_CHECK(n_kinds > 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  mha_npy_header header;
  mha_error error;
  memset(&error, 0x55, sizeof error);
  const mha_status status = mha_npy_parse("fuzz.npy", data, size, (int64_t)size, &header, &error);
  fuzz_accepted = status == MHA_OK;
  FUZZ_CHECK(error.status == status);
  FUZZ_CHECK(memchr(error.message, '\0', sizeof error.message));
  FUZZ_CHECK((error.message[0] == '\0') == fuzz_accepted);
  FUZZ_CHECK(fuzz_accepted || status == MHA_ERROR_FORMAT || status == MHA_ERROR_UNSUPPORTED);
  if (fuzz_accepted)
    use(&header, data, size);
  return 0;
}
