"""What the contract does not say: bytes are stated without a kind's library, and clusters are mapped."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_decode.common.rows import encodings
from offload_decode.indexes.clusters.index import ClusteredIndex


def test_a_kind_is_asked_for_its_bytes_without_its_library() -> None:
    code = (
        "import sys; sys.modules.update(faiss=None, hnswlib=None)\n"
        "import numpy as np\n"
        "from offload_decode.indexes import registry\n"
        "for kind in registry.BUILT_IN: registry.stated(kind).costs(10**6, 128, np.dtype('f2'), 64)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def drawn(n: int, dtype: str) -> Any:
    keys = np.random.default_rng(0).standard_normal((n, 32)).astype(np.float32)
    return encodings.encode(keys, dtype) if dtype == encodings.INT8 else keys.astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", encodings.INT8])
def test_clusters_that_are_loaded_are_mapped(dtype: str, tmp_path: Path) -> None:
    keys = drawn(4000, dtype)
    ClusteredIndex.build(keys).save(tmp_path / "i")
    assert all(_is_mapped(part) for part in ClusteredIndex.load(tmp_path / "i", keys).cells)


def _is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array.obj if isinstance(array, memoryview) else array, mmap.mmap)
