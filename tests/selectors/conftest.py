"""Stores that all selectors share: their sizes are ragged against pages of every size."""

import pytest

from tests.contracts.selector_contract import stored


@pytest.fixture(scope="session", params=[(1, 4, 2), (37, 1, 1), (50, 40, 5), (130, 8, 8)], ids=str)
def store(request, tmp_path_factory):
    """A store of (tokens, query heads, KV heads)."""
    return stored(tmp_path_factory.mktemp("store"), *request.param)
