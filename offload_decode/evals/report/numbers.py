"""Numbers as a page shows them."""

from __future__ import annotations

from offload_decode.evals.intervals import Difference, Share
from offload_decode.evals.summary_table import percent


def interval(share: Share) -> str:
    """Its limits in percent."""
    return f"{100 * share.low:.0f}–{100 * share.high:.0f}"


def points(change: Difference) -> str:
    """A difference in percentage points."""
    return f"{signed(100 * change.mean)} ({signed(100 * change.low, 0)} to {signed(100 * change.high, 0)})"


def signed(number: float, digits: int = 1) -> str:
    """With a sign in front, `−` for minus; nothing is +0."""
    text = f"{abs(number):.{digits}f}"
    return text if float(text) == 0 else ("+" if number > 0 else "−") + text


def count(number: float) -> str:
    """Whole, with commas."""
    return f"{number:,.0f}"


def size(amount: float) -> str:
    """Bytes in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:,.0f} {unit}" if unit == "bytes" or amount >= 100 else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3g} TB"


def milliseconds(seconds: float) -> str:
    """Three digits."""
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"


__all__ = ["count", "interval", "milliseconds", "percent", "points", "signed", "size"]
