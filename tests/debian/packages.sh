#!/bin/bash
# packages.sh <suite> [<folder>]: the Debian packages in a fresh minimal Debian. They come from
# <folder>, or are made in a root of their own. Installed with apt; the command and two consumers
# run; then they are purged, and nothing of them stays.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/common.sh"

suite=${1:?a suite of Debian, such as bookworm}
folder=${2:+$(realpath "$2")}

install() {
  in_root apt-get install -y --no-install-recommends "$@" >"$root.log" 2>&1 ||
    { tail -20 "$root.log" >&2; return 1; }
}

# Every path but those that apt, dpkg and the linker's cache keep for themselves.
list_files() {
  in_root find / -xdev \( -path /proc -o -path /tmp -o -path /root -o -path /srv -o -path /var/cache \
    -o -path /var/lib/apt -o -path /var/lib/dpkg -o -path /var/log \) -prune -o -print | sort
}

# purge_all: afterwards the root is as list_files found it before.
purge_all() {
  step "Purging them"
  in_root apt-get purge -y --auto-remove 'libmha*' mha-tools >/dev/null
  list_files >"$root.after"
  diff "$root.before" "$root.after"
  echo "The root is as it was."
}

made=
if [ -z "$folder" ]; then
  make_root "$suite"
  clone_into_root
  step "Making the packages"
  in_root apt-get update >/dev/null
  install gcc libc6-dev cmake make file dpkg-dev libopenblas-dev libjansson-dev
  in_root bash -euc 'cd /srv/libmha && cmake --workflow --preset deb' >"$root.log" 2>&1 ||
    { tail -20 "$root.log" >&2; exit 1; }
  made=$(mktemp -d "${TMPDIR:-/tmp}/packages-XXXXXX")
  folder=$made
  cp "$root"/srv/libmha/build/deb/*.deb "$folder"
  drop_root
fi

make_root "$suite"
mkdir "$root/tmp/packages" "$root/tmp/consumer"
cp "$folder"/libmha[0-9]_*.deb "$root/tmp/packages/library.deb"
cp "$folder"/libmha-dev_*.deb "$root/tmp/packages/development.deb"
cp "$folder"/mha-tools_*.deb "$root/tmp/packages/tools.deb"
if [ -n "$made" ]; then rm -r "$made"; fi
packages=(/tmp/packages/library.deb /tmp/packages/development.deb /tmp/packages/tools.deb)
cp "$source_dir"/tests/consumer/* "$root/tmp/consumer"
chmod -R a+rX "$root/tmp/packages"
in_root apt-get update >/dev/null
list_files >"$root.before"

step "The library and the command"
install /tmp/packages/library.deb /tmp/packages/tools.deb
in_root bash -c 'ls /var/lib/dpkg/info | grep mha'
in_root mha --version
in_root mha demo | tail -5

purge_all

step "A compiler, CMake and libmha-dev"
install gcc g++ cmake make pkg-config
list_files >"$root.before"
install "${packages[@]}"

# consume <title> <command>...: builds in /tmp/built and runs /tmp/built/consumer.
consume() {
  step "$1"
  in_root bash -euc "rm -rf /tmp/built; mkdir /tmp/built; $2; /tmp/built/consumer | tr '\\n' ' '"
}
cmake_lines='cmake -S /tmp/consumer -B /tmp/built -DCONSUMER_VERSION=0.1'
build_line='cmake --build /tmp/built >/dev/null'
consume "find_package in C" "$cmake_lines -DCONSUMER_LANGUAGES=C -DCONSUMER_TARGET=mha::mha \
  >/dev/null; $build_line"
consume "find_package in C++" "$cmake_lines -DCONSUMER_LANGUAGES=CXX -DCONSUMER_TARGET=mha::mha \
  >/dev/null; $build_line"
# shellcheck disable=SC2016 # pkg-config is asked in the root
consume "pkg-config" 'gcc /tmp/consumer/consumer.c -o /tmp/built/consumer \
  $(pkg-config --cflags --libs mha) -lm'
step "The static library without what it needs is refused"
said=$(in_root bash -uc "$cmake_lines -DCONSUMER_LANGUAGES=C -DCONSUMER_TARGET=mha::mha_static \
  -DCONSUMER_COMPONENTS=static 2>&1" || true)
grep -A2 'libmha needs a CBLAS' <<<"$said"

purge_all

step "The static library with what libmha-dev suggests"
install "${packages[@]}" libopenblas-dev libjansson-dev
consume "find_package of the static library" "$cmake_lines -DCONSUMER_LANGUAGES=C \
  -DCONSUMER_TARGET=mha::mha_static -DCONSUMER_COMPONENTS=static >/dev/null; $build_line"
# shellcheck disable=SC2016
consume "pkg-config --static" 'gcc -DMHA_STATIC /tmp/consumer/consumer.c -o /tmp/built/consumer \
  -Wl,-Bstatic -lmha -Wl,-Bdynamic $(pkg-config --static --libs mha) -lm'
step "Done"
