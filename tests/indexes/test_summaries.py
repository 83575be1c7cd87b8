"""Summaries of clusters: what they hold, how they are kept, and what no file may make of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_decode.common.errors import IndexDamaged, InvalidIndexInput
from offload_decode.common.rows import encodings
from offload_decode.indexes.base import Hits
from offload_decode.indexes.clusters import summaries as module
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.indexes.clusters.summaries import members
from offload_decode.testing.index_contract import DTYPES, clustered_keys, near_queries

VALUE_DIM = 24


def some_values(n: int, dtype: Any = np.float16) -> Any:
    return np.random.default_rng(9).standard_normal((n, VALUE_DIM)).astype(dtype)


def built(n: int = 2000, dtype: Any = np.float16) -> ClusteredIndex:
    index = ClusteredIndex.build(clustered_keys(n, dtype), near_queries(64), digest="d", k=8)
    assert not index.summarized
    index.summarize(some_values(n, dtype))
    assert index.summarized
    return index


def estimate(index: ClusteredIndex) -> tuple[Any, Any]:
    queries = near_queries(5).astype(np.float32)
    hits: Hits = index.search(queries, 20)
    return ClusteredIndex.estimate([index], queries[None], hits.ids[None], hits.scores[None], VALUE_DIM, 0.3)


def decoded(rows: Any) -> Any:
    return encodings.decode(encodings.as_records(np.ascontiguousarray(rows), encodings.INT8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_hold_the_means_of_their_keys_and_values(dtype: Any) -> None:
    index = built(dtype=dtype)
    cells, found, values = index.cells, index.summaries, some_values(2000, dtype).astype(np.float32)
    assert len(found.sizes) == pytest.approx(2000 / module.KEYS, rel=0.1)
    assert (np.bincount(found.labels) == found.sizes).all()
    near = decoded(found.keys), decoded(found.values), decoded(found.cells)
    for cell, ids in enumerate(members(cells)):
        groups = range(found.first[cell], found.first[cell + 1])
        assert set(found.labels[ids]) == set(groups)
        np.testing.assert_allclose(near[2][cell], values[ids].mean(0), atol=0.02)
        for group in groups:
            own = np.flatnonzero(found.labels == group)
            mean = index.keys[own].astype(np.float32).mean(0) - cells.means[cell]
            np.testing.assert_allclose(near[0][group], mean, atol=np.abs(mean).max() / 250 + 1e-6)
            np.testing.assert_allclose(near[1][group], values[own].mean(0), atol=0.02)


def test_a_large_cell_is_grouped_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = np.ones((3000, 16), np.float32), some_values(3000)
    monkeypatch.setattr(module, "_TOGETHER", 100)
    index = ClusteredIndex.untuned(keys, values)
    assert len(index.cells.counts) == 1, "of equal keys"
    assert module.check(index.summaries, index.cells)
    assert len(index.summaries.sizes) >= 30
    np.testing.assert_allclose(
        decoded(index.summaries.cells)[0], values.astype(np.float32).mean(0), atol=0.01
    )


def test_a_saved_index_estimates_as_before(tmp_path: Path) -> None:
    index = built()
    index.save(tmp_path / "i")
    loaded = ClusteredIndex.load(tmp_path / "i", index.keys, digest="d")
    assert loaded.summarized
    for found, expected in zip(estimate(loaded), estimate(index), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_an_index_without_summaries_is_searched_and_estimates_nothing(tmp_path: Path) -> None:
    """As those of earlier versions are."""
    index = ClusteredIndex.build(clustered_keys(2000), near_queries(64), digest="d", k=8)
    index.save(tmp_path / "i")
    loaded = ClusteredIndex.load(tmp_path / "i", index.keys, digest="d")
    assert not loaded.summarized
    assert (loaded.search(near_queries(3), 5).ids >= 0).all()


def test_summaries_of_an_extended_index_are_taken_over() -> None:
    keys, values = clustered_keys(2600), some_values(2600)
    first = ClusteredIndex.build(keys[:2000], near_queries(64), digest="d", k=8)
    first.summarize(values[:2000])
    longer = first.extended(keys, near_queries(64), digest="e")
    assert not longer.summarized
    longer.summarize(values)
    groups = len(first.summaries.sizes)
    for found, earlier in zip(longer.summaries, first.summaries, strict=True):
        np.testing.assert_array_equal(found[: len(earlier)], earlier)
    assert (longer.summaries.labels[2000:] >= groups).all()
    assert module.check(longer.summaries, longer.cells)
    fresh = first.extended(keys, near_queries(64), digest="e")
    fresh._native.summaries = None
    fresh.summarize(values)
    for found, expected in zip(longer.summaries, fresh.summaries, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_heads_of_a_layer_are_estimated_as_each_alone() -> None:
    one, other = built(), built(1500)
    queries = near_queries(70).astype(np.float32)
    ids = np.stack([index.search(queries, 20).ids for index in (one, other)])
    out, lse = ClusteredIndex.estimate([one, other], np.stack([queries] * 2), ids, None, VALUE_DIM, 0.3)
    for head, index in enumerate((one, other)):
        alone = ClusteredIndex.estimate([index], queries[None], ids[head : head + 1], None, VALUE_DIM, 0.3)
        np.testing.assert_array_equal(out[head], alone[0][0])
        np.testing.assert_array_equal(lse[head], alone[1][0])


def test_what_cannot_be_summarized_or_estimated_is_refused() -> None:
    index = built()
    ids, queries = np.zeros((2, 3, 4), np.int64), np.ones((2, 3, index.dim), np.float32)
    other = ClusteredIndex.untuned(index.keys, np.ones((2000, 7), np.float32))
    with pytest.raises(IndexDamaged, match="not those of keys and values"):
        ClusteredIndex.estimate([index, other], queries, ids, None, VALUE_DIM, 1)
    for bad in (queries[:1], queries[:, :, 1:], queries * np.float32(np.nan), queries[:, :2]):
        with pytest.raises(InvalidIndexInput):
            ClusteredIndex.estimate([index, index], bad, ids, None, VALUE_DIM, 1)
    repeated = ClusteredIndex.estimate([index, index], queries, ids, None, VALUE_DIM, 1)  # one id
    assert all(np.isfinite(part).all() for part in repeated)
    without = ClusteredIndex.build(clustered_keys(2000), digest="d")
    with pytest.raises(InvalidIndexInput, match="summarized"):
        ClusteredIndex.estimate([index, without], queries, ids, None, VALUE_DIM, 1)
    with pytest.raises(InvalidIndexInput, match="as many values"):
        index.summarize(some_values(1999))
    with pytest.raises(InvalidIndexInput):
        ClusteredIndex.untuned(index.keys, np.full((2000, 4), np.nan, np.float32))
    with pytest.raises(InvalidIndexInput, match="not of the 2,000 keys"):
        ClusteredIndex.estimate([index], queries[:1, :1], np.array([[[2000]]]), None, VALUE_DIM, 1)


@pytest.mark.parametrize(
    ("name", "place", "number"),
    [
        ("keys", (3, slice(0, 4)), np.frombuffer(np.float32(np.inf).tobytes(), np.uint8)),
        ("values", (0, slice(0, 4)), np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)),
        ("first", 0, 1),
        ("first", 1, 0),
        ("first", -1, 10**6),
        ("sizes", 2, 0),
        ("labels", 7, -1),
        ("labels", 7, 10**6),
        ("labels", slice(None), 0),
    ],
)
def test_a_file_with_other_summaries_is_refused(tmp_path: Path, name: str, place: Any, number: Any) -> None:
    index = built()
    changed = getattr(index.summaries, name).copy()
    changed[place] = number
    index._native.summaries = index.summaries._replace(**{name: changed})
    index.save(tmp_path / "i")
    with pytest.raises(IndexDamaged, match="build the index again"):
        ClusteredIndex.load(tmp_path / "i", index.keys, digest="d")


def test_groups_with_keys_of_other_cells_are_refused() -> None:
    index = built()
    labels = index.summaries.labels.copy()
    one, other = (next(iter(ids)) for ids in list(members(index.cells))[:2])
    labels[[one, other]] = labels[[other, one]]
    with pytest.raises(RuntimeError, match="keys of other cells"):
        module.check(index.summaries._replace(labels=labels), index.cells)
