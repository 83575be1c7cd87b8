"""Two runs side by side: which cells changed, and whether by more than noise."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import fmean
from typing import Any

from offload_decode.common.errors import ConfigError
from offload_decode.evals import stats
from offload_decode.evals.runs import QUESTION, QuestionRecord, Results, flat, grouped
from offload_decode.evals.stats import CONFIDENCE, Share, wilson
from offload_decode.evals.summary import Cell, Summary, summarize

Key = tuple[str, int]
"""A text (its unit) and the number of a question."""
_MACHINE = ("processor", "device")  # what speed depends on, of what a run was made with


@dataclass(frozen=True)
class Change:
    """One way of answering at one length in two runs: mean scores `before` and `after`, the difference of the
    compared ones with its interval, and p, corrected for all cells or all means (Holm).

    Of a cell, `task` is named, and questions are compared; of a mean over `tasks`, texts are, so that one
    counts once, however many questions share it. `pairs`: how many of them both runs asked; 0 where they
    asked others, and are compared as two groups.
    """

    task: str
    tasks: int
    length: int
    way: str
    before: float
    after: float
    change: Share
    pairs: int
    p: float

    @property
    def more_than_noise(self) -> bool:
        """Whether so large a change is unlikely where nothing changed, all considered that p is for."""
        return self.p < 1 - CONFIDENCE


@dataclass(frozen=True)
class Comparison:
    """The means over several tasks, and the cells that two runs share, largest change first; those that only
    one has; what else differs, by its name, in the first and in the second run; and the sizes of the second's
    costs over the first's: `bytes`, and `seconds` where both ran on the same machine, else None.
    """

    means: tuple[Change, ...]
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
    texts, others = _texts(first), _texts(second)
    cells, changes = [], []
    for place in places:
        one, other = before.by_place[place], after.by_place[place]
        shared = [key for key in one.scores if texts[key] == others.get(key)]
        # Runs that share a few questions by chance are two groups: pairs need most of both.
        if 2 * len(shared) <= max(len(one.scores), len(other.scores)):
            shared = []
        cells.append((one, other, shared))
        old, new = ([cell.scores[key] for key in shared or cell.scores] for cell in (one, other))
        before_after = one.score.mean, other.score.mean, *_tested(old, new, shared)
        changes.append(Change(one.task, 1, one.length, one.way, *before_after))
    differs = dict(_differences(first, second))
    same_machine = not any(name.split(".")[0] in _MACHINE for name in differs)
    return Comparison(
        tuple(_corrected(_means(cells))),
        tuple(sorted(_corrected(changes), key=lambda change: (change.p, -abs(change.change.mean)))),
        (_only(before, after), _only(after, before)),
        differs,
        _ratio([(one.bytes_moved, other.bytes_moved) for one, other, _ in cells]),
        _ratio([(one.seconds, other.seconds) for one, other, _ in cells]) if same_machine else None,
    )


def _only(one: Summary, other: Summary) -> tuple[str, ...]:
    places = [place for place in one.by_place if place not in other.by_place]
    return tuple(f"{task}, {length:,} tokens, {way}" for task, length, way in places)


def _means(cells: Iterable[tuple[Cell, Cell, list[Key]]]) -> Iterator[Change]:
    """Of every way and length of which there is more than one task."""
    for (length, way), group in grouped(cells, lambda pair: (pair[0].length, pair[0].way)).items():
        if len(group) > 1:
            same = all(shared for _, _, shared in group)
            old = _by_text((one, shared if same else list(one.scores)) for one, _, shared in group)
            new = _by_text((other, shared if same else list(other.scores)) for _, other, shared in group)
            yield Change("", len(group), length, way, fmean(old), fmean(new), *_tested(old, new, same))


def _by_text(cells: Iterable[tuple[Cell, list[Key]]]) -> list[float]:
    """Mean scores of texts: whoever fails at a text often fails at all its questions."""
    scores = ((unit, cell.scores[unit, question]) for cell, keys in cells for unit, question in keys)
    return [fmean(score for _, score in own) for own in grouped(scores, itemgetter(0)).values()]


def _tested(old: list[float], new: list[float], same: object) -> tuple[Share, int, float]:
    """The change, pairs and p of scores: of the `same` questions in the same order, or of two groups."""
    if same:
        return stats.paired_difference(new, old), len(old), stats.paired(new, old)
    return stats.difference(wilson(new), wilson(old)), 0, stats.unpaired(new, old)


def _corrected(changes: Iterable[Change]) -> list[Change]:
    found = list(changes)
    return [replace(one, p=p) for one, p in zip(found, stats.holm([one.p for one in found]), strict=True)]


def _texts(results: Results) -> dict[tuple[str, int], tuple[object, ...]]:
    """What makes a question the same in two runs: its text and answers, where it stands and in how many
    tokens, and the text around it.
    """
    around = results.header.configuration.get("text_sha256")
    return {
        (it.unit, it.question): (it.asked, tuple(it.expected), it.depth, it.stored_tokens, around)
        for it in results.typed(QUESTION, QuestionRecord)
    }


def _differences(first: Results, second: Results) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for part in ("made_with", "configuration"):
        one, other = (dict(flat(getattr(run.header, part))) for run in (first, second))
        for name in {**one, **other}:
            if one.get(name) != other.get(name):
                yield ".".join(name), (one.get(name), other.get(name))


def _ratio(pairs: list[tuple[float, float]]) -> float | None:
    """Mean of the second over mean of the first, over cells in which both are known."""
    known = [(one, other) for one, other in pairs if one > 0 and other > 0]
    return fmean(other for _, other in known) / fmean(one for one, _ in known) if known else None
