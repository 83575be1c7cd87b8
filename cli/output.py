"""What the commands print: answers and JSON to stdout, notes to stderr, and numbers for people.

Names, manifests and errors are text from outside, and may hold what a terminal takes for a command (escape
sequences, reversed writing): it is spelled out, as `\\x1b`. So is what a model writes, where it goes to a
terminal; into a file or a pipe it goes as it is.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence

# Control characters but tabs and newlines, and those that turn the direction of what follows.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKS = re.compile("[\t\n\u2028\u2029]")


def shown(text: str) -> str:
    """Text as a terminal may have it: control characters but tabs and newlines are spelled out."""
    return _COMMANDS.sub(_spelled, text)


def one_line(text: str) -> str:
    """`shown`, for a name or a value that stands in a line: tabs and newlines are spelled out too."""
    return _BREAKS.sub(_spelled, shown(text))


def answer(text: str, end: str = "\n") -> None:
    """Part of what the user asked for, shown at once."""
    print(shown(text), end=end, flush=True)


def generated(text: str, end: str = "") -> None:
    """Part of what a model wrote, shown at once."""
    print(shown(text) if sys.stdout.isatty() else text, end=end, flush=True)


def answer_json(value: object) -> None:
    """One JSON object for a program."""
    print(json_line(value), flush=True)


def json_line(value: object) -> str:
    """JSON in one line, its control characters spelled out as JSON spells them.

    What it has no form for (paths) becomes a string, and a number that is not finite becomes null.
    """
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str)
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def note(text: str, quiet: bool = False) -> None:
    """Something worth knowing that is no answer."""
    if not quiet:
        print(shown(text), file=sys.stderr, flush=True)


def _spelled(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def size(amount: float) -> str:
    """Bytes in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:,.0f} {unit}" if unit == "bytes" or amount >= 100 else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.0f} TB" if amount >= 100 else f"{amount:.3g} TB"


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
    return "\n".join(f"{name.ljust(width)}  {one_line(value)}" for name, value in pairs)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left and the others to the right."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )
