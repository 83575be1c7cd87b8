"""The kind `clusters`: its integer products, its cells, and what pruning may and may not change."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit

from offload_decode.common.errors import InvalidIndexInput
from offload_decode.common.rows import encodings
from offload_decode.common.rows.team import cells as cells_of_threads
from offload_decode.indexes import get
from offload_decode.indexes.approximate import quality
from offload_decode.indexes.clusters import cells, dot4, search
from offload_decode.indexes.clusters import index as clusters
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.indexes.flat import FlatIndex
from offload_decode.testing.index_contract import (
    DIM,
    DTYPES,
    ENCODINGS,
    IndexContract,
    assert_truthful,
    assert_well_formed,
    clustered_keys,
    exact_scores,
    foreign_queries,
    recall_of,
)


class TestClusters(IndexContract):
    kind = "clusters"


def built(n: int = 12_000, dtype: Any = np.float16, **options: Any) -> ClusteredIndex:
    index = get("clusters").build(clustered_keys(n, dtype), foreign_queries(256, seed=3), k=16, **options)
    assert isinstance(index, ClusteredIndex)
    return index


def unpredictable(keys: Any, made: str) -> Any:
    """Keys of which no score threshold can be predicted, if they are `repeated` or one is an `outlier`."""
    if made == "repeated":
        keys[:1000] = np.repeat(keys[:20], 50, axis=0)
    elif made == "outlier":
        keys[5] *= 300
    return keys


def packed_codes(codes: Any) -> Any:
    """Codes `[n, D]` from 0 to 15 as blocks `[n / 16, D / 8, 16, 4]`, flat."""
    halves = codes.reshape(-1, dot4.BLOCK, codes.shape[1] // dot4.GROUP, 2, 4)
    return (halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)).transpose(0, 2, 1, 3).ravel()


@pytest.mark.parametrize("form", dot4.forms())
@pytest.mark.parametrize("dim", [8, 64, 136])
def test_every_form_scores_the_same_and_marks_what_is_above_the_threshold(form: str, dim: int) -> None:
    rng = np.random.default_rng(dim)
    codes = rng.integers(0, 16, (48, dim)).astype(np.uint8)
    queries = rng.integers(-127, 128, (dot4.QUERIES, dim)).astype(np.int8)
    codes[:16], queries[0] = 15, -127  # the largest sums
    halves = queries.reshape(dot4.QUERIES, dim // dot4.GROUP, 2, 4)
    packed = np.ascontiguousarray(halves.transpose(1, 2, 0, 3))
    scored = dot4.forms()[form]

    @njit
    def run(codes: Any, scales: Any, first: int, count: int, groups: int, *others: Any) -> None:
        scored(codes, scales, first, count, first, groups, *others)

    scales = rng.uniform(0.5, 2, 48).astype(np.float32)
    near, unit, offset = rng.integers(-8, 8, (3, dot4.QUERIES)).astype(np.float32)
    products = codes[16:].astype(np.int32) @ queries.astype(np.int32).T
    expected = near + (products - offset).astype(np.float32) * (scales[16:, None] * unit)
    threshold = np.median(expected, axis=0)
    scores = np.zeros((2, dot4.QUERIES, dot4.BLOCK), np.float32)
    masks = np.zeros((2, dot4.QUERIES), np.uint16)
    terms = np.stack([near, unit, offset, threshold]).astype(np.float32)
    run(packed_codes(codes), scales, 1, 2, dim // dot4.GROUP, packed, terms, scores, masks)
    np.testing.assert_array_equal(scores, expected.reshape(2, dot4.BLOCK, -1).transpose(0, 2, 1))
    bits = (masks[..., None] >> np.arange(dot4.BLOCK)) & 1
    np.testing.assert_array_equal(bits, scores > threshold.astype(np.float32)[:, None])


@pytest.mark.parametrize("dtype", [*DTYPES, *ENCODINGS])
def test_cells_hold_every_key_once_with_its_moments_and_codes(dtype: Any) -> None:
    keys = clustered_keys(5000, dtype)
    own = cells.build(keys)
    wide = encodings.decode(keys).astype(np.float64)
    assert len(own.counts) > 5
    assert (np.sort(own.ids[own.ids >= 0]) == np.arange(5000)).all()
    groups = -(-DIM // dot4.GROUP)
    blocks = own.codes.reshape(-1, groups, dot4.BLOCK, 4)
    codes = np.stack([blocks & 15, blocks >> 4], axis=2)  # [blocks, groups, half, key, channel]
    codes = codes.transpose(0, 3, 1, 2, 4).reshape(len(own.ids), -1)[:, :DIM].astype(np.float64) - 8
    for c, (start, stop) in enumerate(zip(own.starts[:-1] * 16, own.starts[1:] * 16, strict=True)):
        ids = own.ids[start:stop]
        real = ids >= 0
        assert real.sum() == own.counts[c] > len(ids) - dot4.BLOCK
        members = wide[ids[real]]
        np.testing.assert_allclose(own.means[c], members.mean(0), atol=1e-4)
        np.testing.assert_allclose(own.variances[c], members.var(0), atol=1e-3)
        scale = own.scales[start:stop][real, None]
        off = np.abs(own.means[c] + codes[start:stop][real] * scale - members)
        assert (off <= scale / 2 + 1e-5).all()


@pytest.mark.parametrize("repeated", [0, 40])
def test_more_deviations_read_more_and_all_of_them_find_what_a_whole_scan_finds(repeated: int) -> None:
    twenty = np.repeat(clustered_keys(40), 20, axis=0)[: 20 * repeated]
    keys, queries = np.concatenate([clustered_keys(12_000), twenty]), foreign_queries(64, seed=8)
    index = get("clusters").build(keys, foreign_queries(256, seed=3), k=16)
    assert isinstance(index, ClusteredIndex)
    k = 256 if repeated else 32
    found = [recall_of(index.search_at(queries, k, d), queries, keys, k) for d in (0.5, 3.0, 8.0, 64.0)]
    assert found == sorted(found)
    assert found[0] < found[-1]
    assert found[-1] > 0.98


def test_every_cell_is_searched_where_no_key_may_be_overlooked() -> None:
    """A key of one topic in a cell of another, along a query that was never stored."""
    index = built()
    queries = foreign_queries(64, seed=8)
    best = exact_scores(queries, index.keys).argmax(axis=1)
    assert index.recall is not None
    index.recall = dataclasses.replace(index.recall, value=0.0)
    index.recall_of_many = None
    some, every = (
        ClusteredIndex.search_heads([index], queries[None], 16, every_cell=whole) for whole in (False, True)
    )
    found = [(hits.ids[0] == best[:, None]).any(1).mean() for hits in (some, every)]
    assert found[0] < found[1] == 1


def test_hits_below_the_exact_scan_are_scored_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    index, queries = built(), foreign_queries(9, seed=8)
    monkeypatch.setattr(index, "flat", None)
    for k in (1, 16, 512):
        hits = index.search_at(queries, k, 64.0)
        assert_well_formed(hits, 9, k, len(index))
        assert_truthful(hits, queries, index.keys)


def test_deviations_are_tuned_for_few_keys_and_for_many(tmp_path: Path) -> None:
    keys, queries, others = clustered_keys(8000), foreign_queries(128), foreign_queries(64, seed=8)
    index = get("clusters").build(keys, queries, k=16, target_recall=0.9)
    assert isinstance(index, ClusteredIndex)
    few, many = index.recall, index.recall_of_many
    assert few is not None
    assert many is not None
    assert (few.target, few.k, many.target, many.k) == (0.9, 16, 0.9, 1024)
    measured = recall_of(index.search_at(queries[1::2], 1024, many.value), queries[1::2], keys, 1024)
    assert many.measured == pytest.approx(measured, abs=1e-3)
    assert recall_of(index.search(others, 1024), others, keys, 1024) > 0.85
    index.save(tmp_path / "index")
    assert get("clusters").load(tmp_path / "index", keys).recall_of_many == many  # type: ignore[attr-defined]


def test_deviations_fall_with_the_logarithm_of_k_and_never_rise() -> None:
    index = built()
    assert index.recall is not None
    few = dataclasses.replace(index.recall, k=16, value=4.0)
    index.recall, index.recall_of_many = few, dataclasses.replace(few, k=1024, value=3.0)
    ks = (1, 16, 128, 1024, 4000)
    assert [index.deviations_for(k) for k in ks] == [4.0, 4.0, 3.5, 3.0, 3.0]
    index.recall_of_many = dataclasses.replace(few, k=1024, value=5.0)
    assert [index.deviations_for(k) for k in ks] == [4.0] * 5
    index.recall_of_many = dataclasses.replace(few, k=16, value=3.0)  # what no build writes
    assert [index.deviations_for(k) for k in ks] == [4.0] * 5
    index.recall_of_many = None  # of an index that was built before it was measured
    assert [index.deviations_for(k) for k in ks] == [4.0] * 5


def test_a_row_finds_the_same_alone_and_among_others() -> None:
    index, queries = built(), foreign_queries(70, seed=8)
    together = index.search(queries, 40)
    for row in (0, 3, 33, 69):
        alone = index.search(queries[row : row + 1], 40)
        np.testing.assert_array_equal(together.ids[row], alone.ids[0])
        np.testing.assert_array_equal(together.scores[row], alone.scores[0])


@pytest.mark.parametrize("threads", [2, 3, 16])
@pytest.mark.parametrize("made", ["clustered", "repeated", "outlier"])
def test_a_heads_cells_are_searched_in_parts_where_threads_would_idle(
    made: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = unpredictable(clustered_keys(12_000, np.float32), made)
    heads = [get("clusters").build(keys[:last], k=16) for last in (12_000, 7000)]
    assert all(isinstance(head, ClusteredIndex) for head in heads)
    queries = foreign_queries(6, seed=8).reshape(2, 3, DIM)
    ks = (1, 16, 300, 2000)
    monkeypatch.setattr("offload_decode.common.rows.threads.THREADS", 1)
    expected = [ClusteredIndex.search_heads(heads, queries, k) for k in ks]
    monkeypatch.setattr("offload_decode.common.rows.threads.THREADS", threads)
    monkeypatch.setattr(clusters, "_CELLS_OF_A_PART", 8)
    ran, run = [], clusters._in_parts

    def in_parts(*given: Any) -> Any:
        ran.append(given[-1])
        return run(*given)

    monkeypatch.setattr(clusters, "_in_parts", in_parts)
    for k, whole in zip(ks, expected, strict=True):
        for some in (slice(2), slice(1)):
            hits = ClusteredIndex.search_heads(heads[some], queries[some], k)
            np.testing.assert_array_equal(hits.ids, whole.ids[some])
            np.testing.assert_array_equal(hits.scores, whole.scores[some])
    most = min(threads // 2, 27 // 8)
    assert most in ran
    assert max(ran) == min(threads, 46 // 8)


def test_threads_share_the_predictions_of_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [get("clusters").build(clustered_keys(count, np.float32), k=16) for count in (12_000, 7000)]
    queries = foreign_queries(10, seed=8).reshape(2, 5, DIM)
    shared, searched = [], clusters.search_layer

    def seen(*given: Any) -> None:
        shared.append(given[5])
        searched(*given)

    monkeypatch.setattr(clusters, "search_layer", seen)
    monkeypatch.setattr("offload_decode.common.rows.threads.THREADS", 12)
    monkeypatch.setattr(clusters, "_CELLS_OF_A_PART", 8)
    ClusteredIndex.search_heads(heads, queries, 16)
    predicted = shared[0]
    for number, (head, own) in enumerate(zip(heads, queries, strict=True)):
        assert isinstance(head, ClusteredIndex)
        counts = head.cells.counts
        scaled = np.zeros((8, DIM), np.float32)
        scaled[:5] = own / np.abs(own).max(axis=1, keepdims=True)
        near, deviation = scaled @ head.cells.means.T, np.sqrt(scaled**2 @ head.cells.variances.T)
        found, inverse = (part[number, :, : len(counts)] for part in (predicted.near, predicted.inverse))
        np.testing.assert_allclose(found, near, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(1 / inverse[:5], deviation[:5], rtol=1e-3)
        wanted = search.AIMED * search.candidates_for(16)
        for r in range(5):
            threshold = search.threshold_of(found[r], inverse[r], counts, wanted)
            assert predicted.thresholds[number, r] == threshold


def test_no_cell_is_left_to_no_part() -> None:
    starts = np.cumsum([0, 3, 1, 40, 2, 2, 9])
    for listed in ([0, 2, 3, 5], [2], []):
        chosen = np.array(listed, np.int64)
        for parts in (1, 2, 3, 7):
            own = [list(search._own_part(chosen, starts, part, parts)) for part in range(parts)]
            assert [cell for part in own for cell in part] == listed
    assert list(search._own_part(np.arange(6), starts, 1, 3)) == [2], "parts are of like size"


@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-20, 1, 1e20])
def test_queries_of_any_size_find_what_they_find(size: float) -> None:
    index, queries = built(), foreign_queries(16, seed=8)
    hits = index.search_at((queries * size).astype(np.float32), 16, 64.0)
    assert_well_formed(hits, 16, 16, len(index))
    assert recall_of(hits, queries, index.keys, 16) > 0.95


def test_scores_that_overflow_are_refused() -> None:
    index = get("clusters").build(clustered_keys(5000, np.float32) * np.float32(1e10), k=16)
    assert isinstance(index, ClusteredIndex)
    with pytest.raises(InvalidIndexInput, match="not finite"):
        index.search_at(foreign_queries(3) * np.float32(3e28), 16, 3.0)


@pytest.mark.parametrize("sink", [10, 100])
def test_a_key_far_above_all_others_hides_none_of_them(sink: float) -> None:
    keys, queries = clustered_keys(12_000, np.float32), foreign_queries(16, seed=8)
    keys[77] = queries[0] * sink
    index = get("clusters").build(keys, k=16)
    assert isinstance(index, ClusteredIndex)
    assert recall_of(index.search_at(queries[:1], 100, 64.0), queries[:1], keys, 100) > 0.97


def test_more_keys_than_a_segment_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "SEGMENT", 1000)
    unlike = clustered_keys(3003)
    for keys in (unlike, np.ones((3003, 8), np.float16), unlike[:1].repeat(3003, 0)):
        own = cells.build(keys)
        cells.check(own, 3003)
        assert (np.sort(own.ids[own.ids >= 0]) == np.arange(3003)).all()


def test_joined_cells_are_those_of_either_part() -> None:
    keys = clustered_keys(3003)
    parts = [cells.build(keys[:2000]), cells.build(keys[2000:])]
    whole = cells.joined(*parts)
    cells.check(whole, 3003)
    for name in ("counts", "means", "variances", "codes", "scales"):
        both = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(getattr(whole, name), both, strict=True)
    later = whole.ids[len(parts[0].ids) :]
    np.testing.assert_array_equal(np.where(later < 0, -1, later - 2000), parts[1].ids)


def test_keys_that_are_alike_share_cells_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two places, each with its keys in every segment of the text: no cell has keys of both."""
    monkeypatch.setattr(cells, "SEGMENT", 1024)
    place = np.arange(4096) % 2
    far = np.where(place[:, None] == 1, 50, -50) + np.random.default_rng(0).standard_normal((4096, 16))
    own = cells.build(far.astype(np.float16))
    of = np.repeat(np.arange(len(own.counts)), np.diff(own.starts) * dot4.BLOCK)
    spans = []
    for c in range(len(own.counts)):
        ids = own.ids[(of == c) & (own.ids >= 0)]
        assert len(set(place[ids].tolist())) == 1
        spans.append(np.ptp(ids))
    assert np.median(spans) > 3000, "a cell's keys are of the whole text"
    for c, mean in enumerate(own.means):
        ids = own.ids[(of == c) & (own.ids >= 0)]
        np.testing.assert_allclose(mean, far[ids].mean(0), atol=0.1)


