"""What the answers of a run come to: accuracies with intervals, beside chance and dense attention, and
whether these mean anything.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product, takewhile
from statistics import fmean, median

from offload_decode.common.errors import ConfigError
from offload_decode.evals import runs
from offload_decode.evals.contender import DENSE, label
from offload_decode.evals.runs import GUESSES, AnswerRecord, QuestionRecord, Results, grouped
from offload_decode.evals.stats import CONFIDENCE, Share, exceeding, larger, mean_of, wilson, wilson_of

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
    answers', `seconds` the median; all but `stored` a generated token. `ratio` is to dense attention on the
    same questions, where that is `TRUSTED`. `ruler` is RULER's string match, `exact` and `f1` are SQuAD's
    measures (None: no short answers).
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
    exact: float | None = None
    f1: float | None = None

    @property
    def at_chance(self) -> bool:
        """Whether it is no better than chance, as far as can be told."""
        return not self.above_chance()

    @property
    def chance(self) -> Share:
        """What guesses score, or the control where that is surely more. Every question was guessed at many
        times, so that chance is known better than the score.
        """
        guess = wilson_of(self.guess, self.score.count * GUESSES)
        if self.control is not None and larger(self.control, guess) < (1 - CONFIDENCE) / 2:
            return self.control
        return guess

    def above_chance(self, confidence: float = CONFIDENCE) -> bool:
        """Whether the score is larger than chance."""
        scores, chance = list(self.scores.values()), self.chance
        if self.luckiest < 1 and chance is not self.control and any(0 < score < 1 for score in scores):
            luck = exceeding(scores, self.luckiest, chance.count)
        else:
            luck = larger(self.score, chance)
        return luck < (1 - confidence) / 2

    def could_be_above_chance(self, confidence: float) -> bool:
        """Whether right answers to all of its questions would be, or whether these are too few to tell."""
        return larger(Share(1.0, self.score.count, 0.0, 1.0), self.chance) < (1 - confidence) / 2

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
                if cells and all(cell.ratio is not None for cell in cells):
                    cells.sort(key=lambda cell: -cell.attended)
                    enough = [*takewhile(lambda cell: (cell.ratio or 0.0) >= REACHED, cells)]
                    found.setdefault(place, {})[family] = enough[-1] if enough else None
        return found

    def families(self) -> dict[str, list[str]]:
        """Ways that differ in their budget alone, by what they have in common."""
        return grouped((way for way in self.ways if way != DENSE), without_budget)


def without_budget(way: str) -> str:
    """`quest:page_size=32` of `quest:budget=64,page_size=32`."""
    name, _, options = way.partition(":")
    others = ",".join(each for each in options.split(",") if each and not each.startswith("budget="))
    return f"{name}:{others}" if others else name


def budget_of(way: str) -> str | None:
    """`64` of `quest:budget=64,page_size=32`; None where a way names none."""
    found = re.search(r"(?:^|,)budget=([^,]*)", way.partition(":")[2])
    return found and found[1]


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
    return Summary(results.header.evaluation, ordered, (len(results.finished), results.header.units))


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
        luckiest=min(1.0, GUESSES * max(asked.guess for asked, _ in answers)),
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
HEADING += ["attended", "of dense", ""]


def rows(summary: Summary) -> list[list[str]]:
    """Of every length and way, the worst task, the mean over tasks, and then each task."""
    found = [HEADING]
    for head in summary.headlines():
        where = [head.way, label(head.length)]
        if head.tasks > 1:
            mean = [*where, percent(head.mean.mean), _interval(head.mean)]
            found.append(_row(f"worst: {head.worst.task}", where, head.worst))
            found.append([f"mean of {head.tasks} tasks", *mean, *[""] * 8])
        found += [_row(cell.task, where, cell) for cell in summary.at(head.length, head.way)]
    return found


def _row(name: str, where: list[str], cell: Cell) -> list[str]:
    control = None if cell.control is None else cell.control.mean
    shares = map(percent, (cell.ruler.mean, cell.exact, cell.f1, control, cell.guess))
    cost = [f"{cell.attended:,.0f}", percent(cell.ratio)]
    told = "no better than chance" if cell.at_chance else ""
    return [name, *where, percent(cell.score.mean), _interval(cell.score), *shares, *cost, told]


def percent(share: float | None) -> str:
    """A share in percent, with the digits that a few hundred questions give."""
    return "-" if share is None else f"{100 * share:.1f}"


def _interval(share: Share) -> str:
    return f"{100 * share.low:.0f}-{100 * share.high:.0f}"


def verdict(summary: Summary) -> list[str]:
    """Sentences, the gravest first; none where there is nothing to warn of."""
    done, units = summary.units
    unfinished = f"The run is not finished: {done:,} of {units:,} parts are measured." if done < units else ""
    said = [_chance(summary), _controls(summary), _dense(summary), unfinished]
    return [sentence for sentence in said if sentence]


def at_chance(summary: Summary) -> list[str]:
    """Tasks that no way answers better than chance at any length, sure of all together (Bonferroni)."""
    confidence = _confidence(summary)
    above = {cell.task for cell in summary.cells if cell.above_chance(confidence)}
    return [task for task in summary.tasks if task not in above]


def _confidence(summary: Summary) -> float:
    return 1 - (1 - CONFIDENCE) / len(summary.cells)


def _chance(summary: Summary) -> str:
    tasks = at_chance(summary)
    if not any(cell.could_be_above_chance(_confidence(summary)) for cell in summary.cells):
        most = max(cell.score.count for cell in summary.cells)
        asked = f"{most} question{'s' if most > 1 else ''} for each task and length"
        return (
            f"At most {asked}: even right answers to all of them could not be told from chance, all "
            "cells considered. Ask more (--limit)."
        )
    if len(tasks) == len(summary.tasks):
        which = f"the task {tasks[0]}" if len(tasks) == 1 else "every task"
        return (
            f"This model answers no better than chance on {which}, in every way that was measured: "
            "nothing here says anything about a selector."
        )
    single = {cell.task for cell in summary.cells if not cell.at_chance}
    parts = {
        "No better than chance, in every way: {} (of {} tasks).": [t for t in tasks if t not in single],
        "Better than chance in single cells of {} (of {} tasks), which among so many cells may be luck: "
        "ask more (--limit).": [t for t in tasks if t in single],
    }
    return " ".join(
        said.format(", ".join(named), len(summary.tasks)) for said, named in parts.items() if named
    )


def _controls(summary: Summary) -> str:
    """What is answered beyond guessing where the facts were taken out was not read from the text."""
    places = {(cell.task, cell.length): cell for cell in summary.cells}
    confidence = 1 - (1 - CONFIDENCE) / len(places)
    answered: dict[str, float] = {}
    for (task, _), cell in places.items():
        if (control := cell.control) and wilson_of(control.mean, control.count, confidence).low > cell.guess:
            answered[task] = max(control.mean, answered.get(task, 0.0))
    if not answered:
        return ""
    most = 100 * max(answered.values())
    return (
        f"The control was answered in up to {most:.2g} %, although the facts were taken out of its "
        f"texts ({', '.join(answered)}): do not trust the accuracies there."
    )


def _dense(summary: Summary) -> str:
    dense = [cell for cell in summary.cells if cell.way == DENSE]
    lost = at_chance(summary)
    weak = dict.fromkeys(cell.task for cell in dense if cell.score.mean < TRUSTED and cell.task not in lost)
    if not weak:
        return ""
    return (
        f"Dense attention itself is under {100 * TRUSTED:.0f} % in {', '.join(weak)}: "
        "no ratio to dense is given where it is."
    )
