/* To be preloaded under the command: the call of fsync whose number is in MHA_TEST_FSYNC, counted
 * from 1, sends the process the signal whose number is in MHA_TEST_SIGNAL, so that it comes while
 * there are temporary files, at the same point each time. Nothing is synced. */
#include <signal.h>
#include <stdlib.h>

int fsync(int file);

int fsync(int file) {
  static int n_calls;
  const char *number = getenv("MHA_TEST_SIGNAL");
  const char *call = getenv("MHA_TEST_FSYNC");
  (void)file;
  if (number && call && ++n_calls == atoi(call))
    (void)raise(atoi(number));
  return 0;
}
