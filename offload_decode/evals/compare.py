"""Two runs side by side: which cells changed, and whether by more than noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from offload_decode.common.errors import ConfigError
from offload_decode.evals.runs import QUESTION, Asked, Results
from offload_decode.evals.stats import (
    CONFIDENCE,
    Difference,
    difference,
    holm,
    paired,
    paired_difference,
    unpaired,
    wilson,
)
from offload_decode.evals.summary import Cell, summarize

Key = tuple[str, int]
"""A text (its unit) and the number of a question."""
_MACHINE = ("processor", "device")
"""What speed depends on, of what a run was made with."""


class _Tested:
    p: float

    @property
    def more_than_noise(self) -> bool:
        """Whether so large a change is unlikely where nothing changed, all considered that p is for."""
        return self.p < 1 - CONFIDENCE


@dataclass(frozen=True)
class Change(_Tested):
    """One way of answering one task at one length in two runs: `before` and `after`, the difference of their
    scores with its interval, and p, corrected for all cells (Holm). `pairs`: how many questions both runs
    asked; 0 where they asked others, and are compared as two groups. `more_than_noise`: p < 0.05.
    """

    task: str
    length: int
    way: str
    before: Cell
    after: Cell
    change: Difference
    pairs: int
    p: float


@dataclass(frozen=True)
class Mean(_Tested):
    """One way of answering at one length over all `tasks` that both runs asked: mean scores of their texts
    `before` and `after`, the difference with its interval, and p, in which a text counts once, however many
    questions share it, corrected for all means (Holm). `pairs`: as of a `Change`, but texts.
    """

    tasks: int
    length: int
    way: str
    before: float
    after: float
    change: Difference
    pairs: int
    p: float


@dataclass(frozen=True)
class Comparison:
    """The means over several tasks, and the cells that two runs share, largest change first; those that only
    one has; what else differs, by its name, in the first and in the second run; and the sizes of the second's
    costs over the first's: `bytes`, and `seconds` where both ran on the same machine, else None.
    """

    means: tuple[Mean, ...]
    changes: tuple[Change, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    differs: Mapping[str, tuple[Any, Any]]
    bytes_ratio: float | None
    seconds_ratio: float | None


def compare(first: Results, second: Results) -> Comparison:
    """What changed from the first run to the second. Raises `ConfigError` where they share no cell."""
    before, after = summarize(first), summarize(second)
    if before.evaluation != after.evaluation:
        raise ConfigError(
            f"{first.path} is of `eval {before.evaluation}` and {second.path} of `eval {after.evaluation}`: "
            "compare two runs of one evaluation"
        )
    places = [place for place in before.by_place if place in after.by_place]
    if not places:
        raise ConfigError(
            f"{first.path} and {second.path} have no task, length and way of answering in common: "
            "nothing can be compared"
        )
    texts = _texts(first), _texts(second)
    both = [(before.by_place[place], after.by_place[place]) for place in places]
    raw, shared_by = [], []
    for one, other in both:
        shared = [key for key in one.scores if texts[0][key] == texts[1].get(key)]
        # Runs that share a few questions by chance are two groups: pairs need most of both.
        if 2 * len(shared) <= max(len(one.scores), len(other.scores)):
            shared = []
        shared_by.append(shared)
        raw.append(_tested(one, other, shared))
    corrected = holm([p for _, _, p in raw])
    changes = [
        Change(one.task, one.length, one.way, one, other, change, pairs, p)
        for (one, other), (change, pairs, _), p in zip(both, raw, corrected, strict=True)
    ]
    changes.sort(key=lambda change: (change.p, -abs(change.change.mean)))
    only = [
        tuple(_named(place) for place in own.by_place if place not in other.by_place)
        for own, other in ((before, after), (after, before))
    ]
    differs = dict(_differences(first, second))
    same_machine = not any(name.split(".")[0] in _MACHINE for name in differs)
    return Comparison(
        tuple(_means(both, shared_by)),
        tuple(changes),
        (only[0], only[1]),
        differs,
        _ratio([(one.bytes_moved, other.bytes_moved) for one, other in both]),
        _ratio([(one.seconds, other.seconds) for one, other in both]) if same_machine else None,
    )


def sentence(comparison: Comparison) -> str:
    """The whole comparison in a sentence or two."""
    of_cells = _of_cells(comparison)
    if not comparison.means:
        return of_cells
    of_means = _told(comparison.means, "mean over all tasks", "means over all tasks")
    return f"{of_means} {of_cells}"


def _of_cells(comparison: Comparison) -> str:
    told = _told(comparison.changes, "cell", "cells")
    if any(change.more_than_noise for change in comparison.changes):
        return told
    widest = max(max(abs(each.change.low), abs(each.change.high)) for each in comparison.changes)
    return (
        f"{told} That is not to say that there is none: changes of up to {100 * widest:.0f} points would fit "
        "these runs."
    )


def _told(found: Sequence[Change | Mean], one: str, several: str) -> str:
    better = [each for each in found if each.more_than_noise and each.change.mean > 0]
    worse = [each for each in found if each.more_than_noise and each.change.mean < 0]
    every = f"the one {one}" if len(found) == 1 else f"the {len(found):,} {several}"
    if not better and not worse:
        return f"No change in {every} is more than noise."
    parts = [f"{len(some):,} {name}" for some, name in ((worse, "worse"), (better, "better")) if some]
    return f"Of {every}, {' and '.join(parts)} by more than noise (p < 0.05, corrected for all {several})."


def _means(both: Sequence[tuple[Cell, Cell]], shared: Sequence[list[Key]]) -> Iterator[Mean]:
    """Of every way and length of which there is more than one task."""
    groups: dict[tuple[int, str], list[tuple[Cell, Cell, list[Key]]]] = {}
    for (one, other), keys in zip(both, shared, strict=True):
        groups.setdefault((one.length, one.way), []).append((one, other, keys))
    several = {place: cells for place, cells in groups.items() if len(cells) > 1}
    tested = {place: _tested_together(cells) for place, cells in several.items()}
    corrected = holm([p for *_, p in tested.values()])
    for ((length, way), (old, new, change, pairs, _)), p in zip(tested.items(), corrected, strict=True):
        yield Mean(len(several[length, way]), length, way, old, new, change, pairs, p)


def _tested_together(
    cells: Sequence[tuple[Cell, Cell, list[Key]]],
) -> tuple[float, float, Difference, int, float]:
    if all(keys for _, _, keys in cells):
        old = _by_text((one, keys) for one, _, keys in cells)
        new = _by_text((other, keys) for _, other, keys in cells)
        return fmean(old), fmean(new), paired_difference(new, old), len(old), paired(new, old)
    old = _by_text((one, list(one.scores)) for one, _, _ in cells)
    new = _by_text((other, list(other.scores)) for _, other, _ in cells)
    return fmean(old), fmean(new), difference(wilson(new), wilson(old)), 0, unpaired(new, old)


def _by_text(cells: Iterable[tuple[Cell, list[Key]]]) -> list[float]:
    """Mean scores of texts: whoever fails at a text often fails at all its questions."""
    texts: dict[str, list[float]] = {}
    for cell, keys in cells:
        for unit, question in keys:
            texts.setdefault(unit, []).append(cell.scores[unit, question])
    return [fmean(scores) for scores in texts.values()]


def _tested(one: Cell, other: Cell, shared: list[Key]) -> tuple[Difference, int, float]:
    if shared:
        old, new = [one.scores[key] for key in shared], [other.scores[key] for key in shared]
        return paired_difference(new, old), len(shared), paired(new, old)
    change = difference(other.score, one.score)
    return change, 0, unpaired(list(other.scores.values()), list(one.scores.values()))


def _texts(results: Results) -> dict[tuple[str, int], tuple[object, ...]]:
    """What makes a question the same in two runs: its text and answers, where it stands and in how many
    tokens, and the text around it.
    """
    around = results.header.configuration.get("text_sha256")
    return {
        (asked.unit, asked.question): (
            asked.asked,
            tuple(asked.expected),
            asked.depth,
            asked.stored_tokens,
            around,
        )
        for asked in map(Asked.of, results.of(QUESTION))
    }


def _differences(first: Results, second: Results) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for one, other in (
        (first.header.made_with, second.header.made_with),
        (first.header.configuration, second.header.configuration),
    ):
        flat = dict(_flat("", one)), dict(_flat("", other))
        for name in {**flat[0], **flat[1]}:
            values = flat[0].get(name), flat[1].get(name)
            if values[0] != values[1]:
                yield name, values


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _named(place: tuple[str, int, str]) -> str:
    task, length, way = place
    return f"{task}, {length:,} tokens, {way}"


def _ratio(pairs: list[tuple[float, float]]) -> float | None:
    """Mean of the second over mean of the first, over cells in which both are known."""
    known = [(one, other) for one, other in pairs if one > 0 and other > 0]
    return fmean(other for _, other in known) / fmean(one for one, _ in known) if known else None
