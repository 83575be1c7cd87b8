#!/usr/bin/env bash
# Every check that needs a CUDA device: the tests marked `gpu`, the timing of Quest's kernels, prefill of an
# 8B-shaped model, dense on the whole card, dense with streamed weights and sparse under a cap of 16 GiB, for five
# minutes each at most, and decoding with one from 1M long-tailed tokens.
# Runs with .venv/bin/python, or with the machine's own python; results go to ${OUT:-benchmarks/results}.
set -uo pipefail
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
    PYTHON=.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=$(command -v python || command -v python3) || { echo "no python found" >&2; exit 1; }
fi
out=${OUT:-benchmarks/results}
unset TRITON_INTERPRET

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
"$PYTHON" - <<'PY' || exit 2
import sys
import torch, triton
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}")
if not torch.cuda.is_available():
    sys.exit("gpu_checks.sh needs a CUDA device, and torch sees none here.")
print(f"{torch.cuda.get_device_name()}, compute capability {torch.cuda.get_device_capability()}")
PY

missing=$("$PYTHON" -c '
from importlib.util import find_spec
print(*[name for name in ("zarr", "transformers", "faiss", "numba", "typer", "hypothesis") if find_spec(name) is None])')
if [ -z "$missing" ]; then
    tests=tests
else
    tests=tests/pages/test_device.py
    echo "missing here: $missing. Only the kernels' own tests run."
fi

failed=()
"$PYTHON" -m pytest -m gpu -p no:cacheprovider -rs "$tests" || failed+=("pytest -m gpu $tests")
"$PYTHON" benchmarks/gpu_quest.py --out "$out" || failed+=("benchmarks/gpu_quest.py")
if [ -z "$missing" ]; then
    PYTHONPATH=. "$PYTHON" benchmarks/gpu_prefill.py --minutes 5 --out "$out" || failed+=("benchmarks/gpu_prefill.py")
    PYTHONPATH=. "$PYTHON" benchmarks/gpu_prefill.py --minutes 5 --out "$out" --gpu-memory 16GiB --weights streamed \
        || failed+=("benchmarks/gpu_prefill.py --weights streamed")
    PYTHONPATH=. "$PYTHON" benchmarks/gpu_prefill.py --minutes 5 --out "$out" --gpu-memory 16GiB --tokens 350000 \
        --method quoka -o budget=1024 -o chunk=256 || failed+=("benchmarks/gpu_prefill.py --gpu-memory 16GiB")
    if "$PYTHON" -c 'from importlib.util import find_spec as f; raise SystemExit(f("bitsandbytes") is None)'; then
        PYTHONPATH=. "$PYTHON" benchmarks/gpu_decode.py --out "$out" || failed+=("benchmarks/gpu_decode.py")
    else
        echo "missing here: bitsandbytes. benchmarks/gpu_decode.py is skipped."
    fi
else
    echo "missing here: $missing. benchmarks/gpu_prefill.py and benchmarks/gpu_decode.py are skipped."
fi

if [ "${#failed[@]}" -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "All GPU checks passed."
