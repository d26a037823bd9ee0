/* Owns the signs by which files of other kinds are known. */
#include "kind.h"

#include "text.h"

#include <string.h>

#define PYTORCH "a PyTorch file (.pt, .pth, .bin)"

/* The bytes at a place that say all. What begins as another row does stands in front of it. */
static const struct {
  size_t at, n;
  const char *bytes;
  const char *kind;
} signs[] = {
    {0, 6, "\x93NUMPY", "a NumPy array (.npy)"},
    {0, 4, "GGUF", "a GGUF file"},
    {0, 4, "lmgg", "a GGML model"},
    {0, 4, "tjgg", "a GGML model"},
    {0, 8, "\x89HDF\r\n\x1a\n", "an HDF5 file, such as Keras writes (.h5)"},
    {0, 14, "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", PYTORCH},
    {4, 4, "TFL3", "a TensorFlow Lite model"},
    {0, 2, "\x1f\x8b", "compressed by gzip"},
    {0, 3, "BZh", "compressed by bzip2"},
    {0, 6,
     "\xfd"
     "7zXZ\0",
     "compressed by xz"},
    {0, 4, "\x28\xb5\x2f\xfd", "compressed by zstd"},
    {0, 6, "7z\xbc\xaf\x27\x1c", "a 7z archive"},
    {257, 5, "ustar", "a tar archive"},
    {0, 4,
     "\x7f"
     "ELF",
     "a program or library (ELF)"},
    {0, 43, "version https://git-lfs.github.com/spec/v1\n",
     "a git-lfs pointer, which stands for the file until git lfs pull fetches it"},
};

static bool has(const unsigned char *bytes, size_t n, size_t at, const char *sign, size_t n_sign) {
  return at + n_sign <= n && memcmp(bytes + at, sign, n_sign) == 0;
}

/* ---- Archives and streams -------------------------------------------------------------------- */

/* Whether the name, of n bytes, ends so. */
static bool ends(const char *name, size_t n, const char *ending) {
  const size_t n_ending = strlen(ending);
  return n >= n_ending && memcmp(name + n - n_ending, ending, n_ending) == 0;
}

/* The first entry tells: its header of 30 bytes has the length of its name at byte 26, then the
 * name. */
static const char *zip_kind(const unsigned char *bytes, size_t n) {
  enum { NAME_BYTES_AT = 26, NAME_AT = 30 };
  const char *name = (const char *)bytes + NAME_AT;
  if (has(bytes, n, 0, "PK\x05\x06", 4)) /* no entry */
    return "a zip archive";
  if (!has(bytes, n, 0, "PK\x03\x04", 4))
    return NULL;
  const size_t n_name =
      n < NAME_AT ? 0 : (size_t)bytes[NAME_BYTES_AT] | (size_t)bytes[NAME_BYTES_AT + 1] << 8;
  if (n_name == 0 || n_name > n - NAME_AT)
    return "a zip archive";
  if (ends(name, n_name, ".npy"))
    return "a NumPy archive (.npz)";
  if (ends(name, n_name, "/data.pkl") || ends(name, n_name, "/constants.pkl"))
    return PYTORCH;
  return ends(name, n_name, "metadata.json") ? "a Keras model (.keras)" : "a zip archive";
}

/* Protocols 2 to 5 begin with their number. */
static const char *pickle_kind(const unsigned char *bytes, size_t n) {
  return n >= 2 && bytes[0] == 0x80 && bytes[1] >= 2 && bytes[1] <= 5 ? "a Python pickle" : NULL;
}

/* A version as field 1, then field 2, 3, 4, 6, 7 or 8 (bytes) or 5 (a number): so begin ONNX's
 * ModelProto and TensorFlow's SavedModel. */
static const char *protobuf_kind(const unsigned char *bytes, size_t n) {
  if (n < 3 || bytes[0] != 0x08 || bytes[1] == 0 || bytes[1] > 32)
    return NULL;
  const unsigned field = bytes[2] >> 3U;
  const unsigned wire = bytes[2] & 7U;
  return field >= 2 && field <= 8 && wire == (field == 5 ? 0U : 2U)
             ? "a protocol buffer, such as an ONNX model"
             : NULL;
}

/* ---- Text ------------------------------------------------------------------------------------ */

/* Whether `word` stands somewhere in the bytes. */
static bool holds(const unsigned char *bytes, size_t n, const char *word) {
  const size_t n_word = strlen(word);
  for (size_t at = 0; at + n_word <= n; at++)
    if (memcmp(bytes + at, word, n_word) == 0)
      return true;
  return false;
}

/* Whether the bytes begin with `word`, in lower case, be they in upper case. */
static bool begins(const unsigned char *bytes, size_t n, const char *word) {
  const size_t n_word = strlen(word);
  for (size_t i = 0; i < n_word && i < n; i++)
    if ((bytes[i] >= 'A' && bytes[i] <= 'Z' ? bytes[i] + 32 : bytes[i]) != word[i])
      return false;
  return n >= n_word;
}

static const char *text_kind(const unsigned char *bytes, size_t n) {
  size_t at = 0;
  if (!mha_text_is_plain(bytes, n))
    return NULL;
  while (at < n && (bytes[at] == ' ' || (bytes[at] >= '\t' && bytes[at] <= '\r')))
    at++;
  if (begins(bytes + at, n - at, "<!doctype html") || begins(bytes + at, n - at, "<html"))
    return "a web page (HTML)";
  if (at == n || (bytes[at] != '{' && bytes[at] != '['))
    return "text";
  return holds(bytes, n, "\"weight_map\"") ? "the index of a model in several safetensors files"
                                           : "text in JSON";
}

/* ---- All ------------------------------------------------------------------------------------- */

/* The header's length is below 2^32, and the header begins with '{'. */
bool mha_kind_may_be_safetensors(const void *bytes, size_t n) {
  return has(bytes, n, 4, "\0\0\0\0{", 5);
}

/* As a safetensors file it would have a header of 1.1 GB, which none has. */
bool mha_kind_is_gguf(const void *bytes, size_t n) {
  return has(bytes, n, 0, "GGUF", 4);
}

const char *mha_kind_of(const void *bytes, size_t n) {
  const char *kind = NULL;
  if (n == 0)
    return NULL;
  if (mha_kind_may_be_safetensors(bytes, n) && !mha_kind_is_gguf(bytes, n))
    return "a safetensors file";
  for (size_t i = 0; i < sizeof signs / sizeof signs[0]; i++)
    if (has(bytes, n, signs[i].at, signs[i].bytes, signs[i].n))
      return signs[i].kind;
  kind = zip_kind(bytes, n);
  if (!kind)
    kind = pickle_kind(bytes, n);
  if (!kind)
    kind = protobuf_kind(bytes, n);
  return kind ? kind : text_kind(bytes, n < MHA_KIND_BYTES ? n : MHA_KIND_BYTES);
}
