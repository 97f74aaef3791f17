#!/bin/sh
# Writes locked.txt: every package that `pip install .` and its extras bring on any system, with the hashes of all files of its version.
# What is installed by it is what was tested, to the byte: `pip install --require-hashes -r locked.txt`, then `pip install --no-deps .`.
# Needs uv (https://docs.astral.sh/uv/); versions that constraints.txt names are kept to.
set -eu
cd "$(dirname "$0")/.."
UV=${UV:-uv}
command -v "$UV" >/dev/null 2>&1 || { echo "locked: uv is missing: pip install uv" >&2; exit 1; }
{
    echo "# Written by scripts/locked.sh; change pyproject.toml or constraints.txt and run it again."
    "$UV" pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-header --no-annotate \
        --default-index https://pypi.org/simple --constraints constraints.txt \
        --extra models --extra data --extra tensorboard --extra quantized pyproject.toml
} >locked.txt.new
mv locked.txt.new locked.txt
echo "locked: $(grep -c '==' locked.txt) packages"
