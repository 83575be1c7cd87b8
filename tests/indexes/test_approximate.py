"""The kinds of faiss and hnswlib: the contract, and what tuning promises beyond it."""

from typing import Any

import numpy as np
import pytest

from offload_decode.indexes import get
from offload_decode.indexes.approximate import ApproximateIndex, geometric, quality, sampled, tune
from offload_decode.indexes.base import Hits
from offload_decode.indexes.flat import FlatIndex
from offload_decode.testing.index_contract import (
    IndexContract,
    assert_well_formed,
    clustered_keys,
    foreign_queries,
    near_queries,
    recall_of,
)

KINDS = ["faiss-ivf", "faiss-hnsw", "hnswlib"]


class TestFaissIVF(IndexContract):
    kind = "faiss-ivf"


class TestFaissHNSW(IndexContract):
    kind = "faiss-hnsw"


class TestHnswlib(IndexContract):
    kind = "hnswlib"


def build(kind: str, keys: Any, **options: Any) -> ApproximateIndex:
    index = get(kind).build(keys, near_queries(256, seed=3), **options)
    assert isinstance(index, ApproximateIndex)
    return index


def without_scan(index: ApproximateIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Hits:
        raise AssertionError("the exact scan was asked")

    monkeypatch.setattr(index.flat, "search", fail)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameter_grows_with_k(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = build(kind, clustered_keys(4000), k=10)
    assert index.recall is not None
    asked: list[int] = []
    search_at = index.search_at

    def record(queries: Any, k: int, value: int) -> Hits:
        asked.append(value)
        return search_at(queries, k, value)

    monkeypatch.setattr(index, "search_at", record)
    for k in (1, 10, 15, 40):
        index.search(near_queries(2), k)
    value = index.recall.value
    assert asked == [value, value, -(-value * 3 // 2), value * 4]


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_the_ladder_is_the_exact_scan(kind: str) -> None:
    keys, queries = clustered_keys(2000), foreign_queries(30)
    index, exact = build(kind, keys), FlatIndex.build(keys)
    ladder = index.ladder(16)
    assert list(ladder) == sorted(set(ladder))
    hits = index.search_at(queries, 16, ladder[-1])
    np.testing.assert_array_equal(hits.ids, exact.search(queries, 16).ids)


@pytest.mark.parametrize("kind", KINDS)
def test_places_that_the_library_leaves_empty_are_filled_exactly(kind: str) -> None:
    class Lazy(get(kind)):  # type: ignore[misc]
        """Finds nothing for every second query."""

        def _search_native(self, queries: Any, k: int, value: int) -> Hits:
            hits = super()._search_native(queries, k, value)
            hits.ids[::2, -1], hits.scores[::2, -1] = -1, -np.inf
            return Hits(hits.ids, hits.scores)

    keys, queries = clustered_keys(4000), near_queries(6, seed=9)
    index = Lazy.build(keys, near_queries(64, seed=3), k=8, target_recall=0.5)
    assert index.recall.value < index.scan_from
    hits = index.search(queries, 8)
    assert_well_formed(hits, 6, 8, 4000)
    np.testing.assert_array_equal(hits.ids[::2], FlatIndex.build(keys).search(queries[::2], 8).ids)


def test_places_left_empty_count_as_missed_when_tuning() -> None:
    index = build("faiss-ivf", clustered_keys(4000), k=200)
    assert index.recall is not None
    assert index.recall.value >= 4  # a list holds about 40 keys, so one list cannot answer k = 200
    hits = index.search_at(near_queries(3), 1000, 1)
    assert (hits.ids[:, -1] == -1).all()
    assert ((hits.ids < 0) == (hits.scores == -np.inf)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_counted(kind: str) -> None:
    half, single = build(kind, clustered_keys(2000)), build(kind, clustered_keys(2000, np.float32))
    assert half.nbytes > half.keys.nbytes  # the libraries keep copies of the keys
    assert single.nbytes > single.keys.nbytes


class Stepwise:
    """Finds the first `value` tenths of the true hits."""

    parameter = "tenths"
    scan_from = 10

    def __init__(self, flat: FlatIndex) -> None:
        self.flat = flat
        self.seen: list[tuple[int, bytes]] = []

    def ladder(self, k: int) -> list[int]:
        return [*geometric(1, 10), 10]

    def search_at(self, queries: Any, k: int, value: int) -> Hits:
        self.seen.append((value, queries.tobytes()))
        hits = self.flat.search(queries, k)
        found = k * value // 10
        hits.ids[:, found:], hits.scores[:, found:] = -1, -np.inf
        return hits


@pytest.mark.parametrize(
    ("target", "value"), [(0.1, 1), (0.55, 6), (0.6, 6), (0.61, 9), (0.95, 10), (1.0, 10)]
)
def test_tuning_takes_the_first_step_that_reaches_the_target(target: float, value: int) -> None:
    exact = FlatIndex.build(clustered_keys(41))
    record = tune(Stepwise(exact), sampled(exact, None), 20, target)
    assert record is not None
    assert (record.value, record.k, record.queries, record.parameter) == (value, 20, 20, "tenths")
    assert record.measured == pytest.approx(value / 10)
    attention = record.mass, record.low, record.lost, record.best
    assert attention == (None, None, None, None), "keys attend to nothing"


def test_tuning_goes_on_until_one_query_at_most_loses_attention() -> None:
    exact, queries = FlatIndex.build(clustered_keys(500)), foreign_queries(41)
    record = tune(Stepwise(exact), sampled(exact, queries), 20, 0.1)
    weights = np.exp(exact.search(queries, 20).scores / 32**0.5)
    shares = weights.cumsum(axis=1)[:, 1::2] / weights.sum(axis=1, keepdims=True)  # of each tenth of the hits
    steps = [value for value in Stepwise(exact).ladder(20) if (shares[0::2, value - 1] < 0.9).sum() <= 1]
    assert record is not None
    assert record.value == steps[0] > 1
    assert record.mass == pytest.approx(shares[1::2, record.value - 1].mean())
    assert record.lost == pytest.approx((shares[1::2, record.value - 1] < 0.9).mean())
    assert record.best == 1
    assert record.low == pytest.approx(np.percentile(shares[1::2, record.value - 1], 1))


def test_tuning_goes_on_while_fewer_keys_lose_attention() -> None:
    class Hasty(Stepwise):
        """Misses the best key when asked for fewer than 10, below a value of 6."""

        def search_at(self, queries: Any, k: int, value: int) -> Hits:
            hits = super().search_at(queries, k, 10)
            if k < 10 and value < 6:
                hits.ids[:, 0], hits.scores[:, 0] = -1, -np.inf
            return hits

    exact = FlatIndex.build(clustered_keys(500))
    for fewer, value in (((), 1), ((10, 20, 40), 1), ((10, 5), 6)):  # more than 20 are none of the fewer
        record = tune(Hasty(exact), sampled(exact, foreign_queries(41)), 20, 0.1, fewer)
        assert record is not None
        assert record.value == value
    keys_alone = tune(Hasty(exact), sampled(exact, None), 20, 0.1, (5,))
    assert keys_alone is not None
    assert keys_alone.value == 1, "keys attend to nothing"


def test_attention_alone_takes_no_full_scan() -> None:
    class Losing(Stepwise):
        """Misses the best key, unless it reads every key."""

        def search_at(self, queries: Any, k: int, value: int) -> Hits:
            hits = super().search_at(queries, k, value)
            if value < self.scan_from:
                hits.ids[:, 0], hits.scores[:, 0] = -1, -np.inf
            return hits

    exact = FlatIndex.build(clustered_keys(500))
    record = tune(Losing(exact), sampled(exact, foreign_queries(41)), 20, 0.5)
    assert record is not None
    assert (record.value, record.best, record.full_scan) == (6, 0, False)
    assert record.lost is not None
    assert record.lost > 0.5


def test_recall_is_reported_on_queries_that_did_not_choose() -> None:
    exact = FlatIndex.build(clustered_keys(500))
    stepwise = Stepwise(exact)
    tune(stepwise, sampled(exact, foreign_queries(64)), 20, 0.9)
    chose = {queries for _, queries in stepwise.seen[:-1]}
    assert len(chose) == 1
    assert stepwise.seen[-1][1] not in chose
    rows = np.frombuffer(stepwise.seen[-1][1], np.float32).reshape(-1, 32)
    others = np.frombuffer(chose.pop(), np.float32).reshape(-1, 32)
    assert not (rows[:, None] == others[None]).all(axis=2).any()


def test_recall_counts_ties_and_ignores_padding() -> None:
    truth = Hits(np.array([[4, 7, 1]]), np.array([[3, 2, 2]], np.float32))
    tied = Hits(np.array([[4, 9, 7]]), np.array([[3, 2, 2]], np.float32))
    short = Hits(np.array([[4, 5, -1]]), np.array([[3, 1, -np.inf]], np.float32))
    assert quality(tied, truth, 1.0) == (1, 1, 0, 1, 1)
    mass = (1 + np.exp(-2)) / (1 + 2 * np.exp(-1))
    assert quality(short, truth, 1.0) == pytest.approx((1 / 3, mass, 1, 1, mass))
    without_best = Hits(np.array([[7, 1, -1]]), np.array([[2, 2, -np.inf]], np.float32))
    assert quality(without_best, truth, 1.0).best == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_extended_native_index_finds_as_much_as_a_new_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same parameter, without the exact scan's help."""
    keys, queries = clustered_keys(6000), near_queries(128, seed=9)
    new, grown = build(kind, keys), build(kind, keys[:3000])
    for end in (4500, 6000):
        grown = grown.extended(keys[:end], near_queries(256, seed=3), digest=f"first {end}")
    found = []
    for index in (new, grown):
        without_scan(index, monkeypatch)
        found.append(recall_of(index._search_native(queries, 10, 16), queries, keys, 10))
    assert found[1] >= found[0] - 0.05, found


def test_lists_are_formed_anew_of_four_times_the_keys() -> None:
    keys = clustered_keys(9000)
    index = build("faiss-ivf", keys[:2000])
    lists = index.nlist  # type: ignore[attr-defined]
    few = index.extended(keys[:4000], digest="few")
    assert few.nlist == lists  # type: ignore[attr-defined]
    assert few.extended(keys, digest="many").nlist > 2 * lists  # type: ignore[attr-defined]
