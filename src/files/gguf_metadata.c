/* Owns the reading of GGUF's metadata: which values say what of the model, and the way past all
 * others. */
#include "gguf_metadata.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { DEFAULT_ALIGNMENT = 32, LARGEST_ALIGNMENT = 1 << 24, DEEPEST_ARRAY = 4 };

/* The types of values, by their number in the file. */
enum { UINT32 = 4, FLOAT32 = 6, STRING = 8, ARRAY = 9, FLOAT64 = 12 };

static const struct {
  size_t bytes; /* 0 = it varies */
  bool whole, is_signed;
} types[] = {
    {1, true, false}, {1, true, true},   {2, true, false},  {2, true, true},   {4, true, false},
    {4, true, true},  {4, false, false}, {1, false, false}, {0, false, false}, {0, false, false},
    {8, true, false}, {8, true, true},   {8, false, false},
};

/* Of a string the 8 bytes of its length, of an array its type and its count, are there always. */
static size_t least_bytes(uint32_t type) {
  return types[type].bytes > 0 ? types[type].bytes : type == STRING ? 8 : 12;
}

static mha_status take_type(mha_gguf_bytes *b, uint32_t *type) {
  const mha_status status = mha_gguf_take_u32(b, "a value's type", type);
  if (!status && *type >= sizeof types / sizeof types[0])
    return mha_gguf_refuse(b, b->at - 4, "0 to 12", "has a value of type %" PRIu32, *type);
  return status;
}

/* Takes the type and the count of an array's elements, of which the file may have so many. */
static mha_status take_array(mha_gguf_bytes *b, uint32_t *type, uint64_t *n) {
  mha_status status = take_type(b, type);
  if (!status)
    status = mha_gguf_take_u64(b, "an array's count", n);
  if (!status && *n > mha_gguf_left(b) / least_bytes(*type))
    return mha_gguf_refuse(b, b->at - 8, "the file holds all that it promises",
                           "has an array of %" PRIu64 " elements, but %zu bytes follow", *n,
                           mha_gguf_left(b));
  return status;
}

/* ---- Values that nobody asks for ------------------------------------------------------------- */

static mha_status skip_value(mha_gguf_bytes *b, uint32_t type, int depth);

static mha_status skip_array(mha_gguf_bytes *b, int depth) {
  const unsigned char *ignored = NULL;
  uint32_t type = 0;
  uint64_t n = 0;
  if (depth == DEEPEST_ARRAY)
    return mha_gguf_refuse(b, b->at, "arrays nest four deep", "has an array %d deep", depth + 1);
  mha_status status = take_array(b, &type, &n);
  if (!status && types[type].bytes > 0)
    return mha_gguf_take(b, n * types[type].bytes, "an array", &ignored);
  for (uint64_t i = 0; !status && i < n; i++)
    status = skip_value(b, type, depth + 1);
  return status;
}

static mha_status skip_value(mha_gguf_bytes *b, uint32_t type, int depth) {
  const unsigned char *ignored = NULL;
  mha_gguf_text text;
  if (type == STRING)
    return mha_gguf_take_text(b, "a string", &text);
  if (type == ARRAY)
    return skip_array(b, depth);
  return mha_gguf_take(b, types[type].bytes, "a value", &ignored);
}

/* ---- Values that are read -------------------------------------------------------------------- */

static mha_status refuse_type(const mha_gguf_bytes *b, const char *rule, uint32_t type) {
  return mha_gguf_refuse(b, b->at, rule, "has a value of type %" PRIu32, type);
}

static mha_status read_size(mha_gguf_bytes *b, uint32_t type, int64_t *size) {
  const unsigned char *bytes = NULL;
  if (!types[type].whole)
    return refuse_type(b, "a size is a whole number, or an array of them", type);
  const size_t at = b->at;
  const mha_status status = mha_gguf_take(b, types[type].bytes, "a value", &bytes);
  if (status)
    return status;
  const uint64_t number = mha_gguf_number(bytes, types[type].bytes);
  const unsigned sign = (unsigned)(8 * types[type].bytes - 1);
  if (number > INT64_MAX || (types[type].is_signed && number >> sign != 0))
    return mha_gguf_refuse(b, at, "a size is 0 or more and fits 63 bits", "has the size 0x%" PRIx64,
                           number);
  *size = (int64_t)number;
  return MHA_OK;
}

