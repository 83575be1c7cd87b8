"""Files and requests from strangers: what reads them answers or refuses in a sentence, and does no harm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = [
    *(f"stores.{name}" for name in ("metadata", "chunks", "staged")),
    *(f"saved.{kind}" for kind in ("flat", "clusters", "faiss-ivf", "faiss-hnsw", "hnswlib")),
    "engines.clusters",
    *(f"lines.{name}" for name in ("questions", "answers", "conversation")),
    "requests.bodies",
    "collected.files",
]
FEW, MANY = 20, 10_000


def fuzzed(target: str, cases: int, cache: pytest.Cache, timeout: float) -> dict[str, int]:
    if target.endswith("hnswlib"):
        pytest.importorskip("hnswlib")
    kept = cache.mkdir("fuzz") / target
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz", target, str(cases), str(kept)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    last = kept / "last"
    case = last.read_text()[:2000] if last.exists() else "its start"
    assert ran.returncode == 0, f"{ran.returncode} at {case}\n{ran.stderr[-3000:]}"
    outcomes: dict[str, int] = json.loads(ran.stdout)
    return outcomes


@pytest.mark.parametrize("target", TARGETS)
def test_no_change_does_harm(target: str, pytestconfig: pytest.Config) -> None:
    outcomes = fuzzed(target, FEW, pytestconfig.cache, 1200)
    assert outcomes["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_no_change_of_ten_thousand_does_harm(target: str, pytestconfig: pytest.Config) -> None:
    outcomes = fuzzed(target, MANY, pytestconfig.cache, 7200)
    assert outcomes["answered"]
