"""`flat` is the top-k by definition: it is held against sorting all scores."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_decode.common.errors import InvalidIndexInput
from offload_decode.common.rows import encodings
from offload_decode.common.rows import threads as pool
from offload_decode.indexes import flat, get
from offload_decode.indexes.base import VectorIndex
from offload_decode.indexes.flat import FlatIndex
from offload_decode.testing.index_contract import (
    DIM,
    DTYPES,
    ENCODINGS,
    IndexContract,
    clustered_keys,
    foreign_queries,
)


class TestFlat(IndexContract):
    kind = "flat"


def brute_force(queries: Any, keys: Any, k: int) -> tuple[Any, Any]:
    """The definition: all scores, sorted by descending score and then ascending id."""
    scores = queries.astype(np.float64) @ keys.astype(np.float64).T
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return ids, np.take_along_axis(scores, ids, axis=1)


@settings(max_examples=210, deadline=None)
@given(
    n=st.integers(1, 130),
    dim=st.integers(1, 40),
    rows=st.integers(1, 21),
    k=st.integers(1, 140),
    block=st.sampled_from([1, 7, 16, 64, 2048]),
    group=st.sampled_from([3, 256]),
    dtype=st.sampled_from([*DTYPES, *ENCODINGS]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_sorting_with_ties_to_the_lower_id(
    n: int, dim: int, rows: int, k: int, block: int, group: int, dtype: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # Small integers: sums are exact in every dtype, and there are many ties.
    if dtype in ENCODINGS:
        keys = encodings.encode(rng.standard_normal((n, 2 * dim)), dtype)
        keys["codes"][::5], keys["scale"] = keys["codes"][0], 0.5
    else:
        keys = rng.integers(-2, 3, (n, dim)).astype(dtype)
    stands_for = encodings.decode(keys)
    queries = rng.integers(-3, 4, (rows, stands_for.shape[1])).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "_BLOCK_ROWS", block)
        patch.setattr(flat, "_GROUP_ROWS", group)
        hits = FlatIndex.build(keys).search(queries, k)
    ids, scores = brute_force(queries, stands_for, k)
    np.testing.assert_array_equal(hits.ids[:, : min(k, n)], ids)
    np.testing.assert_array_equal(hits.scores[:, : min(k, n)], scores)


@pytest.mark.parametrize("n", [2047, 2048, 2049, 4097, 9001])
@pytest.mark.parametrize("k", [1, 100, 2048, 4500, 9001])
def test_equals_sorting_across_blocks(n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    keys = rng.integers(-9, 10, (n, 12)).astype(np.float16)
    queries = rng.integers(-9, 10, (5, 12)).astype(np.float32)
    hits = FlatIndex.build(keys).search(queries, k)
    ids, _ = brute_force(queries, keys, k)
    np.testing.assert_array_equal(hits.ids[:, : min(k, n)], ids)


def test_rising_scores_replace_every_earlier_candidate() -> None:
    keys = np.arange(20_000, dtype=np.float32)[:, None]
    hits = FlatIndex.build(keys).search(np.ones((1, 1), np.float32), 3)
    np.testing.assert_array_equal(hits.ids, [[19_999, 19_998, 19_997]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_keys_tie_exactly_wherever_they_lie(dtype: Any) -> None:
    keys = clustered_keys(5001, dtype)
    keys[[5000, 4099, 2048, 2047, 30, 1]] = keys[0]
    for rows in (1, 3, 8, 33):
        hits = FlatIndex.build(keys).search(foreign_queries(rows), 5001)
        for ids, scores in zip(hits.ids, hits.scores, strict=True):
            copies = np.flatnonzero(np.isin(ids, [0, 1, 30, 2047, 2048, 4099, 5000]))
            np.testing.assert_array_equal(ids[copies], [0, 1, 30, 2047, 2048, 4099, 5000])
            assert len(set(scores[copies].tolist())) == 1


def test_a_query_is_answered_alike_in_every_group() -> None:
    index, queries = FlatIndex.build(clustered_keys(3000)), foreign_queries(300)
    together = index.search(queries, 20)
    for row in (0, 1, 2, 255, 256, 299):
        alone = index.search(queries[row : row + 1], 20)
        np.testing.assert_array_equal(alone.ids[0], together.ids[row])
        np.testing.assert_array_equal(alone.scores[0], together.scores[row])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_16_bit_value_is_widened_exactly(dtype: Any) -> None:
    values = np.arange(2**16, dtype=np.uint16).view(dtype)
    keys = values[np.isfinite(values.astype(np.float32))][:, None]
    hits = FlatIndex.build(keys).search(np.ones((1, 1), np.float32), len(keys))
    np.testing.assert_array_equal(hits.scores[0], keys[hits.ids[0], 0].astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1000, 2999])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_are_not_finite_never_become_hits(bad: float, place: int, dtype: Any) -> None:
    keys = clustered_keys(3000, dtype)
    keys[place, 4] = bad
    index = FlatIndex.build(keys, digest="trusted, so that the keys are not read")
    for query in (np.zeros((1, 32), np.float32), foreign_queries(1)):
        with pytest.raises(InvalidIndexInput, match="not finite"):
            index.search(query, 5)


def test_an_overflowing_score_is_refused() -> None:
    keys = np.full((3, 2), 3e38, np.float32)
    with pytest.raises(InvalidIndexInput, match="overflows"):
        get("flat").build(keys).search(np.full((1, 2), 3e38, np.float32), 1)


@pytest.mark.parametrize("k", [1, 100, 3000])
@pytest.mark.parametrize("threads", [2, 3, 16])
def test_a_heads_keys_are_read_in_parts_where_threads_would_idle(
    k: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = clustered_keys(2500, np.float16)
    keys[1200:1300] = keys[7]  # equal scores in several parts
    heads = [get("flat").build(keys[:last]) for last in (2500, 2200)]
    queries = foreign_queries(6, seed=8).reshape(2, 3, DIM)
    monkeypatch.setattr(pool, "THREADS", threads)
    monkeypatch.setattr(flat, "_KEYS_OF_A_PART", 500)
    searched = []
    search = VectorIndex.search
    monkeypatch.setattr(
        VectorIndex, "search", lambda self, *given: (searched.append(len(self)), search(self, *given))[1]
    )
    for some in (slice(2), slice(1)):
        hits = FlatIndex.search_heads(heads[some], queries[some], k)
        for head, found, scores, own in zip(heads[some], hits.ids, hits.scores, queries[some], strict=True):
            whole = search(head, own, k)
            np.testing.assert_array_equal(found, whole.ids)
            np.testing.assert_array_equal(scores, whole.scores)
    assert len(searched) == 2 * max(1, min(threads // 2, 4)) + min(threads, 5)
