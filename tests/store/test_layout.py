import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_decode.store.layout import ALIGNMENT, ArraySpec, array_specs, chunk_rows, sample_plan
from offload_decode.store.pages import fold_pages
from offload_decode.store.streams import RowStream, allocate
from offload_decode.types import LayerKind, ModelShape
from tests.store.jobs import make_job


@given(st.integers(1, 10**8), st.integers(1, 1024).map(lambda n: 2 * n), st.integers(1, 32))
def test_chunks_cover_the_rows_and_can_be_mapped(rows: int, row_bytes: int, most: int) -> None:
    size = chunk_rows(rows, row_bytes, target=65_536, most=most)
    chunks = math.ceil(rows / size)
    assert chunks <= most
    if chunks == 1:
        assert size == rows, "a single chunk has no padding"
    else:
        assert size * row_bytes % ALIGNMENT == 0
        assert chunks * size - rows < chunks * ALIGNMENT, "padding is less than the alignment a chunk"
        assert size <= max(65_536, math.ceil(rows / most)) + ALIGNMENT


MODELS = {
    "70B": (80, 64, 8, 128),
    "405B": (126, 128, 8, 128),
    "many KV heads": (96, 64, 64, 128),
    "8B": (32, 32, 8, 128),
    "odd head_dim": (40, 32, 8, 80),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_tokens", [1_000, 1_000_000, 10_000_000, 100_000_000])
def test_a_whole_store_stays_under_the_limit_of_memory_maps(
    name: str, n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real chunk size
    layers, heads, kv_heads, dim = MODELS[name]
    shape = ModelShape.uniform((LayerKind.FULL,) * layers, heads, kv_heads, dim)
    manifest = replace(make_job(10).manifest, shape=shape, n_tokens=n_tokens, query_samples=1024)
    maps = sum(
        math.prod(math.ceil(size / step) for size, step in zip(spec.shape, spec.chunk, strict=True))
        for spec in array_specs(manifest, n_documents=1, name_bytes=10)
    )
    assert maps < 65_530 - 2_000


def test_ten_million_tokens_do_not_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    manifest = replace(make_job(10).manifest, n_tokens=10_000_000, page_size=16)
    spec = next(s for s in array_specs(manifest, 1, 10) if s.name == "layers/000/keys")
    one_head = replace(spec, shape=(1, *spec.shape[1:]))
    assert len(one_head.head_files(0)) == 32
    allocate(tmp_path, one_head)  # sparse files
    stream = RowStream(tmp_path, one_head, set())
    stream.rows = 9_999_990
    block = np.arange(640, dtype=np.float16).reshape(1, 10, 64)
    stream.write(block)
    stream.advance(block)
    view = stream.view(0)
    assert view.shape == (10_000_000, 64)
    np.testing.assert_array_equal(view[-10:], block[0])
    assert not view[-11].any()
    assert not view[np.arange(0, 9_999_990, 500_000)].any()


def test_files_are_head_by_head_in_the_order_of_the_rows() -> None:
    spec = ArraySpec("layers/000/keys", (2, 1000, 64), (1, 512, 64), "float16")
    assert list(spec.files()) == spec.head_files(0) + spec.head_files(1)
    assert spec.head_files(1) == ["layers/000/keys/c.1.0.0", "layers/000/keys/c.1.1.0"]


def pairs(n_tokens: int, group: int, n: int) -> set[tuple[int, int]]:
    positions, heads = sample_plan(n_tokens, group, n)
    return set(zip(positions.tolist(), heads.tolist(), strict=True))


@given(st.integers(1, 5000), st.integers(1, 16), st.integers(1, 3000))
def test_samples_are_distinct_ordered_and_spread(n_tokens: int, group: int, n: int) -> None:
    positions, heads = sample_plan(n_tokens, group, n)
    count = min(n, n_tokens * group)
    assert positions.shape == heads.shape == (count,)
    assert positions.dtype == heads.dtype == np.int64
    assert len(pairs(n_tokens, group, n)) == count
    assert (np.diff(positions * group + heads) > 0).all()
    assert 0 <= positions.min() <= positions.max() < n_tokens
    assert 0 <= heads.min() <= heads.max() < group
    # Spread: the beginning of the corpus has its share of the samples, and each head has its own.
    cuts = np.searchsorted(positions, np.arange(0, n_tokens + 1))
    assert np.abs(cuts - np.arange(0, n_tokens + 1) * count / n_tokens).max() <= 5
    assert np.abs(np.bincount(heads, minlength=group) - count / group).max() <= 12


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 8), st.integers(1, 3000))
def test_a_longer_corpus_asks_for_nothing_new_of_its_beginning(
    n_tokens: int, more: int, group: int, n: int
) -> None:
    longer = {pair for pair in pairs(n_tokens + more, group, n) if pair[0] < n_tokens}
    assert longer <= pairs(n_tokens, group, n)


def test_as_many_as_there_are() -> None:
    positions, heads = sample_plan(3, 2, 100)
    assert positions.tolist() == [0, 0, 1, 1, 2, 2]
    assert heads.tolist() == [0, 1, 0, 1, 0, 1]


def test_a_power_of_two_is_a_plain_stride() -> None:
    assert sample_plan(64, 1, 4)[0].tolist() == [15, 31, 47, 63]


def test_no_overflow_at_a_billion_tokens() -> None:
    positions, _ = sample_plan(10**9, 8, 4096)
    assert (np.diff(positions) > 0).all()
    assert positions[-1] < 10**9


# Bounds of pages

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]


def bounds(keys: np.ndarray, cuts: list[int], page: int) -> tuple[np.ndarray, np.ndarray]:
    total, state, lower, upper = keys.shape[1], None, [], []
    for start, stop in pairwise([0, *sorted(cuts), total]):
        low, high, state = fold_pages(state, start, keys[:, start:stop], page, total)
        lower.append(low)
        upper.append(high)
    assert state is None, "the last page is closed"
    return np.concatenate(lower, axis=1), np.concatenate(upper, axis=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.data())
def test_bounds_are_the_minimum_and_maximum_of_each_page(dtype: np.dtype, data: st.DataObject) -> None:
    total, page = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 17))
    cuts = data.draw(st.lists(st.integers(0, total), max_size=6))
    rng = np.random.default_rng(total)
    keys = (rng.standard_normal((2, total, 3)) * 10.0 ** rng.integers(-6, 4)).astype(dtype)
    lower, upper = bounds(keys, cuts, page)
    assert lower.dtype == upper.dtype == dtype
    pages = [keys[:, start : start + page].astype(np.float32) for start in range(0, total, page)]
    np.testing.assert_array_equal(lower.astype(np.float32), np.stack([p.min(axis=1) for p in pages], axis=1))
    np.testing.assert_array_equal(upper.astype(np.float32), np.stack([p.max(axis=1) for p in pages], axis=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_signed_zeros_and_infinities_do_not_depend_on_the_cuts(dtype: np.dtype) -> None:
    keys = np.array([0.0, -0.0, 0.0, -0.0, np.inf, -np.inf, 0.0, -0.0], dtype).reshape(1, 8, 1)
    whole = bounds(keys, [], 4)
    for cut in range(9):
        for part, expected in zip(bounds(keys, [cut], 4), whole, strict=True):
            assert part.tobytes() == expected.tobytes()
    assert np.isinf(whole[0].astype(np.float32)).ravel().tolist() == [False, True]
