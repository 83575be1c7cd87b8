"""Tasks that no small selection of a text's tokens solves: a file each, on what `spread.py` says of all."""

from __future__ import annotations

SUITE = (
    "count-mentions",
    "filter-records",
    "join-story",
    "every-record",
    "tally-lines",
    "graph-walk",
)
