#!/usr/bin/env bash
# Create an environment with torch_xla and run the XLA tests in it, with the CPU as the XLA device.
#
#   scripts/xla_env.sh [FOLDER]     (default: .xla-venv)
#
# torch_xla 2.9 needs torch 2.9, and torch 2.9 from PyPI loads its CUDA libraries even without a GPU, so the
# environment takes about 7.5 GB. It needs Python 3.11 to 3.13; set PYTHON to choose one.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:-.xla-venv}"
"${PYTHON:-python3}" -m venv "$folder"
. "$folder/bin/activate"
pip install -q --upgrade pip
pip install -q -e ".[tpu]" pytest pytest-xdist
export PJRT_DEVICE=CPU OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python -c "import torch, torch_xla; print('torch', torch.__version__, 'on', torch_xla.device())"
pytest -q tests/xla
