"""What a value of a manifest may be; each raises `ValueError` with the name of what is wrong."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

TEXT = 4096


def text(name: str, value: Any) -> None:
    """A text that is not too long."""
    if not isinstance(value, str) or len(value) > TEXT:
        raise ValueError(f"{name} is not a text of at most {TEXT:,} letters")


def count(name: str, value: Any, most: int, least: int = 1) -> None:
    """A whole number in a range."""
    if type(value) is not int or not least <= value <= most:  # True is an int to isinstance
        raise ValueError(f"{name} is not a whole number from {least} to {most:,}")


def one_of(name: str, value: Any, known: Collection[str]) -> None:
    """One of some known texts."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is none of {', '.join(known)}")


def plain_object(name: str, value: Any) -> None:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")


def just_names(name: str, value: dict[str, Any], wanted: Collection[str]) -> None:
    """An object with just these names."""
    if odd := sorted({*value} ^ {*wanted}):
        raise ValueError(
            f"{name} should have just {', '.join(wanted)}, and {odd[0]!r} is too many or missing"
        )


def plain_values(name: str, value: Any, depth: int) -> None:
    """Values of JSON, nested no deeper than options and RoPE parameters are."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and not depth:
        raise ValueError(f"{name} is nested too deeply")
    for each in inner:
        plain_values(name, each, depth - 1)