def test_a_key_that_is_not_finite_is_refused_in_any_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "SEGMENT", 1000)
    for at in (0, 1500, 3002):
        keys = clustered_keys(3003)
        keys[at, 3] = np.nan
        with pytest.raises(InvalidIndexInput, match="NaN"):
            cells.build(keys)


@pytest.mark.parametrize("at", [1, 1500, 3002])
def test_cells_are_checked_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(cells, "SEGMENT", 1000)
    monkeypatch.setattr(cells, "_CHECKED", 2)
    own = cells.build(clustered_keys(3003))
    cells.check(own, 3003)
    ids, scales, means = own.ids.copy(), own.scales.copy(), own.means.copy()
    place = np.flatnonzero(ids >= 0)[at]
    for wrong, said in ((-1, "as many keys"), (3003, "that there are not"), (ids[place - 1], "twice")):
        ids[place] = wrong
        with pytest.raises(RuntimeError, match=said):
            cells.check(own._replace(ids=ids), 3003)
    scales[place] = np.nan
    means[-1] = np.inf
    for changed in ({"scales": scales}, {"means": means}):
        with pytest.raises(RuntimeError, match="not finite"):
            cells.check(own._replace(**changed), 3003)


def test_heads_that_scan_and_heads_that_prune_are_searched_together() -> None:
    pruned, scanned = built(), built(target_recall=1.0)
    assert scanned.recall is not None
    scanned.recall = dataclasses.replace(scanned.recall, value=1000.0)
    queries = np.stack([foreign_queries(5, seed) for seed in range(3)])
    hits = ClusteredIndex.search_heads([pruned, scanned, pruned], queries, 16)
    for head, own, ids in zip([pruned, scanned, pruned], queries, hits.ids, strict=True):
        np.testing.assert_array_equal(ids, head.search(own, 16).ids)


