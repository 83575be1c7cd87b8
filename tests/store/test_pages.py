from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_decode.store.pages import fold_pages

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
