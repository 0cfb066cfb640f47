#!/usr/bin/env bash
# setup_wangen.sh: made by wangen 0.1.0 for linux-rocm.
#
#   bash setup_wangen.sh             makes the Python environment that the run scripts here use, or renews it:
#                                     PyTorch for this machine's card, wangen and its libraries
#   bash setup_wangen.sh --dry_run   says what it finds, and only prints the commands
#
# It may run again at any time: what is right stays, what is missing or wrong is installed.
# WANGEN_PYTHON names the Python (3.11 or newer) that the environment is made with; without it one is searched.
# WANGEN_TORCH_INDEX names another wheel index for PyTorch, or a folder of wheels.
# If you edit this file, publishing again leaves it as it is and writes the new text beside it as setup_wangen.sh.new.
#
# wangen-digest: 101bfec3485e80a51880affe9f15a787
# Typographic quotes in a path are no typing errors.
# shellcheck disable=SC1112
# An editor for Windows may have put a carriage return behind every line: behind the first of these two, and hidden
# by the # behind the second.
wg_end=''
[ -z "$wg_end" ] || { printf '%s\n' "wangen: $0 has the line ends of Windows: publish again, or remove them (sed -i 's/\r//')" >&2; exit 2; } #
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail

wg_stop() {
  printf '%s\n' "$@" >&2
  exit 1
}

# The bundle may be moved: its root is the folder that holds this script, or the one that a link to it names.
WG_SELF=${BASH_SOURCE[0]}
[ ! -L "$WG_SELF" ] || WG_SELF=$(readlink -f -- "$WG_SELF")
WG_ROOT=$(CDPATH='' cd -- "$(dirname -- "$WG_SELF")" && pwd)
cd -- "$WG_ROOT"

WG_WHEEL="$WG_ROOT"/files/wangen-0.1.0-py3-none-any.whl
[ -f "$WG_WHEEL" ] || wg_stop "wangen: this file is not there: $WG_WHEEL" \
  '  do:    copy the whole folder that was published, or publish again'

unset PYTHONHOME
export PYTHONUTF8=1 PYTHONSAFEPATH=1
wg_fits() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

WG_PY=''
if [ -n "${WANGEN_PYTHON:-}" ]; then
  wg_fits "$WANGEN_PYTHON" || wg_stop "wangen: WANGEN_PYTHON names no Python from 3.11 on: $WANGEN_PYTHON" \
    '  do:    unset it, or give the full path of a python'
  WG_PY=$WANGEN_PYTHON
else
  # The newest ones come last: PyTorch is published for a new Python some months after it.
  for wg_python in "$WG_ROOT"/venv/bin/python "$WG_ROOT"/'.venv'/bin/python python3.13 python3.12 python3.11 python3 python; do
    if wg_fits "$wg_python"; then
      WG_PY=$wg_python
      break
    fi
  done
fi
[ -n "$WG_PY" ] || wg_stop 'wangen: no Python from 3.11 on was found.' \
  '  do:    install one (Debian, Ubuntu: sudo apt install python3 python3-venv; Fedora: sudo dnf install python3.13),' \
  '         or set WANGEN_PYTHON to the full path of one'

exec "$WG_PY" -c 'import sys; sys.path.insert(0, sys.argv[1]); from wangen.generator.setup.environment import main; sys.exit(main(sys.argv[1:]))' \
  "$WG_WHEEL" \
  --kind linux \
  --accelerator rocm \
  --build rocm7.2 \
  --shell sh \
  --venv "$WG_ROOT"/venv --venv "$WG_ROOT"/'.venv' "$@"