def test_large_cells_and_equal_keys_fill_no_more_than_there_is_room_for() -> None:
    keys = np.repeat(clustered_keys(3), 5000, axis=0)
    index = get("clusters").build(keys, foreign_queries(64), k=16)
    queries = foreign_queries(5)
    hits = index.search(queries, 100)
    assert_well_formed(hits, 5, 100, 15_000)
    np.testing.assert_allclose(hits.scores[:, 0], exact_scores(queries, keys).max(1), rtol=1e-4)


def test_a_dimension_that_is_no_multiple_of_eight() -> None:
    rng = np.random.default_rng(0)
    keys, queries = rng.standard_normal((6000, 20)).astype(np.float32), rng.standard_normal((7, 20))
    queries = queries.astype(np.float32)
    hits = get("clusters").build(keys, k=16).search(queries, 16)
    assert_truthful(hits, queries, keys)
    assert recall_of(hits, queries, keys, 16) > 0.9


def test_another_file_in_its_place_is_refused(tmp_path: Any) -> None:
    index = built(3000)
    (tmp_path / "short").write_bytes(b"x" * 50)
    (tmp_path / "other").write_bytes(bytes(4096))
    for name in ("short", "other"):
        with pytest.raises(RuntimeError, match="no file of cells"):
            index._read_native(str(tmp_path / name))


