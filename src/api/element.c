/* Owns mha_element_convert: the reading of its arguments, and the way from type to type. */
#include "base/arguments.h"
#include "base/error.h"
#include "engine/numbers.h"

static mha_status check_type(int32_t element, int64_t n, const char *name, mha_error *error) {
  int64_t bytes = 0;
  if (!mha_element_is_known(element))
    return mha_fail(error, MHA_ERROR_VALUE, "%s is %d; rule: a value of mha_element", name,
                    (int)element);
  if (n % mha_element_block(element) != 0)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "n is %lld and %s %s; rule: a multiple of its block, %lld", (long long)n, name,
                    mha_element_name(element), (long long)mha_element_block(element));
  if (!mha_element_extent(element, n, &bytes))
    return mha_fail(error, MHA_ERROR_OVERFLOW, "n is %lld; rule: the bytes must not overflow",
                    (long long)n);
  return MHA_OK;
}

static mha_status check(int32_t from, const void *source, int32_t to, const void *target, int64_t n,
                        mha_error *error) {
  mha_address_ranges ranges = {.n = 0};
  mha_status status = mha_require_at_least(n, 0, "n", error);
  if (!status)
    status = check_type(from, n, "from", error);
  if (!status)
    status = check_type(to, n, "to", error);
  if (!status && n > 0)
    status = mha_require(source, "source", error);
  if (!status && n > 0)
    status = mha_require(target, "target", error);
  if (!status)
    status = mha_ranges_add(&ranges, "source", source, (int64_t)mha_element_bytes(from, n), 1,
                            false, error);
  if (!status)
    status = mha_ranges_add(&ranges, "target", target, (int64_t)mha_element_bytes(to, n), 1, true,
                            error);
  return status ? status : mha_ranges_check(&ranges, error);
}

mha_status mha_element_convert(int32_t from, const void *source, int32_t to, void *target,
                               int64_t n, mha_error *error) {
  const mha_status status = check(from, source, to, target, n, error);
  if (status)
    return status;
  if (n > 0) /* pointers may be NULL otherwise */
    mha_numbers_convert(target, to, source, from, n);
  return mha_succeed(error);
}
