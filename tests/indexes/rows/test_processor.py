"""Compiled code uses no instruction that numba was told to leave out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import config

from offload_decode.common.rows import numbers
from offload_decode.common.rows.processor import features
from offload_decode.indexes.clusters import dot4

GENERIC = """
import numpy as np
from numba import njit
from offload_decode.indexes.clusters import dot4 as dots
from offload_decode.common.rows.numbers import half_to_single
print(list(dots.forms()), njit(lambda bits: half_to_single(bits))(np.uint16(0x3C01)))
"""


@pytest.mark.parametrize(
    ("named", "found"),
    [("", set()), ("+avx2,-avx512vnni", {"avx2"}), ("+f16c,+avx512vnni", {"f16c", "avx512vnni"})],
)
def test_what_numba_is_told_counts(named: str, found: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CPU_FEATURES", named, raising=False)
    assert features() == found
    assert set(dot4.forms()) == found & {"avx2", "avx512vnni"} | {"vectors"}
    assert numbers._converts() or "f16c" not in found


def test_code_for_any_processor_runs(tmp_path: Path) -> None:
    """LLVM ends the process where it finds no instruction for what is asked of it."""
    told = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}
    told.pop("NUMBA_CPU_FEATURES", None)
    done = subprocess.run([sys.executable, "-c", GENERIC], env=told, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "['vectors'] 1.0009765625"), done.stderr
