"""How lengths in tokens are named."""

from __future__ import annotations


def label(length: int) -> str:
    """`32K` for 32,768 tokens; the plain number where no unit divides it."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if length and length % size == 0:
            return f"{length // size}{unit}"
    return f"{length:,}"
