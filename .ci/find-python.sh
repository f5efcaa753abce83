#!/bin/sh
# Print the first Python that is new enough: the argument if there is one, else the usual names.
# 3.11 comes first because every compiled dependency has a wheel for it.
set -eu
for name in ${1:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
  if command -v "$name" >/dev/null 2>&1 &&
    "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    command -v "$name"
    exit 0
  fi
done
found=$(python3 --version 2>&1 || true)
echo "error: meshnet needs Python 3.11 or newer${1:+, and $1 is not}; python3 is: ${found:-missing}." >&2
echo "Install one (Debian, Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python" >&2
exit 1
