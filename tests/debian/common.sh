# shellcheck shell=bash
# Fresh Debian roots, sourced by the scripts beside this file. They need root and debootstrap, and
# of the network only the Debian mirror, so they are no part of ctest.
#   MHA_MIRROR  the mirror; http://deb.debian.org/debian unless set
#   MHA_KEEP    non-empty = the root stays when the script ends
#   MHA_UNCOMMITTED  non-empty = the files as they lie here instead of what is committed
set -euo pipefail

source_dir=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
mirror=${MHA_MIRROR:-http://deb.debian.org/debian}

# What is mounted into a root is seen by this process and its children alone and ends with them.
if [ "$(id -u)" -ne 0 ]; then
  echo "$0 needs root" >&2
  exit 2
fi
if [ -z "${MHA_OWN_MOUNTS:-}" ]; then
  MHA_OWN_MOUNTS=1 exec unshare --mount --propagation private -- bash "$0" "$@"
fi

step() {
  printf '\n==== %s (%d s so far) ====\n' "$1" "$SECONDS"
}

# make_root <suite>: sets $root to a new minimal Debian with apt, proc and nothing else.
make_root() {
  root=$(mktemp -d "${TMPDIR:-/tmp}/root-$1-XXXXXX")
  trap drop_root EXIT
  step "Debian $1 in $root"
  debootstrap --variant=minbase "$1" "$root" "$mirror" >"$root.log" 2>&1 ||
    { tail -20 "$root.log" >&2; return 1; }
  mount -t proc proc "$root/proc"
  cp /etc/resolv.conf "$root/etc/resolv.conf"
  chmod 755 "$root" # for the user _apt
  echo 'Dpkg::Use-Pty "0";' >"$root/etc/apt/apt.conf.d/no-pty"
}

drop_root() {
  umount "$root/proc" 2>/dev/null || true
  if [ -n "${MHA_KEEP:-}" ]; then
    echo "The root stays in $root"
  else
    rm -rf --one-file-system "$root" "$root".*
  fi
}

# in_root <command>...: runs it there, with a bare environment.
in_root() {
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive chroot "$root" "$@"
}

# clone_into_root: what is committed, as a newcomer gets it, in /srv/libmha.
clone_into_root() {
  if [ -n "${MHA_UNCOMMITTED:-}" ]; then
    mkdir "$root/srv/libmha"
    git -c safe.directory="$source_dir" -C "$source_dir" ls-files -z --cached --others \
      --exclude-standard --deduplicate |
      tar -C "$source_dir" --null --ignore-failed-read -cf - -T - | tar -C "$root/srv/libmha" -xf -
    return
  fi
  git -c safe.directory="$source_dir/.git" clone --quiet --no-hardlinks "$source_dir" \
    "$root/srv/libmha"
}
