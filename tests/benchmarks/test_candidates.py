"""The candidates compute what they are defined to compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.candidates import interleaved_dots, previous_query, query_graph, scans
from benchmarks.candidates.page_tree import PageTree, compact_order

Float32 = np.typing.NDArray[np.float32]


def drawn(seed: int, *shape: int) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def best(keys: Float32, queries: Float32, k: int) -> np.typing.NDArray[np.int64]:
    """Exact ids, sorted, by float64 scores."""
    scores = queries.astype(np.float64) @ keys.astype(np.float64).T
    return np.sort(np.argsort(-scores, axis=1)[:, :k], axis=1)


@pytest.mark.parametrize("bits", [8, 4])
def test_interleaved_kernels_agree_with_the_codes(bits: int) -> None:
    generator = np.random.default_rng(bits)
    steps, dim = 2 ** (bits - 1), 24
    codes = generator.integers(1 - steps, steps, (32, dim))
    scales = generator.random(32).astype(np.float32)
    queries = generator.integers(-127, 128, (4, dim)).astype(np.int8)
    stored = (codes + steps).astype(np.uint8)
    if bits == 4:
        pairs = stored.reshape(32, dim // 8, 2, 4)
        stored = (pairs[:, :, 0] | (pairs[:, :, 1] << np.uint8(4))).reshape(32, -1)
    blocks = np.ascontiguousarray(stored.reshape(2, 16, -1, 4).transpose(0, 2, 1, 3))
    expected = (queries.astype(np.int64) @ codes.T).astype(np.float32) * scales
    floor = np.sort(expected, axis=1)[:, 20].copy()

    ids, scores = np.empty((4, 32), np.int32), np.empty((4, 32), np.float32)
    found = np.zeros(4, np.int64)
    interleaved_dots.collect(blocks, scales.reshape(2, 16), 32, queries, bits, floor, ids, scores, found)
    for g in range(4):
        np.testing.assert_array_equal(ids[g, : found[g]], np.flatnonzero(expected[g] > floor[g]))
        np.testing.assert_array_equal(scores[g, : found[g]], expected[g, ids[g, : found[g]]])

    offsets = (-steps * queries.astype(np.int32).sum(axis=1)).astype(np.int32)
    block = np.empty((4, 16), np.float32)
    parts = (0,) * (8 // bits)
    interleaved_dots.score_block_plainly(
        blocks, scales.reshape(2, 16), queries, offsets, floor, block, 1, parts
    )
    np.testing.assert_array_equal(block, expected[:, 16:])


@pytest.mark.parametrize(
    "make", [lambda keys: scans.IntegerScan(keys, 8), lambda keys: scans.IntegerScan(keys, 4)]
)
@pytest.mark.parametrize("length", [100, 5000])
def test_a_scan_with_everything_scored_again_is_exact(make: object, length: int) -> None:
    keys, queries = drawn(1, length, 64), drawn(2, 6, 64)
    ids = scans.search(make(keys), keys, queries, 10, length / 10)  # type: ignore[operator]
    np.testing.assert_array_equal(np.sort(ids, axis=1), best(keys, queries, 10))


def test_faiss_scans_with_everything_scored_again_are_exact() -> None:
    pytest.importorskip("faiss")
    keys, queries = drawn(3, 600, 32), drawn(4, 4, 32)
    for scan in (scans.PqScan(keys, 16), scans.RabitqScan(keys)):
        ids = scans.search(scan, keys, queries, 10, 60)
        np.testing.assert_array_equal(np.sort(ids, axis=1), best(keys, queries, 10))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 64, 700])
@pytest.mark.parametrize("high", ["anywhere", "sampled", "not sampled"])
def test_an_integer_scan_returns_its_best_estimates(bits: int, count: int, high: str) -> None:
    """Also where high scores lie in the blocks that the floor is guessed from, or in all others."""
    keys, queries = drawn(5, 16_384, 64), drawn(6, 3, 64)
    if high != "anywhere":
        sampled = np.arange(len(keys)) // 16 % 8 == 0
        keys[sampled if high == "sampled" else ~sampled] += queries[0]
    steps = 2 ** (bits - 1) - 1
    scale, unit = (np.abs(rows).max(axis=1, keepdims=True) for rows in (keys, queries))
    estimates = np.rint(queries / (unit / 127)) @ (np.rint(keys / (scale / steps)) * (scale / steps)).T
    ids = scans.IntegerScan(keys, bits).candidates(queries, count)
    for row, estimate in zip(ids, estimates, strict=True):
        assert len(set(row)) == count
        missed = np.delete(estimate, row)
        assert estimate[row].min() >= missed.max() - 1e-3 * np.abs(estimate).max()


def test_projected_links_are_those_of_the_definition() -> None:
    keys = drawn(7, 40, 8)
    lists = query_graph.nearest(keys, drawn(8, 6, 8), 7)
    links, appearances = query_graph.project(keys, lists, 4)
    np.testing.assert_array_equal(appearances, np.bincount(lists.ravel(), minlength=40))
    distance = ((keys[:, None].astype(np.float64) - keys[None]) ** 2).sum(-1)
    for key in range(40):
        sharing = {int(other) for row in lists if key in row for other in row} - {key}
        nearest = sorted(sharing, key=lambda other: distance[key, other])
        chosen: list[int] = []
        for candidate in nearest:
            if all(distance[candidate, other] >= distance[key, candidate] for other in chosen):
                chosen.append(candidate)
        chosen = (chosen + [other for other in nearest if other not in chosen])[:4]
        assert [link for link in links[key] if link >= 0] == chosen


def test_query_lists_hold_the_exact_neighbours_in_order() -> None:
    keys, queries = drawn(9, 300, 16), drawn(10, 70, 16)
    scores = queries @ keys.T
    np.testing.assert_array_equal(query_graph.nearest(keys, queries, 5), np.argsort(-scores)[:, :5])


def test_a_graph_reaches_nearly_every_key_and_a_wide_beam_finds_the_best() -> None:
    keys, queries = drawn(11, 800, 16), drawn(12, 40, 16)
    graph = query_graph.QueryGraph(keys, queries[:20], degree=16, neighbours=20, beam=48)
    assert graph.covered < 800
    ids, met = graph.search(queries[20:], 10, 800)
    hits = [np.isin(row, own).mean() for row, own in zip(ids, best(keys, queries[20:], 10), strict=True)]
    assert np.mean(hits) >= 0.98
    assert met >= 0.98 * 800  # a link that a nearer key displaced can have been the only one
    narrow, met = graph.search(queries[20:], 10, 10)
    assert met < 800
    assert all(len(set(row)) == 10 for row in narrow)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 256, 257, 1000, 5000])
@pytest.mark.parametrize("clustered", [False, True])
def test_a_page_tree_returns_the_exact_best(length: int, clustered: bool) -> None:
    keys, queries = drawn(length, length, 24), drawn(13, 5, 24)
    if clustered:
        keys = 0.05 * keys + drawn(14, 1 + length // 100, 24)[np.arange(length) // 100]
    for order in (None, compact_order(keys)):
        tree = PageTree(keys, order)
        for k in {1, min(10, length), length}:
            ids, visited = tree.search(queries, k)
            np.testing.assert_array_equal(np.sort(ids, axis=1), best(keys, queries, k))
            assert k <= visited.keys <= length
            assert visited.nodes <= tree.nodes
    if clustered and length == 5000:
        _, visited = PageTree(keys).search(queries, 10)
        assert visited.keys < length / 4  # it prunes where pages are compact


def test_a_compact_order_is_a_permutation_in_smaller_pages() -> None:
    keys = drawn(15, 1003, 4)
    order = compact_order(keys)
    np.testing.assert_array_equal(np.sort(order), np.arange(1003))

    def extent(rows: Float32) -> float:
        return float(np.mean([np.ptp(rows[at : at + 16], axis=0).sum() for at in range(0, 992, 16)]))

    assert extent(keys[order]) < 0.7 * extent(keys)


def test_what_a_step_takes_over_is_what_the_step_before_found() -> None:
    keys = torch.from_numpy(drawn(16, 50, 8))
    rows = torch.from_numpy(drawn(17, 3, 2, 8))
    rows[1] = 2 * rows[0]  # the same direction, and other keys than those of the last
    logits = rows @ keys.T
    cosine, recall, mass = previous_query.taken_over(rows, logits, 5)
    assert cosine[0] == pytest.approx(1)
    assert (recall[0], mass[0]) == (1, 1)
    for g in range(2):
        before, own = (set(logits[step, g].topk(5).indices.tolist()) for step in (1, 2))
        weights = logits[2, g].double().exp()
        masses = [float(weights[list(ids)].sum()) for ids in (before, own)]
        assert len(before & own) < 5
        recall[1] -= len(before & own) / 5 / 2
        mass[1] -= masses[0] / masses[1] / 2
    torch.testing.assert_close(torch.stack([recall[1], mass[1]]), torch.zeros(2), atol=1e-6, rtol=0)
    assert cosine[1] == pytest.approx(torch.cosine_similarity(rows[2], rows[1], dim=-1).mean().item())


def test_a_head_below_the_bar_is_searched() -> None:
    layers = {0: torch.tensor([[[0.95], [0.4]], [[0.5], [0.25]], [[0.8], [0.2]]])}
    shown = [line.replace(" ", "").split("|")[1:-1] for line in previous_query.show(layers).splitlines()]
    assert ["0.9", "50.0%", "75.0%", "90.0%"] in shown
    assert ["-1", "0.0%", "37.5%", "50.0%"] in shown
