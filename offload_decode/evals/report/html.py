"""HTML, put together from parts: all text is escaped, for models and files may have written anything."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import TypeAlias

# Control characters but tabs and newlines, those that turn the direction of what follows, halves.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_VOID = {"meta", "br", "col", "rect", "line", "path", "circle", "use", "wbr"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Part: TypeAlias = "str | Iterable[Part] | None"
"""Text, which is escaped; `Markup`, which is not; several of both; or nothing."""


def tag(name: str, /, *parts: Part, **attributes: object) -> Markup:
    """An element. Attributes: `class_` is `class`, `aria_label` is `aria-label`; None and False are none."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID and not parts:
        return Markup(f"<{name}{written}>" if name in ("meta", "br", "col", "wbr") else f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(parts)}</{name}>")


def join(parts: Iterable[Part]) -> Markup:
    """Parts after each other."""
    return Markup("".join(_written(part) for part in parts))


def _written(part: Part) -> str:
    if part is None:
        return ""
    if isinstance(part, Markup):
        return part
    return escaped(part) if isinstance(part, str) else join(part)


def escaped(text: str) -> Markup:
    """Text as HTML shows it; what cannot be seen is spelled out, as `\\u202e`."""
    return Markup(html.escape(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)))


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'


def cut(text: str, most: int = 400) -> str:
    """The beginning of a long text, and how much more there is."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"
