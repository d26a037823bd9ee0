#!/bin/bash
# flavours.sh [-s] [-d <folder>] [-o <build folder>] [<flavour>...]: the unit tests with each BLAS
# that Debian has, one after the other, as far as they are installed; then a table. Which of them
# the alternatives prefer does not matter: each is taken by its path, and the run-time linker is
# told. Some minutes for each.
#   -s  MHA_TEST_SMALL=1 for all; otherwise only for Netlib's, whose loops are plain
#   -d  where Debian's packages are unpacked (dpkg -x); / unless given
#   -o  where to build; build/flavours unless given
# BLIS is tested with readable guard pages, see support/readable_guards.c.
set -euo pipefail
cd "$(dirname "$0")/.."

all=(openblas-pthread openblas-openmp openblas-serial blis-pthread blis-openmp blis-serial netlib)
small=
debian=/
builds=build/flavours
while getopts sd:o: option; do
  case $option in
  s) small=1 ;;
  d) debian=$OPTARG ;;
  o) builds=$OPTARG ;;
  *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
if [ $# -eq 0 ]; then set -- "${all[@]}"; fi
triplet=$(${CC:-cc} -print-multiarch)
mkdir -p "$builds"
table=$(mktemp)
trap 'rm -f "$table"' EXIT
failed=0

# locate <flavour>: sets folder, library and headers; false where it is not installed.
locate() {
  local name=${1%%-*}
  folder=$debian/usr/lib/$triplet/$1
  headers=$debian/usr/include/$triplet/$1
  if [ "$1" = netlib ]; then
    name=blas
    folder=$debian/usr/lib/$triplet/blas
    # Netlib's header lies among others under a name of its own.
    headers=$(realpath "$builds")/netlib-include
    rm -rf "$headers"
    mkdir -p "$headers"
    cp "$debian/usr/include/$triplet"/cblas_* "$headers" 2>/dev/null || true
    cp "$debian/usr/include/$triplet/cblas-netlib.h" "$headers/cblas.h" 2>/dev/null || true
  fi
  library=$folder/lib$name.so
  [ -e "$library" ] && [ -e "$headers/cblas.h" ]
}

build() {
  cmake -S . -B "$1" -DCMAKE_BUILD_TYPE=Release -DMHA_BUILD_BENCH=OFF \
    -DMHA_BLAS_LIBRARIES="$library" -DMHA_BLAS_INCLUDE_DIR="$headers" &&
    cmake --build "$1" --parallel "${MHA_JOBS:-2}"
}

# row <flavour> <result>
row() {
  printf '%-17s %s\n' "$1" "$2" | tee -a "$table"
}

try_flavour() {
  local dir=$builds/$1
  local seconds=$SECONDS
  if ! locate "$1"; then
    row "$1" "not installed"
    return
  fi
  echo "==== $1: $library"
  if ! build "$dir" >"$dir.log" 2>&1; then
    tail -5 "$dir.log"
    row "$1" "does not build, see $dir.log"
    failed=1
    return
  fi
  local settings=("LD_LIBRARY_PATH=$folder")
  env "${settings[@]}" "$dir/mha" --version
  case $1 in
  netlib) settings+=(MHA_TEST_SMALL=1) ;;
  blis-*)
    "${CC:-cc}" -shared -fPIC tests/support/readable_guards.c -o "$dir/readable_guards.so"
    settings+=("LD_PRELOAD=$(realpath "$dir/readable_guards.so")")
    ;;
  esac
  if [ -n "$small" ]; then settings+=(MHA_TEST_SMALL=1); fi
  if ! env "${settings[@]}" ctest --test-dir "$dir" -L unit --timeout 1800 --output-on-failure \
    >>"$dir.log" 2>&1; then
    failed=1
  fi
  local passed faults
  passed=$(sed -n 's/, \([0-9]* tests failed out of [0-9]*\)/, \1/p' "$dir.log" | tail -1)
  faults=$(sed -n 's/^\t *[0-9]* - \([a-z_]*\) (.*/\1/p' "$dir.log" | tr '\n' ' ')
  row "$1" "$passed, $((SECONDS - seconds)) s${faults:+: $faults}"
}

for flavour in "$@"; do
  try_flavour "$flavour"
done
echo
cat "$table"
exit $failed
