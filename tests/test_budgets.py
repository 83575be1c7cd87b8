"""Budgets: what each spelling means, and that a schedule only moves tokens between layers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_decode.budgets import Budget
from offload_decode.errors import ConfigError


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget("64"), [64, 64, 64]),
        (Budget("0"), [0, 0, 0]),
        (Budget("2%"), [20, 20, 20]),
        (Budget("0.15%"), [2, 2, 2]),
        (Budget("100%"), [1000, 1000, 1000]),
        (Budget("5000"), [1000, 1000, 1000]),  # never more than there is
        (Budget("1, 50%, 7"), [1, 500, 7]),
        (Budget("60", schedule="linear"), [30, 60, 90]),
        (Budget("64", dense_layers="0,5"), [None, 64, None]),
    ],
)
def test_spellings(budget, expected):
    assert list(budget.per_layer(1000, (0, 2, 5)).values()) == expected


@given(st.integers(0, 10**7), st.integers(1, 80))
def test_linear_keeps_the_total_and_grows(k, layers):
    spread = list(Budget(str(k), schedule="linear").per_layer(10**9, range(layers)).values())
    assert sum(spread) == k * layers
    assert all(later - earlier >= -1 for earlier, later in pairwise(spread))
    assert spread[0] == pytest.approx(2 * k / (layers + 1), abs=1)


@pytest.mark.parametrize(
    "budget",
    [
        Budget("many"),
        Budget("-1"),
        Budget("nan%"),
        Budget("inf%"),
        Budget("2.5"),
        Budget("1,2"),
        Budget("1,2,3", schedule="linear"),
        Budget("8", schedule="cosine"),
        Budget("8", dense_layers="1"),  # not a searched layer
        Budget("8", dense_layers="first"),
    ],
)
def test_what_makes_no_sense_is_refused(budget):
    with pytest.raises(ConfigError):
        budget.per_layer(1000, (0, 2, 5))
