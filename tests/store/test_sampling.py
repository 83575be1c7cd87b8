from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offload_decode.store.layout import sample_plan


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
