"""Stores that all selectors share: their sizes are ragged against pages of every size."""

import pytest

from tests.contracts.selector_contract import stored

STORES = [
    (1, 4, 2),
    (37, 1, 1),
    (50, 40, 5),
    (130, 8, 8),
    (50, 4, 2, "int8"),
    (130, 8, 2, "int4-values"),
]


@pytest.fixture(scope="session", params=STORES, ids=str)
def store(request, tmp_path_factory):
    """A store of (tokens, query heads, KV heads), plain or compressed."""
    return stored(tmp_path_factory.mktemp("store"), *request.param)
