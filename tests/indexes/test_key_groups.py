"""Clusters of keys: every key in one cluster, near its own kind, and sums that are those of the members."""

import ml_dtypes
import numpy as np
import pytest

from offload_decode.common.errors import InvalidIndexInput
from offload_decode.common.rows import arrays as index_keys
from offload_decode.indexes.clusters import kmeans as clusters
from offload_decode.indexes.clusters.kmeans import build


def some_keys(count, dim=8, dtype=np.float32):
    return np.random.default_rng(1).standard_normal((count, dim)).astype(dtype)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 200])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_clusters_part_the_keys_and_hold_their_sums(monkeypatch, count, dtype):
    monkeypatch.setattr(clusters, "SEGMENT", 64)  # ragged segments
    keys = some_keys(count, dtype=dtype)
    built = build(keys, 4)
    assert built.sizes.sum() == count
    assert sorted(built.members.tolist()) == list(range(count))
    ends = np.cumsum(built.sizes)
    for cluster, (size, end) in enumerate(zip(built.sizes, ends, strict=True)):
        members = built.members[end - size : end]
        assert (built.labels[members] == cluster).all()
        expected = keys[members].astype(np.float32).sum(axis=0)
        np.testing.assert_allclose(built.sums[cluster], expected, atol=1e-5)


def test_the_sums_of_other_rows_follow_the_keys_clusters(monkeypatch):
    monkeypatch.setattr(index_keys, "_BLOCK_BYTES", 90)  # seven rows at a time
    keys, values = some_keys(100), some_keys(100, dim=3, dtype=np.float16)
    built = build(keys, 10)
    for cluster, total in enumerate(built.sum_of(values)):
        expected = values[built.labels == cluster].astype(np.float32).sum(axis=0)
        np.testing.assert_allclose(total, expected, atol=1e-5)


def test_keys_of_one_kind_share_clusters():
    """Ten distant kinds, interleaved: no cluster mixes two of them."""
    kinds = np.arange(400) * 7 % 10
    keys = np.eye(10, dtype=np.float32)[kinds] * 5 + 0.1 * some_keys(400, dim=10)
    built = build(keys, 10)
    for cluster in range(len(built.sizes)):
        assert len(set(kinds[built.labels == cluster])) <= 1


def test_clusters_are_near_by_distance_whatever_the_norms():
    keys = np.zeros((64, 4), np.float32)
    keys[:, 0] = np.arange(64) % 4 + 1  # one direction, four lengths
    built = build(keys, 8)
    for cluster in range(len(built.sizes)):
        assert len(set(keys[built.labels == cluster, 0])) <= 1


def test_clusters_do_not_reach_over_segments(monkeypatch):
    monkeypatch.setattr(clusters, "SEGMENT", 32)
    built = build(np.zeros((96, 4), np.float32), 8)
    first, second, third = (set(built.labels[start : start + 32]) for start in (0, 32, 64))
    assert not first & second
    assert not second & third


def test_at_size_one_every_key_is_its_own_cluster():
    keys = np.repeat(some_keys(50), 2, axis=0)  # equal keys, too
    assert build(keys, 1).sizes.tolist() == [1] * 100


@pytest.mark.parametrize(
    ("keys", "size"),
    [(some_keys(4), 0), (np.full((4, 2), np.nan, np.float32), 2), (some_keys(4).astype(np.float64), 2)],
)
def test_what_cannot_be_clustered_is_refused(keys, size):
    with pytest.raises(InvalidIndexInput):
        build(keys, size)