@pytest.mark.parametrize("made", ["normal", "repeated", "outlier"])
def test_recall_holds_where_no_threshold_can_be_predicted(made: str) -> None:
    rng = np.random.default_rng(7)
    keys = unpredictable(rng.standard_normal((20_000, DIM)).astype(np.float32), made)
    queries = rng.standard_normal((256, DIM)).astype(np.float32)
    index = get("clusters").build(keys, queries, k=64, target_recall=0.95)
    assert isinstance(index, ClusteredIndex)
    others = rng.standard_normal((24, DIM)).astype(np.float32)
    for k in (16, 64, 512, 2000):
        assert recall_of(index.search(others, k), others, keys, k) > 0.93


def test_a_threshold_that_found_too_few_is_corrected_by_what_it_found() -> None:
    """Few keys are scored, although scores vary far less than channels do, which move against each other."""
    rng = np.random.default_rng(3)
    against = rng.standard_normal((25_600, 1)) * np.resize([1.0, -1.0], DIM)
    keys = rng.standard_normal((100, DIM)).repeat(256, axis=0) + 2 * against
    keys += 0.3 * rng.standard_normal(keys.shape)
    index = get("clusters").build(keys.astype(np.float32), k=64)
    assert isinstance(index, ClusteredIndex)
    queries = (1 + 0.3 * rng.standard_normal((1, 32, DIM))).astype(np.float32)
    heads = ClusteredIndex.at_once([index], 8, 64) or pytest.fail("the index does not prune")
    found = search.Best(
        np.full((1, 1, 32, 64), -1, np.int64),
        np.zeros((1, 1, 32, 64), np.float32),
        np.zeros((1, 1, 32), np.int64),
    )
    search.search_layer(cells_of_threads(), heads, queries, 64, 8, search.UNPREDICTED, found)
    wanted = search.candidates_for(64)
    assert (found.seen >= wanted).all()
    assert (found.seen < 4 * wanted).all()


