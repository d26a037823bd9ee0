#!/bin/bash
# checksums.sh <build folder>: runs the unit tests that use the shared library and prints, for each
# program, the number of its calls and a checksum of all that they computed. Run it before and after
# a change that should move no bit, on one machine, and compare:
#   diff <(tests/checksums.sh build/before) <(tests/checksums.sh build/after)
set -euo pipefail

build=$(realpath "${1:?a build folder}")
here=$(realpath "$(dirname "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cc -std=c11 -O2 -shared -fPIC -I "$here/../include" "$here/checksums.c" -o "$work/checksums.so" -ldl
# Those that fork, end processes or load the library themselves are left out, and those whose calls
# race with one another for a context.
leave='process|unload|gate|threads|cli|allocation_failure|context'
for program in "$build"/tests/test_*; do
  name=$(basename "$program")
  if [ -x "$program" ] && [ -f "$program" ] && [[ ! $name =~ ^test_($leave)(_|$) ]] &&
    [[ $(ldd "$program") == *libmha.so* ]]; then
    LD_PRELOAD="$work/checksums.so" MHA_CHECKSUMS="$work/sums" "$program" >"$work/log" 2>&1 ||
      { cat "$work/log" >&2; exit 1; }
  fi
done
sort "$work/sums"
