#!/bin/bash
# blas.sh <suite>: each BLAS that Debian has, alone in a fresh root, as its packages and their
# alternatives lay it out: found by name and by itself, built with, and described by the library.
# Then one build with MHA_BLAS=Generic runs over each of them.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/common.sh"

suite=${1:?a suite of Debian, such as bookworm}
table=()

quietly() {
  "$@" >"$root.log" 2>&1 || { tail -20 "$root.log" >&2; return 1; }
}
install() {
  quietly in_root apt-get install -y --no-install-recommends "$@"
}
purge() {
  quietly in_root apt-get purge -y --auto-remove "$@"
}
# configure <MHA_BLAS>: says where it found what.
configure() {
  in_root cmake -S /srv/libmha -B /srv/build --fresh -DMHA_BUILD_TESTS=OFF -DMHA_BUILD_BENCH=OFF \
    -DMHA_BUILD_STATIC=OFF -DMHA_BLAS="$1" 2>&1
}
# described: the library's own words, on one line.
described() {
  in_root /srv/build/mha --version | sed -n 's/^blas[a-z_]*: //p' | paste -sd '|'
}
expect() {
  if [[ $1 != *"$2"* ]]; then
    printf 'expected: %s\ngot: %s\n' "$2" "$1" >&2
    exit 1
  fi
}

# try_blas <package> <name> <library> <words of its description>
try_blas() {
  step "$1"
  install "$1"
  local name words
  for name in auto "$2"; do
    expect "$(configure "$name")" "/$3 with cblas.h in /usr/include"
  done
  quietly in_root cmake --build /srv/build --parallel 2 --target mha_cli
  words=$(described)
  echo "$words"
  expect "$words" "$4"
  in_root /srv/build/mha demo >/dev/null
  table+=("$(printf '%-26s %s' "$1" "$words")")
  purge "$1"
}

make_root "$suite"
clone_into_root
in_root apt-get update >/dev/null
install gcc libc6-dev cmake make libjansson-dev

try_blas libopenblas-pthread-dev OpenBLAS libopenblas.so '|its own pool'
try_blas libopenblas-openmp-dev OpenBLAS libopenblas.so '|OpenMP|'
try_blas libopenblas-serial-dev OpenBLAS libopenblas.so '|serial, every product under one lock|1|'
try_blas libblis-pthread-dev BLIS libblis.so '|its own pool'
try_blas libblis-openmp-dev BLIS libblis.so '|its own pool'
try_blas libblis-serial-dev BLIS libblis.so '|none|'
try_blas libblas-dev Generic libblas.so 'CBLAS of unknown vendor|none|1|unknown'

step "64-bit integers are refused"
install libopenblas64-dev
in_root ln -s /usr/lib/x86_64-linux-gnu/libopenblas64.so /usr/local/lib/libopenblas.so
in_root ln -s /usr/include/x86_64-linux-gnu/openblas64-pthread/cblas.h /usr/local/include/cblas.h
for name in auto OpenBLAS; do
  expect "$(configure $name | tr -s ' \n' ' ' || true)" "is built with 64-bit integers"
done
in_root rm /usr/local/lib/libopenblas.so /usr/local/include/cblas.h
purge libopenblas64-dev

step "One build for all"
install libblas-dev
expect "$(configure Generic)" "/libblas.so with cblas.h"
quietly in_root cmake --build /srv/build --parallel 2 --target mha_cli
for package in libopenblas0-pthread libopenblas0-openmp libopenblas0-serial libblis4-pthread \
  libblis4-openmp libblis4-serial; do
  install $package
  table+=("$(printf '%-26s %s' "Generic, $package" "$(described)")")
  in_root /srv/build/mha demo >/dev/null
  purge $package
done

step "Done"
printf '%s\n' "${table[@]}"
