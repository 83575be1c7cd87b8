"""Arrays of many heads in one compiled call: by their addresses, whatever the number of heads."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _pointer(_: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


at: Any = intrinsic(_pointer)  # `at(address)`: what `numba.carray` makes an array of


class Share(NamedTuple):
    """Every `step`-th task from `first`: what one thread does. A task is `rows` rows of one head."""

    rows: int
    first: int
    step: int
