"""Scores are this project's own, whatever a library's arithmetic: what it finds is scored from the keys."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from offload_decode.common.errors import IndexDamaged, InvalidIndexInput
from offload_decode.indexes import VectorIndex, get, registry
from offload_decode.indexes.approximate import ApproximateIndex, asked_for, rescored
from offload_decode.indexes.flat import FlatIndex
from offload_decode.testing.index_contract import (
    DTYPES,
    ENCODINGS,
    IndexContract,
    assert_truthful,
    assert_well_formed,
    clustered_keys,
    foreign_queries,
    near_queries,
    recall_of,
    shared_keys,
)

KINDS = ["faiss-ivf", "faiss-hnsw", "hnswlib"]
LEVELS = ["NONE", "AVX2", "AVX512", "AVX512_SPR", "ARM_NEON"]


class Rounding:
    """A library that rounds queries to a few bits, and returns scores that are off by a percent."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._rng = np.random.default_rng(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def search(self, queries: Any, k: int, *, params: Any) -> Any:
        scores, ids = self._library.search(self._rounded(queries), k, params=params)
        return self._rounded(scores), ids

    def knn_query(self, queries: Any, k: int) -> Any:
        ids, distances = self._library.knn_query(self._rounded(queries), k)
        return ids, self._rounded(distances)

    def _rounded(self, numbers: Any) -> Any:
        noise = 1 + 0.01 * self._rng.standard_normal(numbers.shape)
        with np.errstate(over="ignore"):  # the scores of places without a key
            return (numbers * noise).astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every library of the kinds that have one is a `Rounding` one."""
    for cls in map(get, KINDS):
        for name in ("_build_native", "_read_native"):
            given = getattr(cls, name)
            monkeypatch.setattr(cls, name, lambda *of, given=given: Rounding(given(*of)))


def assert_exact_and_not_scanned(kind: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = clustered_keys(6000, dtype), near_queries(100, seed=9)
    index = get(kind).build(keys, near_queries(256, seed=3), k=8)
    assert isinstance(index, ApproximateIndex)
    assert index.recall is not None
    assert index.recall.value < index.scan_from
    assert not index.recall.full_scan
    monkeypatch.setattr(index, "flat", None)
    hits = index.search(queries, 8)
    assert_well_formed(hits, 100, 8, 6000)
    assert_truthful(hits, queries, keys)
    assert recall_of(hits, queries, keys, 8) >= 0.9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds", [False, True])
def test_a_library_that_rounds_is_neither_believed_nor_given_up(
    kind: str, dtype: Any, rounds: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rounds:
        request.getfixturevalue("rounding")
    assert_exact_and_not_scanned(kind, dtype, monkeypatch)


@pytest.fixture(params=LEVELS)
def simd_level(request: pytest.FixtureRequest) -> Iterator[None]:
    """Faiss with the instructions of one kind of processor."""
    faiss = registry.faiss()
    config, level = getattr(faiss, "SIMDConfig", None), getattr(faiss, f"SIMDLevel_{request.param}", None)
    if config is None or level is None or not config.is_simd_level_available(level):
        pytest.skip(f"this faiss, or this processor, has no level {request.param}")
    before = config.get_level()
    config.set_level(level)
    yield
    config.set_level(before)


@pytest.mark.parametrize("kind", ["faiss-ivf", "faiss-hnsw"])
@pytest.mark.usefixtures("simd_level")
def test_every_level_of_instructions_finds_exact_scores(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_exact_and_not_scanned(kind, ml_dtypes.bfloat16, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("rounding")
class RoundingContract(IndexContract):
    @pytest.fixture
    def index(self) -> VectorIndex:
        return get(self.kind).build(shared_keys(), foreign_queries(256, seed=3), k=16)


class TestRoundingIVF(RoundingContract):
    kind = "faiss-ivf"


class TestRoundingHNSW(RoundingContract):
    kind = "faiss-hnsw"


class TestRoundingHnswlib(RoundingContract):
    kind = "hnswlib"


@pytest.mark.parametrize("dtype", [*DTYPES, *ENCODINGS])
def test_all_keys_rescored_are_the_exact_scan(dtype: Any) -> None:
    keys, queries = clustered_keys(300, dtype), foreign_queries(5)
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(300), (5, 1)), axis=1)
    hits, exact = rescored(keys, queries, ids, 40), FlatIndex.build(keys).search(queries, 40)
    assert_truthful(hits, queries, keys)
    np.testing.assert_allclose(hits.scores, exact.scores, rtol=1e-5, atol=1e-5)


def test_ties_go_to_the_lower_id_and_places_that_are_left_stay_empty() -> None:
    keys = np.ones((6, 4), np.float16)
    keys[5] = 2
    hits = rescored(keys, np.ones((1, 4), np.float32), np.array([[4, -1, 5, 0, 2]]), 6)
    assert hits.ids.tolist() == [[5, 0, 2, 4, -1, -1]]
    assert hits.scores.tolist() == [[8, 4, 4, 4, -np.inf, -np.inf]]


@pytest.mark.parametrize("ids", [[0, 9], [0, 2**40], [-2, 1], [-(2**63), 1], [1, 3, 1]])
def test_ids_that_are_not_those_of_keys_are_refused(ids: list[int]) -> None:
    with pytest.raises(IndexDamaged, match="build it again"):
        rescored(np.ones((9, 4), np.float16), np.ones((1, 4), np.float32), np.array([ids]), 2)


@pytest.mark.parametrize(("count", "huge"), [(3_000, slice(None)), (85_196, 8)])
def test_keys_whose_distances_overflow_are_refused_before_faiss_ends_the_process(
    count: int, huge: Any
) -> None:
    """The second has one such key, which is not among those that the lists are formed of."""
    keys = np.random.default_rng(0).standard_normal((count, 8)).astype(np.float32)
    keys[huge] *= np.float32(1e20)
    with pytest.raises(InvalidIndexInput, match="overflows float32"):
        get("faiss-ivf").build(keys, digest="of these")


def test_scores_that_are_not_finite_are_refused() -> None:
    keys = np.full((9, 4), 1e30, np.float32)
    with pytest.raises(InvalidIndexInput, match="not finite"):
        rescored(keys, keys[:1], np.array([[3]]), 1)


def test_more_are_asked_for_than_are_wanted_and_never_more_than_there_are() -> None:
    assert all(k < asked_for(k, 10_000) <= 2 * k + 16 for k in (1, 8, 100, 2000))
    assert asked_for(100, 105) == 105
