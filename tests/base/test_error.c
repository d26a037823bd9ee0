/* Names of statuses, messages, and a caller that wants no message. */
#include "support.h"

#include "base/error.h"

#include <string.h>

static void every_status_has_its_own_name(void **state) {
  (void)state;
  for (int a = MHA_OK; a <= MHA_ERROR_COMMUNICATION; a++) {
    assert_int_equal(strncmp(mha_status_name((mha_status)a), "MHA_", 4), 0);
    for (int b = MHA_OK; b < a; b++)
      assert_string_not_equal(mha_status_name((mha_status)a), mha_status_name((mha_status)b));
  }
  assert_string_equal(mha_status_name((mha_status)(MHA_ERROR_COMMUNICATION + 1)), "unknown status");
}

static void a_failure_stores_status_and_message(void **state) {
  (void)state;
  mha_error error;
  memset(&error, 0xa5, sizeof error);
  assert_int_equal(mha_fail(&error, MHA_ERROR_SIZE, "x is %d; rule: at least %d", 3, 4),
                   MHA_ERROR_SIZE);
  assert_int_equal(error.status, MHA_ERROR_SIZE);
  assert_string_equal(error.message, "x is 3; rule: at least 4");
  assert_int_equal(mha_succeed(&error), MHA_OK);
  assert_int_equal(error.status, MHA_OK);
  assert_string_equal(error.message, "");
}

static void nobody_has_to_want_the_message(void **state) {
  (void)state;
  assert_int_equal(mha_fail(NULL, MHA_ERROR_NULL, "x is NULL"), MHA_ERROR_NULL);
  assert_int_equal(mha_succeed(NULL), MHA_OK);
}

static void a_long_message_is_cut_and_ended(void **state) {
  (void)state;
  char long_name[2 * MHA_ERROR_MESSAGE_BYTES];
  mha_error error;
  memset(long_name, 'a', sizeof long_name);
  long_name[sizeof long_name - 1] = '\0';
  (void)mha_fail(&error, MHA_ERROR_IO, "%s", long_name);
  assert_int_equal(strlen(error.message), MHA_ERROR_MESSAGE_BYTES - 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_status_has_its_own_name),
      cmocka_unit_test(a_failure_stores_status_and_message),
      cmocka_unit_test(nobody_has_to_want_the_message),
      cmocka_unit_test(a_long_message_is_cut_and_ended),
  };
  return cmocka_run_group_tests_name("error", tests, NULL, NULL);
}