def with_sinks(n: int, places: list[int]) -> tuple[Any, Any]:
    """Keys around distant means, with short ones at some places, which half of the queries want most."""
    rng = np.random.default_rng(5)
    center = np.full(DIM, 24 / DIM**0.5, np.float32)
    topics = center + 2 * rng.standard_normal((24, DIM))
    keys = (topics[rng.integers(24, size=n)] + 0.5 * rng.standard_normal((n, DIM))).astype(np.float32)
    keys[places] = 0.1 * rng.standard_normal((len(places), DIM))
    queries = rng.standard_normal((512, DIM)).astype(np.float32)
    queries[::4] -= 0.5 * center
    queries[1::4] -= 0.5 * center
    return keys, queries


def alone(index: ClusteredIndex) -> set[int]:
    """The keys that are cells of their own."""
    first = index.cells.ids[index.cells.starts[:-1] * dot4.BLOCK]
    return set(first[index.cells.counts == 1].tolist())


@pytest.mark.parametrize("places", [[0], [0, 1500], [7, 2999, 5000]], ids=str)
def test_attention_sinks_are_found_wherever_they_are(places: list[int]) -> None:
    keys, queries = with_sinks(6000, places)
    index = ClusteredIndex.build(keys, queries[:256], k=16)
    assert set(places) <= alone(index), "each is a cell of its own"
    assert index.recall is not None
    assert index.recall.value < 1000, "pruned"
    others = queries[256:]
    best = exact_scores(others, keys).argmax(axis=1)
    wanted = np.isin(best, places)
    assert wanted.mean() > 0.3, "the sinks are what many queries want most"

    def found(hits: Any) -> Any:
        return (hits.ids == best[:, None]).any(axis=1)[wanted]

    assert found(index.search(others, 16)).all()
    unaware = ClusteredIndex.build(keys, k=16).search_at(others, 16, index.recall.value)
    assert not found(unaware).all(), "an index that knows no queries loses some of them"
    assert index.recall.lost is not None
    assert index.recall.lost < 0.02


