#!/bin/bash
# readme.sh <suite> [<core>...]: the README's two lines, in a fresh minimal Debian (bookworm, trixie,
# ...); then the second once more with OPENBLAS_CORETYPE set to each core, such as Haswell.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/common.sh"

suite=${1:?a suite of Debian, such as bookworm}
shift
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

for core in "$@"; do
  step "Second line on $core"
  begun=$SECONDS
  in_root env OPENBLAS_CORETYPE="$core" bash -euc "cd /srv/libmha && $second" >"$root.core" 2>&1 ||
    { tail -60 "$root.core" >&2; exit 1; }
  printf '%s, %s: %s, %d s\n' "$suite" "$core" "$(sed -n '/tests passed/p' "$root.core")" \
    "$((SECONDS - begun))"
done
