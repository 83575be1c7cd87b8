"""What an answer cost: time and bytes a token, by way."""

from __future__ import annotations

from statistics import fmean

from offload_decode.evals.contender import DENSE
from offload_decode.evals.lengths import label
from offload_decode.evals.report.html import Markup, Part, join, tag
from offload_decode.evals.report.numbers import count, milliseconds, size
from offload_decode.evals.report.tables import table, way_name
from offload_decode.evals.summary import Summary


def speed(summary: Summary) -> Markup:
    groups: list[tuple[Part, list[list[Part]]]] = []
    for length in summary.lengths:
        rows: list[list[Part]] = []
        ways = {way: summary.at(length, way) for way in summary.ways}
        means = {way: fmean(cell.seconds for cell in cells) for way, cells in ways.items() if cells}
        for way, seconds in means.items():
            cells = ways[way]
            moved = fmean(cell.bytes_moved for cell in cells)
            faster = means[DENSE] / seconds if DENSE in means and seconds > 0 else None
            attended, stored = (
                fmean(getattr(cell, name) for cell in cells) for name in ("attended", "stored")
            )
            share = f"{100 * attended / stored:.3g} %" if stored else "–"
            row: list[Part] = [
                way_name(way),
                milliseconds(seconds),
                "–" if faster is None else f"{faster:.2g} ×",
            ]
            rows.append([*row, size(moved), count(attended), share])
        groups.append((f"{label(length)} tokens", rows))
    heading: list[Part] = [
        "way of answering",
        "ms a token",
        "dense’s speed",
        "bytes moved a token",
        "tokens attended",
        "of the store",
    ]
    note = (
        "Medians over answers of a generated token’s time, means over tasks. They were taken in the course "
        "of the evaluation, on the machine below, and compare with nothing that was measured elsewhere."
    )
    return join([tag("p", note, class_="note"), table(None, heading, groups, "Speed")])
