"""Loops that are compiled are told of, once; those that lie compiled are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
from offload_decode.cli.compiling import announce_compiling
announce_compiling()
announce_compiling()
import numpy as np
from numba import njit
njit(lambda: 1)()  # not one of ours
from offload_decode.indexes.clusters.search import _candidates_for
for k in (5, np.int32(5)):
    _candidates_for(k)
"""


def test_compiling_is_announced_once(tmp_path: Path) -> None:
    said = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(ran.stderr)
    assert said[0].startswith("compiling the loops")
    assert said[0].count("\n") == 1
    assert said[1] == ""
