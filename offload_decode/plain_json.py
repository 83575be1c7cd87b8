"""JSON from outside, read strictly: no NaN, no names twice, no nesting without end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

DEPTH = 100


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises `ValueError` (`json.JSONDecodeError` with the place, for bad syntax)
    for NaN, numbers too large for a float, a name that an object has twice, and more than `DEPTH` brackets
    within each other: what was read can then be written again.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    level = [value]
    for _ in range(DEPTH + 1):
        level = [each for part in level for each in _parts(part)]
        if not level:
            return value
    raise _too_deep()


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> ValueError:
    return ValueError("its brackets are nested too deeply")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {twice!r} twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"it holds {name}, which JSON does not have")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"it holds {digits[:20]}, which is too large a number")
    return number
