"""The stores of the contract, for tests that are no part of a suite."""

import pytest

from offload_decode.testing.stores import STORES, WIDTHS, of_parameter


@pytest.fixture(scope="session", params=[*STORES, *WIDTHS], ids=str)
def store(request):
    """A store of every shape."""
    return of_parameter(request.param)