def test_few_keys_are_cells_of_their_own() -> None:
    keys, queries = with_sinks(6000, list(range(0, 6000, 50)))
    index = ClusteredIndex.build(keys, queries, k=16)
    assert len(alone(index)) <= 6000 // 256 // 8 + 8 + 1
    assert cells.check(index.cells, len(keys))


def test_a_sink_that_few_queries_want_is_a_cell_of_its_own_before_keys_that_lie_nearer() -> None:
    """Keys of large norms lose more attention, and are found with some more deviations; the sink is not."""
    rng, dim = np.random.default_rng(4), 64
    center = rng.standard_normal(dim)
    center *= 20 / np.linalg.norm(center)
    topics = center + 2 * rng.standard_normal((24, dim))
    keys = topics[rng.integers(24, size=6000)] + 0.5 * rng.standard_normal((6000, dim))
    keys *= np.exp(0.2 * rng.standard_normal((6000, 1)))
    keys[77] = 0.15 * rng.standard_normal(dim)
    queries = 3 * rng.standard_normal((1024, dim))
    few = rng.random(1024) < 0.01
    queries[few] -= (0.15 * dim**0.5 * rng.random((few.sum(), 1)) + 0.3) * center
    index = ClusteredIndex.build(keys.astype(np.float32), queries.astype(np.float32), k=100)
    assert 77 in alone(index)
    assert index.recall is not None
    assert index.recall.value == 3.5, "no more cells are scanned for what lies far from it"


def test_sinks_of_every_segment_are_cells_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "SEGMENT", 2048)
    keys, queries = with_sinks(6000, [7, 2999, 5000])
    index = ClusteredIndex.build(keys, queries, k=16)
    assert {7, 2999, 5000} <= alone(index)


def test_sinks_that_are_appended_are_cells_of_their_own() -> None:
    keys, queries = with_sinks(6000, [7, 5000])
    index = ClusteredIndex.build(keys[:4000], queries, k=16).extended(keys, queries, digest="d")
    assert {7, 5000} <= alone(index)


def test_fewer_keys_than_the_recall_is_measured_on_lose_no_attention_either() -> None:
    """Some topics share a cell of the first part, and have one of their own in the part that is appended: the
    few best keys set a threshold there at which the first part's are skipped.
    """
    rng = np.random.default_rng(1)
    topics = rng.standard_normal((40, 64))
    of = rng.zipf(1.3, 4000) % 40
    keys = (2 * topics[of] + rng.standard_normal((4000, 64))).astype(np.float32)
    queries = 1.2 * topics[of[rng.integers(4000, size=1024)]] + 0.8 * rng.standard_normal((1024, 64))
    stored, others = np.split(queries.astype(np.float32), 2)
    index = ClusteredIndex.build(keys[:1300], stored, k=100).extended(keys, stored, digest="d")
    assert index.recall is not None
    assert index.recall.value < 1000, "pruned"
    exact = FlatIndex.build(keys, digest="d")
    for k in (8, 32, 100):
        assert quality(index.search(others, k), exact.search(others, k), 64**-0.5).lost <= 0.003