/* A number, or one for each layer: then it says something only if all are the same. */
static mha_status read_sizes(mha_gguf_bytes *b, uint32_t type, int64_t *size) {
  uint64_t n = 0;
  bool same = true;
  if (type != ARRAY)
    return read_size(b, type, size);
  mha_status status = take_array(b, &type, &n);
  for (uint64_t i = 0; !status && i < n; i++) {
    int64_t next = 0;
    status = read_size(b, type, &next);
    same = same && (i == 0 || next == *size);
    *size = next;
  }
  if (!same || n == 0)
    *size = 0;
  return status;
}

static mha_status read_real(mha_gguf_bytes *b, uint32_t type, double largest, double *real) {
  const unsigned char *bytes = NULL;
  if (type != FLOAT32 && type != FLOAT64)
    return refuse_type(b, "it is a float32 or float64", type);
  const size_t at = b->at;
  const mha_status status = mha_gguf_take(b, types[type].bytes, "a value", &bytes);
  if (status)
    return status;
  const uint64_t bits = mha_gguf_number(bytes, types[type].bytes);
  if (type == FLOAT32) {
    const uint32_t half = (uint32_t)bits;
    float single = 0.0F;
    memcpy(&single, &half, sizeof single);
    *real = (double)single;
  } else {
    memcpy(real, &bits, sizeof *real);
  }
  if (!(*real >= 0.0 && *real <= largest))
    return mha_gguf_refuse(b, at, "a finite number, 0 or more", "is %g", *real);
  return MHA_OK;
}

/* ---- What they say of the model -------------------------------------------------------------- */

typedef enum value_kind { SIZE, REAL, EPSILON, SCALING } value_kind;

/* Behind the architecture's name, and where they go. Of the two epsilons the first one in this list
 * counts: the norm of Q and K is an RMS norm. */
static const struct {
  const char *key;
  value_kind kind;
  size_t offset;
} model_keys[] = {
    {".block_count", SIZE, offsetof(mha_model_info, n_layers)},
    {".embedding_length", SIZE, offsetof(mha_model_info, model_width)},
    {".attention.head_count", SIZE, offsetof(mha_model_info, n_heads)},
    {".attention.head_count_kv", SIZE, offsetof(mha_model_info, n_kv_heads)},
    {".attention.key_length", SIZE, offsetof(mha_model_info, head_size)},
    {".attention.value_length", SIZE, offsetof(mha_model_info, value_head_size)},
    {".rope.dimension_count", SIZE, offsetof(mha_model_info, rotary_size)},
    {".rope.freq_base", REAL, offsetof(mha_model_info, rope_base)},
    {".rope.scaling.type", SCALING, 0},
    {".attention.layer_norm_rms_epsilon", EPSILON, offsetof(mha_model_info, norm_epsilon)},
    {".attention.layer_norm_epsilon", EPSILON, offsetof(mha_model_info, norm_epsilon)},
};

enum { N_MODEL_KEYS = sizeof model_keys / sizeof model_keys[0], RMS_EPSILON = N_MODEL_KEYS - 2 };

static bool is_text(mha_gguf_text text, const char *expected) {
  return text.n == strlen(expected) && memcmp(text.text, expected, text.n) == 0;
}

/* The index in model_keys, or -1. */
static int model_key(mha_gguf_text key, mha_gguf_text architecture) {
  if (key.n < architecture.n || memcmp(key.text, architecture.text, architecture.n) != 0)
    return -1;
  const mha_gguf_text rest = {key.text + architecture.n, key.n - architecture.n};
  for (int k = 0; k < N_MODEL_KEYS; k++)
    if (is_text(rest, model_keys[k].key))
      return k;
  return -1;
}

static mha_status read_scaling(mha_gguf_bytes *b, uint32_t type, bool *is_scaled) {
  mha_gguf_text text = {NULL, 0};
  if (type != STRING)
    return refuse_type(b, "the type of a scaling is a string", type);
  const mha_status status = mha_gguf_take_text(b, "a string", &text);
  *is_scaled = !status && !is_text(text, "none");
  return status;
}

