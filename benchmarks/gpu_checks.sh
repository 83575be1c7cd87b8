#!/usr/bin/env bash
# Every check that needs a CUDA device: the tests marked `gpu`, the timing of Quest's kernels, prefill of an
# 8B-shaped model, dense on the whole card, dense with streamed weights and sparse under a cap of 16 GiB, for five
# minutes each at most, and decoding with one from 1M long-tailed tokens. Ends within half an hour: what is not done by
# then has failed. Parts, to run some of them: tests quest prefill streamed sparse decode.
# Runs with .venv/bin/python, or with the machine's own python; results go to ${OUT:-benchmarks/results}.
set -uo pipefail
readonly LIMIT=1780  # seconds
readonly ALL="tests quest prefill streamed sparse decode"
parts=${*:-$ALL}
for part in $parts; do
    [[ " $ALL " == *" $part "* ]] || { echo "no part is called '$part': there are $ALL" >&2; exit 2; }
done
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
    tests="tests/attention"
    echo "missing here: $missing. Only the kernels' own tests run."
fi

failed=() skipped=()
check() {  # a part and its command, for as long as is left of the half hour
    local part=$1
    shift
    [[ " $parts " == *" $part "* ]] || return 0
    timeout --kill-after=10 $((SECONDS < LIMIT ? LIMIT - SECONDS : 1)) "$@" || failed+=("$*")
}
# A file that cannot be imported here counts as failed, but keeps none of the others from running.
# shellcheck disable=SC2086
check tests "$PYTHON" -m pytest -m gpu -p no:cacheprovider -rs --junitxml="$out/gpu_tests.xml" --continue-on-collection-errors $tests
check quest "$PYTHON" benchmarks/gpu_quest.py --out "$out"
if [ -z "$missing" ]; then
    check prefill "$PYTHON" -m benchmarks.gpu_model prefill --minutes 5 --out "$out"
    check streamed "$PYTHON" -m benchmarks.gpu_model prefill --minutes 5 --out "$out" --gpu-memory 16GiB \
        --weights streamed
    check sparse "$PYTHON" -m benchmarks.gpu_model prefill --minutes 5 --out "$out" --gpu-memory 16GiB --tokens 350000 \
        --method quoka -o budget=1024 -o chunk=256
    weights=int4
    if ! "$PYTHON" -c 'from importlib.util import find_spec as f; raise SystemExit(f("bitsandbytes") is None)'; then
        weights=auto
        skipped+=("decoding with int4 weights, for bitsandbytes is missing: float16 instead")
    fi
    check decode "$PYTHON" -m benchmarks.gpu_model decode --weights $weights --out "$out"
else
    skipped+=("all but the kernels' tests and gpu_quest.py, for these are missing: $missing")
fi
[ "${#skipped[@]}" -eq 0 ] || printf 'Skipped: %s.\n' "${skipped[@]}"

if [ "${#failed[@]}" -gt 0 ]; then
    printf "FAILED, or not done when $LIMIT seconds were over: %s\n" "${failed[@]}" >&2
    exit 1
fi
echo "All GPU checks passed: $parts."
