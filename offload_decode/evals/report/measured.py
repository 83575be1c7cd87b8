"""The part of a page that says what was measured with what."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from offload_decode.evals.report.html import Markup, Part, cut
from offload_decode.evals.report.tables import pairs

_LONGEST = 1200  # characters of a value


def measured(*parts: Mapping[str, Any]) -> Markup:
    """Plain values by their names; names of objects within each other are joined."""
    return pairs([row for part in parts for row in _flat("", part)])


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[Part, Part]]:
    for name, value in values.items():
        spoken = f"{prefix} {name}".strip().replace("_", " ")
        if isinstance(value, dict) and all(isinstance(each, str | int | float) for each in value.values()):
            yield from _flat("" if name == "versions" else spoken, value)
        else:
            yield spoken, cut(_text(value), _LONGEST)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False)
