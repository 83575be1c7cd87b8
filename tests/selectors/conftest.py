"""Stores that all selectors share: their sizes are ragged against pages of every size."""

import pytest

from tests.contracts.selector_contract import of_widths, stored

STORES = [
    (1, 4, 2),
    (37, 1, 1),
    (50, 40, 5),
    (130, 8, 8),
    (50, 4, 2, "int8"),
    (130, 8, 2, "int4-values"),
]
WIDTHS = [
    (50, 4, 2, 24, 16),
    (50, 4, 2, 6, 16, "int4-values"),
    (50, 128, 1, 36, 36, "auto", True),
    (50, 8, 1, 20, 20, "int8", True),
]


@pytest.fixture(scope="session", params=[*STORES, *WIDTHS], ids=str)
def store(request, tmp_path_factory):
    """A store of (tokens, query heads, KV heads), plain or compressed; then with the widths of keys and of
    values, and whether these are latents.
    """
    if request.param in WIDTHS:
        return of_widths(*request.param)
    return stored(tmp_path_factory.mktemp("store"), *request.param)
