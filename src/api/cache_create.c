/* Owns mha_cache_create: the reading of its options, what of them is the layer's, what goes
 * together. */
#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/element.h"
#include "base/error.h"
#include "cache/cache.h"

/* Sizes left 0 are the layer's, the others agree with it. */
static mha_status take_sizes(mha_cache_options *o, mha_error *error) {
  mha_config c;
  MHA_INIT(&c);
  const mha_status status = o->weights ? mha_weights_config(o->weights, &c, error) : MHA_OK;
  if (!o->weights || status)
    return status;
  const struct {
    int64_t *size;
    int64_t layers;
    const char *name;
  } sizes[] = {{&o->n_kv_heads, c.n_kv_heads, "n_kv_heads"},
               {&o->head_size, c.head_size, "head_size"},
               {&o->value_head_size, c.value_head_size, "value_head_size"}};
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    if (*sizes[k].size != 0 && *sizes[k].size != sizes[k].layers)
      return mha_fail(error, MHA_ERROR_SIZE,
                      "options.%s is %lld with options.weights; rule: 0 or the layer's, %lld",
                      sizes[k].name, (long long)*sizes[k].size, (long long)sizes[k].layers);
    *sizes[k].size = sizes[k].layers;
  }
  o->weights = NULL;
  return MHA_OK;
}

/* Tokens and number of pages go together. */
static mha_status check_pages(const mha_cache_options *o, mha_error *error) {
  const int64_t T = o->page_tokens;
  const mha_status status = mha_require_page_tokens(T, "options.page_tokens", error);
  if (status)
    return status;
  if (T == 0 && o->n_pages != 0)
    return mha_fail(error, MHA_ERROR_VALUE,
                    "options.n_pages is %lld without page_tokens; rule: 0 then",
                    (long long)o->n_pages);
  if (T != 0 && (o->n_pages < 1 || o->n_pages > INT32_MAX))
    return mha_fail(error, MHA_ERROR_SIZE,
                    "options.n_pages is %lld with page_tokens %lld; rule: 1 to %lld",
                    (long long)o->n_pages, (long long)T, (long long)INT32_MAX);
  return MHA_OK;
}

/* As many tokens as all pages hold, where nothing else is said. */
static mha_status default_capacity(mha_cache_options *o, mha_error *error) {
  if (o->capacity != 0 || o->page_tokens == 0)
    return MHA_OK;
  if (mha_multiply(o->page_tokens, o->n_pages, &o->capacity))
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_OVERFLOW,
                  "options has %lld pages of %lld tokens; rule: the product must not overflow",
                  (long long)o->n_pages, (long long)o->page_tokens);
}

static mha_status check_sizes(const mha_cache_options *o, mha_error *error) {
  mha_status status = mha_require_at_least(o->n_entries, 1, "options.n_entries", error);
  if (!status)
    status =
        mha_require_at_least(o->capacity, o->page_tokens != 0 ? 0 : 1, "options.capacity", error);
  if (!status)
    status = mha_require_at_least(o->n_kv_heads, 1, "options.n_kv_heads", error);
  if (!status)
    status = mha_require_at_least(o->head_size, 1, "options.head_size", error);
  if (!status)
    status = mha_require_at_least(o->value_head_size, 0, "options.value_head_size", error);
  if (!status)
    status = mha_require_at_least(o->window, 0, "options.window", error);
  if (!status)
    status = mha_require_at_least(o->rollback, 0, "options.rollback", error);
  if (!status)
    status = mha_require_reserved(o->reserved, "options.reserved", error);
  return status ? status : check_pages(o, error);
}

static mha_status check_ring(const mha_cache_options *o, mha_error *error) {
  if (o->rollback > 0 && o->window == 0)
    return mha_fail(error, MHA_ERROR_VALUE,
                    "options.rollback is %lld without a window; rule: only a ring has one",
                    (long long)o->rollback);
  int64_t least = 0;
  if (!mha_add(o->window, o->rollback, &least) || least > o->capacity)
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "options.capacity is %lld with window %lld and rollback %lld; rule: at least "
                    "window + largest chunk - 1 + rollback, a chunk being 1 or more",
                    (long long)o->capacity, (long long)o->window, (long long)o->rollback);
  return MHA_OK;
}

/* Rows of G·size numbers, as a leading dimension of the BLAS. */
static mha_status check_row(int64_t heads, int64_t size, mha_error *error) {
  int64_t width = 0;
  if (mha_multiply(heads, size, &width) && width <= MHA_BLAS_MAX)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_OVERFLOW,
                  "options has %lld heads of size %lld; rule: the product is at most %lld, the "
                  "BLAS's integer",
                  (long long)heads, (long long)size, (long long)MHA_BLAS_MAX);
}

static mha_status check_type(const mha_cache_options *o, mha_error *error) {
  const mha_status status =
      mha_require_kv_element(o->type, "options", ".type", MHA_ERROR_UNSUPPORTED, error);
  if (status)
    return status;
  const int64_t block = mha_element_block(o->type);
  if (o->head_size % block != 0 || o->value_head_size % block != 0)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "options has head sizes %lld and %lld; rule: whole blocks of %s, %lld",
                    (long long)o->head_size, (long long)o->value_head_size,
                    mha_element_name(o->type), (long long)block);
  return MHA_OK;
}

mha_status mha_cache_create(const mha_cache_options *options, mha_cache **cache, mha_error *error) {
  mha_cache_options o;
  mha_status status = mha_require(cache, "cache", error);
  if (status)
    return status;
  *cache = NULL;
  status = mha_read_struct(&o, sizeof o, MHA_FIRST_CACHE_OPTIONS, options, "options", error);
  if (!status)
    status = take_sizes(&o, error);
  if (!status)
    status = check_sizes(&o, error);
  if (!status)
    status = default_capacity(&o, error);
  if (!status)
    status = check_ring(&o, error);
  if (status)
    return status;
  if (o.value_head_size == 0)
    o.value_head_size = o.head_size;
  status = check_type(&o, error);
  if (!status)
    status = check_row(o.n_kv_heads, o.head_size, error);
  if (!status)
    status = check_row(o.n_kv_heads, o.value_head_size, error);
  return status ? status : mha_cache_make(&o, cache, error);
}
