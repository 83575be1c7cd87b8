"""Binary heaps of a float32 and an id, in two arrays; the root holds the smallest value."""

from __future__ import annotations

from typing import Any

from numba import njit


@njit(nogil=True, cache=True)
def push(values: Any, ids: Any, count: int, value: Any, own: int) -> None:
    """Adds to a heap of `count`, which has one more then."""
    place = count
    while place > 0:
        above = (place - 1) // 2
        if values[above] <= value:
            break
        values[place], ids[place] = values[above], ids[above]
        place = above
    values[place], ids[place] = value, own


@njit(nogil=True, cache=True)
def replace(values: Any, ids: Any, count: int, value: Any, own: int) -> None:
    """Puts a new pair in the root's stead. To remove the root of a heap of `count`, replace it by the last
    pair, with one fewer as `count`.
    """
    place = 0
    while True:
        least = 2 * place + 1
        if least >= count:
            break
        if least + 1 < count and values[least + 1] < values[least]:
            least += 1
        if value <= values[least]:
            break
        values[place], ids[place] = values[least], ids[least]
        place = least
    values[place], ids[place] = value, own
