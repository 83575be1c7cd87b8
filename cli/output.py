"""What the commands print: answers and JSON to stdout, notes to stderr, and numbers for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence


def answer(text: str, end: str = "\n") -> None:
    """Part of what the user asked for, shown at once."""
    print(text, end=end, flush=True)


def answer_json(value: object) -> None:
    """One JSON object for a program; what JSON has no form for (paths) becomes a string."""
    print(json.dumps(value, ensure_ascii=False, default=str), flush=True)


def note(text: str, quiet: bool = False) -> None:
    """Something worth knowing that is no answer."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def size(amount: float) -> str:
    """Bytes in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:,.0f} {unit}" if unit == "bytes" else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3g} TB"


def count(number: int, noun: str) -> str:
    """A number and what it counts."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Seconds, or minutes and hours where there are any."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and what there is to say of them, one a line."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )
