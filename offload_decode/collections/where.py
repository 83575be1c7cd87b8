"""Which documents of a collection are meant: conditions on their names and metadata."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from offload_decode.collections.journal import Entry, Value
from offload_decode.errors import ConfigError

NAME = "name"
_CONDITION = re.compile(r"([^=!<>]+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
_ORDERED: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Condition:
    """`field`, which is `name` or one of the metadata, compared with a text as users write it.

    `=` and `!=` take a text with `*`, `?` and `[…]` as a shell does; `<`, `<=`, `>`, `>=` order texts by
    their characters (dates such as 2024-05-31 too) and numbers by size. A document without the field, or
    whose field is of another kind than what it is compared with, does not meet it.
    """

    field: str
    comparison: str
    wanted: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """`ConfigError` for what is no condition."""
        found = _CONDITION.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                f"'{text}' is no condition: write one like name=2024/*, author!=Ada or year>=2020"
            )
        return cls(found[1].strip(), found[2], found[3].strip())

    def holds(self, entry: Entry) -> bool:
        """Whether a document meets it."""
        if self.field == NAME:
            return self._compares(entry.name)
        return self.field in entry.metadata and self._compares(entry.metadata[self.field])

    def _compares(self, value: Value) -> bool:
        if self.comparison in _ORDERED:
            wanted = self.wanted if isinstance(value, str) else _number(self.wanted)
            if wanted is None or value is None or isinstance(value, bool):
                return False
            return _ORDERED[self.comparison](value, wanted)
        return self._equals(value) == (self.comparison == "=")

    def _equals(self, value: Value) -> bool:
        if isinstance(value, str):
            return fnmatchcase(value, self.wanted)
        if isinstance(value, bool | None):
            return self.wanted == {True: "true", False: "false", None: "null"}[value]
        return value == _number(self.wanted)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
