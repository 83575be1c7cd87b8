"""What the answers of a run come to: accuracies with intervals, beside chance and dense attention."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from statistics import fmean, median

from offload_decode.common.errors import ConfigError
from offload_decode.evals import runs
from offload_decode.evals.contender import DENSE, label
from offload_decode.evals.runs import AnswerRecord, QuestionRecord, Results, grouped
from offload_decode.evals.stats import Share, mean_of, wilson

TRUSTED = 0.9
"""Where dense attention itself scores less, a ratio to it is not given: it would divide noise by noise."""

Place = tuple[str, int]
"""A task and a length in tokens."""


@dataclass(frozen=True)
class Cell:
    """One way of answering one task at one length, all seeds together.

    `scores` are by question, in the order of the file. `guess` is the mean score of guesses from the
    question alone, `control` the score where the fact was taken out of the text (None: not asked).
    `attended`, `stored` and `bytes_moved` are means of the answers', `seconds` the median; all but `stored`
    a generated token. `ratio` is to dense attention on the same questions, where that is `TRUSTED`. `ruler`
    is RULER's string match, `exact` and `f1` are SQuAD's measures (None: no short answers).
    """

    task: str
    length: int
    way: str
    scores: dict[tuple[str, int], float] = field(repr=False)
    score: Share
    ruler: Share
    seeds: dict[int, float]
    guess: float
    control: Share | None
    attended: float
    stored: float
    bytes_moved: float
    seconds: float
    ratio: float | None
    exact: float | None = None
    f1: float | None = None

    @property
    def chance(self) -> float:
        """What guesses score, or the control where that is more."""
        return self.guess if self.control is None else max(self.guess, self.control.mean)


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
        return [
            Headline(
                length,
                way,
                min(cells, key=lambda cell: (cell.score.mean, cell.score.low)),
                mean_of([cell.score for cell in cells]),
                len(cells),
            )
            for length, way in product(self.lengths, self.ways)
            if (cells := self.at(length, way))
        ]

    def families(self) -> dict[str, list[str]]:
        """Ways that differ in their budget alone, by what they have in common."""
        return grouped((way for way in self.ways if way != DENSE), without_budget)


def without_budget(way: str) -> str:
    """`quest:page_size=32` of `quest:budget=64,page_size=32`."""
    name, _, options = way.partition(":")
    others = ",".join(each for each in options.split(",") if each and not each.startswith("budget="))
    return f"{name}:{others}" if others else name


def summarize(results: Results) -> Summary:
    """Of a run that asks questions. Raises `ConfigError` where it has no answers, or records do not fit."""
    answers: dict[tuple[str, int, str], list[tuple[QuestionRecord, AnswerRecord]]] = defaultdict(list)
    controls: dict[Place, list[float]] = defaultdict(list)
    for asked, all_said in runs.questions_and_answers(results):
        for said in all_said:
            if said.control:
                controls[asked.task, asked.length].append(said.score)
            else:
                answers[asked.task, asked.length, said.way].append((asked, said))
    if not answers:
        way_out = "let a part of the run finish first"
        if results.finished:
            way_out = f"`eval {results.header.evaluation}` asks none; `eval report` shows what it measured"
        raise ConfigError(f"{results.path} holds no answers to questions: {way_out}")
    cells: dict[tuple[str, int, str], Cell] = {}
    for place in sorted(answers, key=lambda place: place[2] != DENSE):
        dense = cells.get((*place[:2], DENSE))
        cells[place] = _cell(*place, answers[place], controls.get(place[:2]), dense)
    ordered = tuple(cells[place] for place in answers)
    return Summary(results.header.evaluation, ordered)


def _cell(
    task: str,
    length: int,
    way: str,
    answers: Sequence[tuple[QuestionRecord, AnswerRecord]],
    control: Sequence[float] | None,
    dense: Cell | None,
) -> Cell:
    scores = {(asked.unit, asked.question): said.score for asked, said in answers}
    if len(scores) < len(answers):
        raise ConfigError(f"a question of task '{task}' has two answers by '{way}': the file was changed")
    seeds = grouped(answers, lambda pair: pair[0].seed)
    exact = [said.exact_match for _, said in answers if said.exact_match is not None]
    f1 = [said.f1 for _, said in answers if said.f1 is not None]
    ratio, trusted = None, dense is not None and way != DENSE and dense.score.mean >= TRUSTED
    if dense is not None and trusted and (both := scores.keys() & dense.scores.keys()):
        ratio = fmean(scores[key] for key in both) / fmean(dense.scores[key] for key in both)
    return Cell(
        task=task,
        length=length,
        way=way,
        scores=scores,
        score=wilson(list(scores.values())),
        ruler=wilson([said.ruler_score for _, said in answers]),
        seeds={seed: fmean(said.score for _, said in seeds[seed]) for seed in sorted(seeds)},
        guess=fmean(asked.guess for asked, _ in answers),
        control=wilson(control) if control else None,
        attended=fmean(said.attended for _, said in answers),
        stored=fmean(asked.stored_tokens for asked, _ in answers),
        bytes_moved=fmean(said.bytes_moved for _, said in answers),
        seconds=median(said.seconds for _, said in answers),
        ratio=ratio,
        exact=fmean(exact) if exact else None,
        f1=fmean(f1) if f1 else None,
    )


HEADING = ["accuracy in %", "way", "tokens", "", "95 %", "string match", "exact", "F1", "control", "guess"]
HEADING += ["attended", "of dense"]


def rows(summary: Summary) -> list[list[str]]:
    """Of every length and way, the worst task, the mean over tasks, and then each task."""
    found = [HEADING]
    for head in summary.headlines():
        where = [head.way, label(head.length)]
        if head.tasks > 1:
            mean = [*where, percent(head.mean.mean), _interval(head.mean)]
            found.append(_row(f"worst: {head.worst.task}", where, head.worst))
            found.append([f"mean of {head.tasks} tasks", *mean, *[""] * 7])
        found += [_row(cell.task, where, cell) for cell in summary.at(head.length, head.way)]
    return found


def _row(name: str, where: list[str], cell: Cell) -> list[str]:
    control = None if cell.control is None else cell.control.mean
    shares = map(percent, (cell.ruler.mean, cell.exact, cell.f1, control, cell.guess))
    cost = [f"{cell.attended:,.0f}", percent(cell.ratio)]
    return [name, *where, percent(cell.score.mean), _interval(cell.score), *shares, *cost]


def percent(share: float | None) -> str:
    """A share in percent, with the digits that a few hundred questions give."""
    return "-" if share is None else f"{100 * share:.1f}"


def _interval(share: Share) -> str:
    return f"{100 * share.low:.0f}-{100 * share.high:.0f}"
