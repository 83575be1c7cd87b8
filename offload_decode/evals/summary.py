"""What the answers of a run come to: accuracies with intervals, beside chance and dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median

from offload_decode.common.errors import ConfigError
from offload_decode.evals.contender import DENSE
from offload_decode.evals.lengths import label
from offload_decode.evals.runs import GUESSES, Asked, Results, Said, questions_and_answers
from offload_decode.evals.stats import (
    CONFIDENCE,
    Difference,
    Share,
    exceeding,
    larger,
    mean_of,
    paired_difference,
    wilson,
    wilson_of,
)

TRUSTED = 0.9
"""Where dense attention itself scores less, a ratio to it is not given: it would divide noise by noise."""
REACHED = 0.99

Place = tuple[str, int]
"""A task and a length in tokens."""


@dataclass(frozen=True)
class Cell:
    """One way of answering one task at one length, all seeds together.

    `scores` are by question, in the order of the file. `guess` is the mean score of guesses from the
    question alone, `luckiest` the most that a single one can have scored, `control` the score where the fact
    was taken out of the text (None: not asked). `attended`, `stored` and `bytes_moved` are means of the
    answers', `seconds` the median; all but `stored` a generated token. `to_dense` compares answers to the
    same questions. `ruler` is RULER's string match, `exact` and `f1` are SQuAD's measures (None: no short
    answers).
    """

    task: str
    length: int
    way: str
    scores: dict[tuple[str, int], float] = field(repr=False)
    score: Share
    ruler: Share
    seeds: dict[int, float]
    guess: float
    luckiest: float
    control: Share | None
    attended: float
    stored: float
    bytes_moved: float
    seconds: float
    ratio: float | None
    to_dense: Difference | None
    exact: float | None = None
    f1: float | None = None

    @property
    def at_chance(self) -> bool:
        """Whether it is no better than chance, as far as can be told."""
        return not self.above_chance(CONFIDENCE)

    @property
    def chance(self) -> Share:
        """What guesses score, or the control where that is surely more. Every question was guessed at many
        times, so that chance is known better than the score.
        """
        guess = wilson_of(self.guess, self.score.count * GUESSES)
        if self.control is not None and larger(self.control, guess) < (1 - CONFIDENCE) / 2:
            return self.control
        return guess

    def above_chance(self, confidence: float) -> bool:
        """Whether the score is larger than chance."""
        return self._luck < (1 - confidence) / 2

    def could_be_above_chance(self, confidence: float) -> bool:
        """Whether right answers to all of its questions would be, or whether these are too few to tell."""
        return larger(Share(1.0, self.score.count, 0.0, 1.0), self.chance) < (1 - confidence) / 2

    @property
    def _luck(self) -> float:
        """One-sided p that the score is as large by chance."""
        scores, chance = list(self.scores.values()), self.chance
        if self.luckiest < 1 and chance is not self.control and any(0 < score < 1 for score in scores):
            return exceeding(scores, self.luckiest, chance.count)
        return larger(self.score, chance)

    @property
    def spread(self) -> float:
        """The largest difference between the means of two seeds."""
        return max(self.seeds.values()) - min(self.seeds.values())


@dataclass(frozen=True)
class Headline:
    """One way at one length: its worst task, and then the mean over tasks, each with the same weight."""

    length: int
    way: str
    worst: Cell
    mean: Share
    tasks: int


@dataclass(frozen=True)
class Summary:
    """The cells of a run, in the order of its records, and what can be said of all of them."""

    evaluation: str
    cells: tuple[Cell, ...]
    units: tuple[int, int]

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """In the order of the file, as `lengths` (the shortest first) and `ways`."""
        return tuple(dict.fromkeys(cell.task for cell in self.cells))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({cell.length for cell in self.cells}))

    @cached_property
    def ways(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.way for cell in self.cells))

    @cached_property
    def by_place(self) -> dict[tuple[str, int, str], Cell]:
        """Cells by task, length and way."""
        return {(cell.task, cell.length, cell.way): cell for cell in self.cells}

    def at(self, length: int, way: str) -> list[Cell]:
        """The cells of all tasks."""
        return [cell for task in self.tasks if (cell := self.by_place.get((task, length, way)))]

    def headlines(self) -> list[Headline]:
        """For every length and way."""
        found = []
        for length in self.lengths:
            for way in self.ways:
                if cells := self.at(length, way):
                    worst = min(cells, key=lambda cell: (cell.score.mean, cell.score.low))
                    mean = mean_of([cell.score for cell in cells])
                    found.append(Headline(length, way, worst, mean, len(cells)))
        return found

    def reaching(self) -> dict[Place, dict[str, Cell | None]]:
        """For every task and length and every selector with several budgets, the cell with the smallest
        budget from which on every measured budget scores 99 % of dense; None where no budget does.

        Tasks that dense attention itself does not solve are left out.
        """
        found: dict[Place, dict[str, Cell | None]] = {}
        for family, ways in self.families().items():
            if len(ways) < 2:
                continue
            for place in dict.fromkeys((cell.task, cell.length) for cell in self.cells):
                cells = [cell for way in ways if (cell := self.by_place.get((*place, way)))]
                if not cells or any(cell.ratio is None for cell in cells):
                    continue
                enough: Cell | None = None
                for cell in sorted(cells, key=lambda cell: -cell.attended):
                    if cell.ratio is None or cell.ratio < REACHED:
                        break
                    enough = cell
                found.setdefault(place, {})[family] = enough
        return found

    def families(self) -> dict[str, list[str]]:
        """Ways that differ in their budget alone, by what they have in common."""
        found: dict[str, list[str]] = {}
        for way in self.ways:
            if way != DENSE:
                found.setdefault(without_budget(way), []).append(way)
        return found


def without_budget(way: str) -> str:
    """`quest:page_size=32` of `quest:budget=64,page_size=32`."""
    name, _, options = way.partition(":")
    kept = [option for option in options.split(",") if option and not option.startswith("budget=")]
    return f"{name}:{','.join(kept)}" if kept else name


def budget_of(way: str) -> str | None:
    """`64` of `quest:budget=64,page_size=32`; None where a way names none."""
    for option in way.partition(":")[2].split(","):
        if option.startswith("budget="):
            return option.removeprefix("budget=")
    return None


def summarize(results: Results) -> Summary:
    """Of a run that asks questions. Raises `ConfigError` where it has no answers, or records do not fit."""
    answers: dict[tuple[str, int, str], list[tuple[Asked, Said]]] = {}
    controls: dict[Place, list[float]] = {}
    for asked, all_said in questions_and_answers(results):
        place = (asked.task, asked.length)
        for said in all_said:
            if said.control:
                controls.setdefault(place, []).append(said.score)
            else:
                answers.setdefault((*place, said.way), []).append((asked, said))
    if not answers:
        way_out = "let a part of the run finish first"
        if results.finished:
            way_out = f"`eval {results.header.evaluation}` asks none; `eval report` shows what it measured"
        raise ConfigError(f"{results.path} holds no answers to questions: {way_out}")
    cells: dict[tuple[str, int, str], Cell] = {}
    for task, length, way in sorted(answers, key=lambda key: key[2] != DENSE):
        dense = cells.get((task, length, DENSE))
        cells[task, length, way] = _cell(
            task, length, way, answers[task, length, way], controls.get((task, length), ()), dense
        )
    ordered = tuple(cells[key] for key in answers)
    return Summary(results.header.evaluation, ordered, (len(results.finished), results.header.units))


def _cell(
    task: str,
    length: int,
    way: str,
    answers: Sequence[tuple[Asked, Said]],
    control: Sequence[float],
    dense: Cell | None,
) -> Cell:
    scores = {(asked.unit, asked.question): said.score for asked, said in answers}
    if len(scores) < len(answers):
        raise ConfigError(f"a question of task '{task}' has two answers by '{way}': the file was changed")
    score = wilson(list(scores.values()))
    seeds: dict[int, list[float]] = {}
    for asked, said in answers:
        seeds.setdefault(asked.seed, []).append(said.score)
    exact = [said.exact_match for _, said in answers if said.exact_match is not None]
    f1 = [said.f1 for _, said in answers if said.f1 is not None]
    ratio = to_dense = None
    if dense is not None and way != DENSE:
        both = [key for key in scores if key in dense.scores]
        if both:
            ours, theirs = [scores[key] for key in both], [dense.scores[key] for key in both]
            to_dense = paired_difference(ours, theirs)
            ratio = fmean(ours) / fmean(theirs) if dense.score.mean >= TRUSTED else None
    return Cell(
        task=task,
        length=length,
        way=way,
        scores=scores,
        score=score,
        ruler=wilson([said.ruler_score for _, said in answers]),
        seeds={seed: fmean(seeds[seed]) for seed in sorted(seeds)},
        guess=fmean(asked.guess for asked, _ in answers),
        luckiest=min(1.0, GUESSES * max(asked.guess for asked, _ in answers)),
        control=wilson(control) if control else None,
        attended=fmean(said.attended for _, said in answers),
        stored=fmean(asked.stored_tokens for asked, _ in answers),
        bytes_moved=fmean(said.bytes_moved for _, said in answers),
        seconds=median(said.seconds for _, said in answers),
        ratio=ratio,
        to_dense=to_dense,
        exact=fmean(exact) if exact else None,
        f1=fmean(f1) if f1 else None,
    )


HEADING = [
    "accuracy in %",
    "way",
    "tokens",
    "",
    "95 %",
    "string match",
    "exact",
    "F1",
    "control",
    "guess",
    "attended",
    "of dense",
    "",
]


def rows(summary: Summary) -> list[list[str]]:
    """Of every length and way, the worst task, the mean over tasks, and then each task."""
    found = [HEADING]
    for head in summary.headlines():
        where = [head.way, label(head.length)]
        if head.tasks > 1:
            found.append(_row(f"worst: {head.worst.task}", where, head.worst))
            found.append(_mean_row(where, head))
        for task in summary.tasks:
            if cell := summary.by_place.get((task, head.length, head.way)):
                found.append(_row(task, where, cell))
    return found


def _row(name: str, where: list[str], cell: Cell) -> list[str]:
    return [
        name,
        *where,
        percent(cell.score.mean),
        interval(cell.score),
        percent(cell.ruler.mean),
        "-" if cell.exact is None else percent(cell.exact),
        "-" if cell.f1 is None else percent(cell.f1),
        "-" if cell.control is None else percent(cell.control.mean),
        percent(cell.guess),
        f"{cell.attended:,.0f}",
        "-" if cell.ratio is None else percent(cell.ratio),
        "no better than chance" if cell.at_chance else "",
    ]


def _mean_row(where: list[str], head: Headline) -> list[str]:
    mean = head.mean
    return [f"mean of {head.tasks} tasks", *where, percent(mean.mean), interval(mean), *[""] * 8]


def percent(share: float) -> str:
    """A share in percent, with the digits that a few hundred questions give."""
    return f"{100 * share:.1f}"


def interval(share: Share) -> str:
    """Its limits in percent."""
    return f"{100 * share.low:.0f}-{100 * share.high:.0f}"
