"""Two runs side by side: which cells changed, and whether by more than noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from offload_decode.errors import ConfigError
from offload_decode.evals.intervals import CONFIDENCE, Difference, difference, paired_difference
from offload_decode.evals.records import QUESTION, Asked
from offload_decode.evals.results import Results
from offload_decode.evals.significance import holm, paired, unpaired
from offload_decode.evals.summary import Cell, summarize

_MACHINE = ("processor", "device")
"""What speed depends on, of what a run was made with."""


@dataclass(frozen=True)
class Change:
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

    @property
    def more_than_noise(self) -> bool:
        """Whether so large a change is unlikely where nothing changed, all cells considered."""
        return self.p < 1 - CONFIDENCE


@dataclass(frozen=True)
class Comparison:
    """The cells that two runs share, largest change first; those that only one has; what else differs, by its
    name, in the first and in the second run; and the sizes of the second's costs over the first's: `bytes`,
    and `seconds` where both ran on the same machine, else None.
    """

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
    raw = []
    for one, other in both:
        shared = [key for key in one.scores if texts[0][key] == texts[1].get(key)]
        # Runs that share a few questions by chance are two groups: pairs need most of both.
        if 2 * len(shared) <= max(len(one.scores), len(other.scores)):
            shared = []
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
        tuple(changes),
        (only[0], only[1]),
        differs,
        _ratio([(one.bytes_moved, other.bytes_moved) for one, other in both]),
        _ratio([(one.seconds, other.seconds) for one, other in both]) if same_machine else None,
    )


def sentence(comparison: Comparison) -> str:
    """The whole comparison in a sentence or two."""
    found = comparison.changes
    better = [change for change in found if change.more_than_noise and change.change.mean > 0]
    worse = [change for change in found if change.more_than_noise and change.change.mean < 0]
    cells = "the one cell" if len(found) == 1 else f"the {len(found):,} cells"
    if not better and not worse:
        widest = max(max(abs(change.change.low), abs(change.change.high)) for change in found)
        return (
            f"No change in {cells} is more than noise. That is not to say that there is none: changes of up "
            f"to {100 * widest:.0f} points would fit these runs."
        )
    parts = [f"{len(some):,} {name}" for some, name in ((worse, "worse"), (better, "better")) if some]
    return f"Of {cells}, {' and '.join(parts)} by more than noise (p < 0.05, corrected for all cells)."


def _tested(one: Cell, other: Cell, shared: list[tuple[str, int]]) -> tuple[Difference, int, float]:
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
