"""Columns of a page of PDF whose lines were written across them: their order is found again.

Most programs write a column after the other, and PDFium keeps that order. Here only pages count on which
prose stands in columns and is written line by line across all of them. Tables stay as they are written.
"""

from itertools import pairwise
from typing import Any, NamedTuple

_GUTTER = 0.8  # of a line's height: the least distance of two columns
_LINES = 3  # that a column has at least
_PROSE = 6  # times its height: the least width of most lines of a column
_FULL = 0.6  # of the widest line: the least width of most lines


class Box(NamedTuple):
    """Of a piece of a line, in points from the lower left corner of the page."""

    left: float
    bottom: float
    right: float
    top: float


Region = tuple[float | None, float | None, float | None, float | None]
ALL: Region = (None, None, None, None)


def regions(textpage: Any) -> list[Region]:
    """Parts of a page in reading order, as (left, bottom, right, top) where `None` is the page's edge."""
    boxes = [Box(*textpage.get_rect(i)) for i in range(textpage.count_rects())]
    rows = _rows(boxes)
    if any(above[0].top < below[0].top for above, below in pairwise(rows)):  # not written from top to bottom
        return [ALL]
    start = next((i for i, row in enumerate(rows) if len(row) > 1), len(rows))
    end, columns = start, list[tuple[float, float]]()
    for row in rows[start:]:
        wider = _spans([*columns, *((box.left, box.right) for box in row)], _GUTTER * _height(row))
        alone = len(row) == 1 and row[0].top < min(box.bottom for box in rows[end - 1]) - _height(row)
        if len(wider) < 2 or alone or (columns and len(wider) != len(columns)):
            break
        end, columns = end + 1, wider
    if not _are_prose(rows[start:end], columns):
        return [ALL]
    top, bottom = _between(rows, start), _between(rows, end)
    edges = [None, *((a[1] + b[0]) / 2 for a, b in pairwise(columns)), None]
    parts: list[Region] = [(a, bottom, b, top) for a, b in pairwise(edges)]
    head: list[Region] = [] if top is None else [(None, top, None, None)]
    foot: list[Region] = [] if bottom is None else [(None, None, None, bottom)]
    return [*head, *parts, *foot]


def _between(rows: list[list[Box]], index: int) -> float | None:
    """The height between a row and the one before it, where there are both."""
    if not 0 < index < len(rows):
        return None
    return (min(box.bottom for box in rows[index - 1]) + max(box.top for box in rows[index])) / 2


def _rows(boxes: list[Box]) -> list[list[Box]]:
    """The pieces in the order in which they are written, those of one height together."""
    rows: list[list[Box]] = []
    for box in boxes:
        middle = (box.bottom + box.top) / 2
        last = rows[-1][-1] if rows else None
        if last and last.bottom < middle < last.top:
            if box.left - last.right < _GUTTER * (last.top - last.bottom) and box.left >= last.left:
                rows[-1][-1] = Box(last.left, min(last.bottom, box.bottom), box.right, max(last.top, box.top))
            else:
                rows[-1].append(box)
        else:
            rows.append([box])
    return rows


def _height(row: list[Box]) -> float:
    return max(box.top - box.bottom for box in row)


def _spans(spans: list[tuple[float, float]], gutter: float) -> list[tuple[float, float]]:
    """The spans, those merged that are less than a gutter apart."""
    merged: list[tuple[float, float]] = []
    for left, right in sorted(spans):
        if merged and left - merged[-1][1] < gutter:
            merged[-1] = (merged[-1][0], max(merged[-1][1], right))
        else:
            merged.append((left, right))
    return merged


def _are_prose(rows: list[list[Box]], columns: list[tuple[float, float]]) -> bool:
    """Whether every column has lines enough, most of them long and about as wide as it is."""
    if not columns:
        return False
    for left, right in columns:
        lines = [box for row in rows for box in row if left <= box.left <= right]
        full = [
            box
            for box in lines
            if box.right - box.left > max(_FULL * (right - left), _PROSE * (box.top - box.bottom))
        ]
        if len(lines) < _LINES or len(full) < 0.7 * len(lines):
            return False
    return True
