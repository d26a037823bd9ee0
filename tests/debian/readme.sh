#!/bin/bash
# readme.sh <suite>: the README's two lines, in a fresh minimal Debian (bookworm, trixie, ...).
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/common.sh"

suite=${1:?a suite of Debian, such as bookworm}
first=$("$(dirname "$0")/readme_line.sh" 1)
second=$("$(dirname "$0")/readme_line.sh" 2)

make_root "$suite"
clone_into_root
step "First line: $first"
begun=$SECONDS
in_root bash -euc "cd /srv/libmha && $first"
first_seconds=$((SECONDS - begun))
step "Second line: $second"
begun=$SECONDS
in_root bash -euc "cd /srv/libmha && $second"
printf '\n%s: first line %d s, second line %d s; gcc %s, cmake %s\n' "$suite" "$first_seconds" \
  "$((SECONDS - begun))" "$(in_root gcc -dumpfullversion)" \
  "$(in_root cmake --version | sed -n '1s/.* //p')"
