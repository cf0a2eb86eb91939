#!/usr/bin/env bash
# Sets up a virtual environment (.venv), builds the tiny pair's engine, and runs it with and without speculation.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
.venv/bin/pip install -q -e .
speccompile=.venv/bin/speccompile
$speccompile build --target samples/tiny/target --draft samples/tiny/causal-depth --out engines/tiny --max-seq-len 512 --force
$speccompile run engines/tiny --prompt 'The "while" statement is used for' --max-new-tokens 64
$speccompile run engines/tiny --prompt 'The "while" statement is used for' --max-new-tokens 64 --no-speculation
$speccompile verify engines/tiny