static mha_status read_model_value(mha_gguf_bytes *b, uint32_t type, int key, unsigned seen,
                                   mha_gguf_metadata *m) {
  double real = 0.0;
  void *place = (char *)&m->model + model_keys[key].offset;
  if (model_keys[key].kind == SCALING)
    return read_scaling(b, type, &m->rope_is_scaled);
  if (model_keys[key].kind == SIZE)
    return read_sizes(b, type, place);
  const bool narrow = model_keys[key].kind == EPSILON;
  const mha_status status = read_real(b, type, narrow ? (double)FLT_MAX : DBL_MAX, &real);
  if (!status && !narrow)
    *(double *)place = real;
  if (!status && narrow && (key == RMS_EPSILON || !(seen & 1U << RMS_EPSILON)))
    *(float *)place = (float)real;
  return status;
}

static mha_status refuse_second(const mha_gguf_bytes *b, size_t at) {
  return mha_gguf_refuse(b, at, "a key stands once", "stands there once more");
}

/* ---- All pairs ------------------------------------------------------------------------------- */

static mha_status read_alignment(mha_gguf_bytes *b, uint32_t type, uint32_t *alignment) {
  if (type != UINT32)
    return refuse_type(b, "the alignment is a uint32", type);
  const mha_status status = mha_gguf_take_u32(b, "a value", alignment);
  const uint32_t a = *alignment;
  if (!status && (a == 0 || (a & (a - 1)) != 0 || a > LARGEST_ALIGNMENT))
    return mha_gguf_refuse(b, b->at - 4, "a power of two, at most 16777216", "is %" PRIu32, a);
  return status;
}

static mha_status read_architecture(mha_gguf_bytes *b, uint32_t type, mha_gguf_text *architecture) {
  return type == STRING ? mha_gguf_take_text(b, "a string", architecture)
                        : refuse_type(b, "the architecture is a string", type);
}

/* What the other keys are read by, wherever it stands. */
static mha_status read_general(mha_gguf_bytes *b, mha_gguf_text key, uint32_t type,
                               mha_gguf_metadata *m) {
  const size_t at = b->at;
  if (is_text(key, "general.architecture"))
    return m->architecture.text ? refuse_second(b, at)
                                : read_architecture(b, type, &m->architecture);
  if (is_text(key, "general.alignment"))
    return m->alignment > 0 ? refuse_second(b, at) : read_alignment(b, type, &m->alignment);
  return skip_value(b, type, 0);
}

static mha_status read_of_model(mha_gguf_bytes *b, mha_gguf_text key, uint32_t type, unsigned *seen,
                                mha_gguf_metadata *m) {
  const int k = model_key(key, m->architecture);
  if (k < 0)
    return skip_value(b, type, 0);
  if (*seen & 1U << k)
    return refuse_second(b, b->at);
  const mha_status status = read_model_value(b, type, k, *seen, m);
  *seen |= 1U << k;
  return status;
}

/* One way through the pairs: for the general ones, or, when the architecture is known, for those of
 * the model. */
static mha_status walk(mha_gguf_bytes *b, int64_t n_pairs, bool of_model, mha_gguf_metadata *m) {
  unsigned seen = 0;
  mha_status status = MHA_OK;
  for (int64_t i = 0; !status && i < n_pairs; i++) {
    mha_gguf_text key = {NULL, 0};
    uint32_t type = 0;
    b->within.text = NULL;
    status = mha_gguf_take_text(b, "a key", &key);
    if (status)
      return status;
    b->within = key;
    status = take_type(b, &type);
    if (!status)
      status = of_model ? read_of_model(b, key, type, &seen, m) : read_general(b, key, type, m);
  }
  if (!status)
    b->within.text = NULL;
  return status;
}

mha_status mha_gguf_read_metadata(mha_gguf_bytes *b, int64_t n_pairs, mha_gguf_metadata *metadata) {
  const size_t begin = b->at;
  memset(metadata, 0, sizeof *metadata);
  mha_status status = walk(b, n_pairs, false, metadata);
  if (status)
    return status;
  if (metadata->alignment == 0)
    metadata->alignment = DEFAULT_ALIGNMENT;
  if (!metadata->architecture.text)
    return MHA_OK;
  b->at = begin;
  return walk(b, n_pairs, true, metadata);
}
