"""What a kind states of its bytes is what one that was built takes, and is stated without its library."""

from __future__ import annotations

import subprocess
import sys
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import indexes.registry
from indexes.clusters import ClusteredIndex
from indexes.errors import MissingBackend
from indexes.rows import encodings

KINDS = indexes.registry.kinds()


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("dtype", ["float16", "float32", encodings.INT8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_that_a_kind_states_are_those_of_one_that_was_built(
    kind: str, dtype: str, dim: int, tmp_path: Path
) -> None:
    # Within a tenth: how many levels of a graph a key is on, and where cells end, is drawn or found.
    keys: Any = np.random.default_rng(0).standard_normal((4000, dim)).astype(np.float32)
    keys = encodings.encode(keys, dtype) if dtype == encodings.INT8 else keys.astype(dtype)
    try:
        built = indexes.registry.get(kind).build(keys)
    except MissingBackend as error:
        pytest.skip(str(error))
    stated = type(built).costs(len(keys), dim, keys.dtype, 64)
    built.save(tmp_path / "i")
    file = sum(path.stat().st_size for path in tmp_path.iterdir() if path.suffix != ".json")
    assert stated.file == pytest.approx(file, rel=0.1)
    mapped = stated.memory == 0
    assert (stated.file if mapped else stated.memory) == pytest.approx(built.nbytes, rel=0.1)
    loaded = type(built).load(tmp_path / "i", keys)
    if mapped and isinstance(loaded, ClusteredIndex):
        assert all(_is_mapped(part) for part in loaded.cells)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_grows_with_the_keys_and_the_queries_and_never_beyond_all(kind: str) -> None:
    stated = indexes.registry.stated(kind)

    def read(n: int, rows: int = 1, k: int = 64) -> int:
        return stated.costs(n, 64, np.dtype(np.float16), k, rows).read

    assert 0 < read(1_000) <= read(10_000) <= read(100_000)
    assert read(100_000) <= read(100_000, rows=4)
    held = stated.costs(100_000, 64, np.dtype(np.float16), 64)
    everything = 100_000 * 128 + max(held.memory, held.file)
    assert read(100_000, rows=1000, k=10_000) <= everything
    assert stated.search_bytes(100_000, 64, 2, 4) > 0


def test_a_kind_is_asked_for_its_bytes_without_its_library() -> None:
    code = (
        "import sys; sys.modules.update(faiss=None, hnswlib=None)\n"
        "import numpy as np\n"
        "from indexes import registry\n"
        "for kind in registry.kinds(): registry.stated(kind).costs(10**6, 128, np.dtype('f2'), 64)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("dtype", ["float16", "float32", encodings.INT8])
@pytest.mark.parametrize("n", [1, 1000, 9001])
@pytest.mark.parametrize("kind", ["clusters", "flat", "faiss-ivf"])
def test_one_that_is_made_up_is_searched_as_a_real_one(kind: str, n: int, dtype: str) -> None:
    keys: Any = np.random.default_rng(0).standard_normal((n, 32)).astype(np.float32)
    keys = encodings.encode(keys, dtype) if dtype == encodings.INT8 else keys.astype(dtype)
    try:
        own = indexes.registry.get(kind).made_up(keys, 64)
    except MissingBackend as error:
        pytest.skip(str(error))
    hits = type(own).search_heads([own, own], np.ones((2, 3, 32), np.float32), 64)
    assert hits.ids.shape == (2, 3, 64)
    assert ((hits.ids >= 0).sum(axis=2) == min(n, 64)).all()
    assert np.isfinite(hits.scores[hits.ids >= 0]).all()
    if isinstance(own, ClusteredIndex):
        real = ClusteredIndex.build(keys).cells
        assert own.cells.nbytes == pytest.approx(real.nbytes, rel=0.1)
        assert [part.dtype for part in own.cells] == [part.dtype for part in real]
        assert own._prunes(64) == (n > ceil(4 * (64 + 16 + 64)))


def _is_mapped(array: Any) -> bool:
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array is not None
