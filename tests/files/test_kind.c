/* Kinds of files by their first bytes: each is told, from those bytes alone. */
#include "support.h"

#include "files/kind.h"

#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* A zip archive's first entry: its header of 30 bytes, the length of the name at byte 26. */
#define ENTRY(length) "PK\3\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" length "\0\0\0"

static const struct {
  const char *kind;
  size_t n;
  const char *bytes;
} rows[] = {
    {"a GGUF file", 12, "GGUF\3\0\0\0\254\0\0\0"},
    {"a GGML model", 8, "lmgg\1\0\0\0"},
    {"a GGML model", 8, "tjgg\1\0\0\0"},
    {"an HDF5 file, such as Keras writes (.h5)", 8, "\x89HDF\r\n\x1a\n"},
    {"a NumPy array (.npy)", 10, "\x93NUMPY\1\0v\0"},
    {"a PyTorch file (.pt, .pth, .bin)", 46, ENTRY("\x10") "archive/data.pkl"},
    {"a PyTorch file (.pt, .pth, .bin)", 43, ENTRY("\xa") "0/data.pkl..."},
    {"a PyTorch file (.pt, .pth, .bin)", 49, ENTRY("\x13") "model/constants.pkl"},
    {"a PyTorch file (.pt, .pth, .bin)", 16,
     "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80"},
    {"a NumPy archive (.npz)", 37, ENTRY("\x07") "W_Q.npy"},
    {"a Keras model (.keras)", 43, ENTRY("\xd") "metadata.json"},
    {"a zip archive", 34, ENTRY("\x04") "a.py"},
    {"a zip archive", 34, ENTRY("\x07") "a.np"}, /* cut */
    {"a zip archive", 4, "PK\3\4"},
    {"a zip archive", 22, "PK\5\6\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"},
    {"a Python pickle", 4, "\x80\x04\x95\x10"},
    {"a Python pickle", 3, "\x80\x02}"},
    {"a protocol buffer, such as an ONNX model", 12, "\x08\x08\x12\x07pytorch\x1a"},
    {"a protocol buffer, such as an ONNX model", 5, "\x08\x07:\xe4\x02"},
    {"a protocol buffer, such as an ONNX model", 4, "\x08\x01\x12\x80"},
    {"a TensorFlow Lite model", 8, "\x1c\0\0\0TFL3"},
    {"compressed by gzip", 4, "\x1f\x8b\x08\0"},
    {"compressed by bzip2", 4, "BZh9"},
    {"compressed by xz", 6, "\xfd\x37zXZ\0"},
    {"compressed by zstd", 4, "\x28\xb5\x2f\xfd"},
    {"a 7z archive", 6, "7z\xbc\xaf\x27\x1c"},
    {"a program or library (ELF)", 5, "\x7f\x45LF\2"},
    {"a git-lfs pointer, which stands for the file until git lfs pull fetches it", 54,
     "version https://git-lfs.github.com/spec/v1\noid sha256:"},
    {"a web page (HTML)", 16, "\n<!DOCTYPE html>"},
    {"a web page (HTML)", 6, "<HTML>"},
    {"text in JSON", 9, "{\"meta\":{"},
    {"text in JSON", 6, " \n[1]\n"},
    {"the index of a model in several safetensors files", 31,
     "{\"metadata\":{},\"weight_map\":{}}"},
    {"text", 10, "1.0 2.0 3\n"},
    {"text", 5, "caf\xc3\xa9"},
    {"text", 4, "caf\xc3"}, /* cut within a character */
    {"text", 1, "\n"},
    {"a safetensors file", 10, "\2\0\0\0\0\0\0\0{}"},
    {"a safetensors file", 9, "\x80\xf0\xfa\2\0\0\0\0{"},
    {NULL, 0, ""},
    {NULL, 8, "\2\0\0\0\0\0\0\0"},
    {NULL, 10, "\2\0\0\0\0\0\0\0[]"},
    {NULL, 10, "\2\0\0\0\1\0\0\0{}"},
    {NULL, 4, "\xcd\xcc\xcc\x3d"},
    {NULL, 4, "\xc3(ab"},
    {NULL, 3, "a\1b"},
    {NULL, 4, "PK\3\5"},
    {NULL, 2, "\x80\x06"},
    {NULL, 3, "\x08\x07\xff"},
};

/* From memory that ends where the bytes do, so that a look beyond them would be seen. */
static const char *kind_of(const char *bytes, size_t n) {
  test_pool pool = {0};
  unsigned char *copy = test_pool_bytes(&pool, n);
  if (n > 0)
    memcpy(copy, bytes, n);
  const char *kind = mha_kind_of(copy, n);
  assert_int_equal(mha_kind_may_be_safetensors(copy, n),
                   kind && strcmp(kind, "a safetensors file") == 0);
  test_pool_free(&pool);
  return kind;
}

static void kinds_are_told(void **state) {
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    const char *kind = kind_of(rows[i].bytes, rows[i].n);
    test_note("row %zu", i);
    if ((kind == NULL) != (rows[i].kind == NULL) || (kind && strcmp(kind, rows[i].kind) != 0))
      test_failed("\"%s\" instead of \"%s\"", kind ? kind : "nothing",
                  rows[i].kind ? rows[i].kind : "nothing");
  }
}

/* A tar archive has its sign behind the first entry's name and numbers. */
static void an_archive_has_its_sign_far_behind(void **state) {
  char bytes[512] = "layer/W_Q.npy";
  (void)state;
  memcpy(bytes + 257, "ustar", 5);
  assert_string_equal(kind_of(bytes, sizeof bytes), "a tar archive");
  assert_string_equal(kind_of(bytes, 262), "a tar archive");
  assert_null(kind_of(bytes, 261));
}

/* Any beginning of any kind, and each of its bytes changed: an answer, and no look beyond. */
static void every_beginning_has_an_answer(void **state) {
  int n_known = 0;
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    for (size_t n = 0; n <= rows[i].n; n++) {
      char bytes[64];
      assert_true(n <= sizeof bytes);
      memcpy(bytes, rows[i].bytes, n);
      n_known += kind_of(bytes, n) != NULL;
      if (n > 0)
        bytes[n - 1] = (char)~bytes[n - 1];
      n_known += kind_of(bytes, n) != NULL;
    }
  assert_true(n_known > (int)COUNT(rows));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(kinds_are_told),
      cmocka_unit_test(an_archive_has_its_sign_far_behind),
      cmocka_unit_test(every_beginning_has_an_answer),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
