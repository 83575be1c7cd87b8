"""Kinds by name, optional libraries, and what an import may load."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from offload_decode.common import errors
from offload_decode.common.errors import MissingBackend, UnknownIndex
from offload_decode.indexes import VectorIndex, VectorIndexError, get, keys_digest, kinds
from offload_decode.indexes.registry import BUILT_IN


def test_every_kind_is_found_under_its_own_name() -> None:
    assert BUILT_IN == ("clusters", "flat", "faiss-ivf", "faiss-hnsw", "hnswlib")
    assert kinds()[: len(BUILT_IN)] == BUILT_IN
    for kind in BUILT_IN:
        assert issubclass(get(kind), VectorIndex)
        assert get(kind).name == kind
        assert get(kind).exact_scores


def test_an_unknown_kind_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownIndex, match="flat, faiss-ivf, faiss-hnsw, hnswlib"):
        get("flatt")


@pytest.mark.parametrize(
    ("kind", "library", "extra"),
    [
        ("faiss-ivf", "faiss", r"offload-decode\[cpu\]"),
        ("faiss-hnsw", "faiss", r"offload-decode\[cpu\]"),
        ("hnswlib", "hnswlib", r"offload-decode\[hnsw\]"),
    ],
)
def test_a_missing_library_is_answered_with_its_extra(
    kind: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("faiss", "hnswlib"):
        monkeypatch.delitem(sys.modules, f"offload_decode.indexes.{module}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingBackend, match=extra):
        get(kind)


HEAVY = ["faiss", "hnswlib", "torch", "transformers", "zarr"]


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("from offload_decode import indexes", [*HEAVY, "numba"]),
        ("from offload_decode import indexes; indexes.get('flat')", HEAVY),
    ],
)
def test_imports_stay_light(statement: str, absent: list[str]) -> None:
    code = f"{statement}\nimport sys\nprint([m for m in {absent} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_error_has_one_base() -> None:
    for name in ("InvalidIndexInput", "UnknownIndex", "MissingBackend", "IndexNotFound", "IndexMismatch"):
        assert issubclass(getattr(errors, name), VectorIndexError)
        assert getattr(errors, name).__doc__, "docs/library.md renders it"


def test_a_digest_tells_values_shapes_and_dtypes_apart() -> None:
    keys = np.arange(12, dtype=np.float32).reshape(3, 4)
    changed = keys.copy()
    changed[2, 3] += 1
    half = keys.astype(np.float16)
    same_bytes = half.view(ml_dtypes.bfloat16)
    arrays = (keys, changed, keys.reshape(4, 3), keys[:0], half, same_bytes)
    assert len({keys_digest(x) for x in arrays}) == len(arrays)
    assert keys_digest(keys.copy()) == keys_digest(keys)
