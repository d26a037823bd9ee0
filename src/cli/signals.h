/* What signals do to the command. */
#ifndef MHA_SRC_CLI_SIGNALS_H
#define MHA_SRC_CLI_SIGNALS_H

#include "files/output.h"

/* From now on SIGHUP, SIGINT, SIGQUIT, SIGTERM and SIGXCPU, unless they are ignored, first remove
 * the temporary files of what is watched; then the command ends by them as it would. SIGXFSZ is
 * ignored: a limit on the size of files is the error of a write. */
void mha_signals_prepare(void);

/* Watches n outputs, whose has_temporary is set or 0, until the next call; 0 = none. */
void mha_signals_watch(const mha_output *outputs, int n);

/* Has them also remove this folder, which the command made, unless there is something in it; NULL =
 * none. */
void mha_signals_watch_folder(const char *path);

/* Lets those signals wait from now on, while temporary files come and go whose names are not known
 * here; and has those that came meanwhile end the command, as above. */
void mha_signals_hold(void);
void mha_signals_let_go(void);

#endif
