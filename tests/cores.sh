#!/bin/bash
# cores.sh [-s] [-b <build folder>] [<core>...]: the unit tests with the kernels of each core that
# an OpenBLAS for many (DYNAMIC_ARCH) has and this machine can run, oldest first; then a table. The
# library decides by the core how it multiplies, and a fault may show on one alone.
#   -s  MHA_TEST_SMALL=1
#   -b  a release build, made if it is not there; build/release unless given
# Where OPENBLAS_CORETYPE is set, somebody had a reason, such as newer kernels that crash there, so
# cores newer than the one in force are left out. Cores that are named are run whatever is set.
set -euo pipefail
cd "$(dirname "$0")/.."

# Names as OPENBLAS_CORETYPE takes them, from old to new, and what /proc/cpuinfo must have: OpenBLAS
# believes what it is told, and the first product would end the program.
all=(
  "Prescott pni"
  "Core2 ssse3"
  "Penryn sse4_1"
  "Dunnington sse4_1"
  "Barcelona sse4a"
  "Nehalem sse4_2"
  "Sandybridge avx"
  "Bulldozer avx fma4"
  "Piledriver avx fma4 fma"
  "Haswell avx2 fma"
  "Steamroller avx fma4 fma"
  "Excavator avx2 fma4 fma"
  "Zen avx2 fma"
  "SkylakeX avx512f avx512cd avx512bw avx512dq avx512vl"
  "Cooperlake avx512f avx512cd avx512bw avx512dq avx512vl avx512_bf16"
  "SapphireRapids avx512f avx512cd avx512bw avx512dq avx512vl avx512_bf16 amx_tile"
)
small=
build=build/release
while getopts sb: option; do
  case $option in
  s) small=1 ;;
  b) build=$OPTARG ;;
  *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
table=$(mktemp)
trap 'rm -f "$table"' EXIT
failed=0

# core_in_force [<core>]: what OpenBLAS takes when it is told so, or told what it is told now.
core_in_force() {
  OPENBLAS_CORETYPE=${1:-${OPENBLAS_CORETYPE-}} "$build/mha" --version |
    sed -n 's/^blas_core: //p'
}

# missing <flag>...: those that this machine does not have.
missing() {
  local flags flag
  flags=" $(sed -n 's/^flags[^:]*://p' /proc/cpuinfo | head -n 1) "
  for flag in "$@"; do
    if [[ $flags != *" $flag "* ]]; then printf ' %s' "$flag"; fi
  done
}

# row <core> <result>
row() {
  printf '%-17s %s\n' "$1" "$2" | tee -a "$table"
}

try_core() {
  local log=$build/cores/$1.log seconds=$SECONDS taken passed faults
  taken=$(core_in_force "$1") || taken="nothing, since it crashes"
  if [ "${taken,,}" != "${1,,}" ]; then
    row "$1" "not in this OpenBLAS, which takes $taken"
    return
  fi
  echo "==== $1"
  local settings=("OPENBLAS_CORETYPE=$1")
  if [ -n "$small" ]; then settings+=(MHA_TEST_SMALL=1); fi
  # the variants with plain loops have no BLAS
  if ! env "${settings[@]}" ctest --test-dir "$build" -L unit -LE plain --timeout 1800 \
    -j "${MHA_JOBS:-2}" --output-on-failure >"$log" 2>&1; then
    failed=1
  fi
  passed=$(sed -n 's/, \([0-9]* tests failed out of [0-9]*\)/, \1/p' "$log" | tail -1)
  faults=$(sed -n 's/^\t *[0-9]* - \([a-z_]*\) (.*/\1/p' "$log" | tr '\n' ' ')
  row "$1" "${passed:-no tests}, $((SECONDS - seconds)) s${faults:+: $faults}"
}

if [ ! -e "$build/CMakeCache.txt" ]; then
  cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release
fi
cmake --build "$build" --parallel "${MHA_JOBS:-2}"
mkdir -p "$build/cores"
if ! "$build/mha" --version | grep -q DYNAMIC_ARCH; then
  echo "The BLAS in force is no OpenBLAS with the kernels of several cores:" >&2
  "$build/mha" --version >&2
  exit 2
fi

if [ $# -gt 0 ]; then
  for core in "$@"; do
    try_core "$core"
  done
elif [ "$(uname -m)" != x86_64 ]; then
  echo "Which cores a $(uname -m) can run is not known here: name them." >&2
  exit 2
else
  newest=
  if [ -n "${OPENBLAS_CORETYPE-}" ]; then newest=$(core_in_force); fi
  for entry in "${all[@]}"; do
    read -ra words <<<"$entry"
    lacks=$(missing "${words[@]:1}")
    if [ -n "$lacks" ]; then
      row "${words[0]}" "left out: this machine has no$lacks"
    else
      try_core "${words[0]}"
    fi
    if [ "${words[0],,}" = "${newest,,}" ]; then
      row "newer ones" "left out: OPENBLAS_CORETYPE=$OPENBLAS_CORETYPE"
      break
    fi
  done
fi
echo
cat "$table"
exit $failed
