#!/bin/bash
# readme_line.sh <n>: the n-th of the two lines of code under "## Two commands" in README.md.
set -euo pipefail

lines=$(awk '/^## / { section = $0; inside = 0 }
             /^```/ { inside = !inside; next }
             section == "## Two commands" && inside && NF' "$(dirname "$0")/../../README.md")
if [ "$(wc -l <<<"$lines")" -ne 2 ]; then
  echo "README.md does not have exactly two lines of code under \"## Two commands\"." >&2
  exit 1
fi
sed -n "${1:?1 or 2}p" <<<"$lines"
