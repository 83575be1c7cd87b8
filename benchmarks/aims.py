"""What the demo models are to reach, dense: `python -m benchmarks.aims --model demo --text FILE`.

RULER's needles at 8K and 32K tokens, and its harder tasks at 8K. Tasks that hide something in prose are asked
over every text (--text is repeatable), with the same number of questions each; the others have texts of their
own. Prints one table in Markdown, with a column for each of several models; started again, it goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.evaluated import TEXTS, TOPICS, Run, named, run_all, shown
from benchmarks.tables import table
from offload_decode.evals.stats import Share, wilson, wilson_of
from offload_decode.evals.summary import Cell, Summary


@dataclass(frozen=True)
class Aim:
    """A share of right answers that tasks are to reach at some lengths."""

    share: float
    in_prose: tuple[str, ...]
    others: tuple[str, ...]


NEEDLES = Aim(
    0.99,
    ("niah_single_2", "niah_single_3", "niah_multikey_1"),
    ("niah_single_1", "niah_multikey_2", "niah_multikey_3"),
)
SEVERAL = Aim(0.9, ("niah_multivalue", "niah_multiquery"), ("vt",))
COUNTED = Aim(0.8, (), ("cwe", "fwe"))
LENGTHS, SHORT = "8K,32K", "8K"


def runs(texts: Sequence[str], lengths: str, short: str, limit: int) -> list[Run]:
    """Dense alone; `limit` questions a task and length, shared among the texts where there are several."""
    each = -(-limit // len(texts))

    def asked(tasks: Sequence[str], lengths: str, limit: int) -> tuple[str, ...]:
        how = ("-s", "dense", "--lengths", lengths, "--limit", str(limit))
        return ("ruler", "--tasks", ",".join(tasks), *how)

    found = []
    for text in texts:
        found += [
            Run(f"needles-{named(text)}", asked(NEEDLES.in_prose, lengths, each), text),
            Run(f"several-{named(text)}", asked(SEVERAL.in_prose, short, each), text),
        ]
    found.append(Run("needles", asked(NEEDLES.others, lengths, limit)))
    found.append(Run("several", asked((*SEVERAL.others, *COUNTED.others), short, limit)))
    return found


@dataclass(frozen=True)
class Scored:
    """One task at one length, all texts together, beside its aim; `each`: the share of each text by name."""

    task: str
    length: int
    aim: float
    scores: tuple[float, ...]
    each: tuple[tuple[str, float], ...]
    control: float | None

    @property
    def share(self) -> Share:
        """Of right answers."""
        return wilson(self.scores)


def scored(summaries: dict[str, Summary]) -> list[Scored]:
    """Of one model, in the order of the aims."""
    found = []
    for aim in (NEEDLES, SEVERAL, COUNTED):
        for task in (*aim.in_prose, *aim.others):
            of = [(name, c) for name, summary in summaries.items() for c in summary.cells if c.task == task]
            for length in sorted({cell.length for _, cell in of}):
                here = [(name, cell) for name, cell in of if cell.length == length]
                found.append(_scored(aim.share, task, length, here))
    return found


def _scored(aim: float, task: str, length: int, of: list[tuple[str, Cell]]) -> Scored:
    control = [cell.control.mean for _, cell in of if cell.control]
    return Scored(
        task,
        length,
        aim,
        tuple(score for _, cell in of for score in cell.scores.values()),
        tuple((name.partition("-")[2], cell.score.mean) for name, cell in of),
        fmean(control) if control else None,
    )


def rows(found: Sequence[Scored]) -> list[list[str]]:
    """The worst task and the mean of all; then a row for each task and length, all texts together, and then
    each text by itself.
    """
    worst = _worst(found)
    every = [score for one in found for score in one.scores]
    return [
        [
            f"worst: {worst.task}",
            f"{worst.length:,}",
            str(len(worst.scores)),
            shown(worst.share),
            "",
            "",
            "",
            "",
        ],
        [f"mean of {len(found)}", "", str(len(every)), _mean(found), "", "", "", ""],
        *(
            [
                one.task,
                f"{one.length:,}",
                str(len(one.scores)),
                shown(one.share),
                ", ".join(f"{text} {100 * mean:.0f}" for text, mean in one.each if len(one.each) > 1),
                "-" if one.control is None else f"{100 * one.control:.0f}",
                f"{100 * one.aim:.0f}",
                verdict(one.aim, one.share),
            ]
            for one in found
        ),
    ]


def side_by_side(models: Mapping[str, Sequence[Scored]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of one table of several models: the worst task, the mean, and all tasks and lengths."""
    by_place = {name: {(one.task, one.length): one for one in found} for name, found in models.items()}
    aims = {place: one.aim for found in by_place.values() for place, one in found.items()}
    worst = map(_worst, models.values())
    heads = ["task", "tokens", *models, "aim"]
    return heads, [
        ["worst", "", *(f"{one.task} {shown(one.share)}" for one in worst), ""],
        ["mean", "", *map(_mean, models.values()), ""],
        *(
            [
                task,
                f"{length:,}",
                *(
                    shown(one.share) if (one := found.get((task, length))) else ""
                    for found in by_place.values()
                ),
                f"{100 * aim:.0f}",
            ]
            for (task, length), aim in aims.items()
        ),
    ]


def _worst(found: Sequence[Scored]) -> Scored:
    return min(found, key=lambda one: one.share.mean)


def _mean(found: Sequence[Scored]) -> str:
    """Of the tasks' means, with the interval of as many answers."""
    return shown(wilson_of(fmean(one.share.mean for one in found), sum(len(one.scores) for one in found)))


def verdict(aim: float, score: Share) -> str:
    """Whether the aim is reached, as far as so few questions tell."""
    if score.mean >= aim:
        return "met"
    return "not told apart" if score.high >= aim else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", help="repeatable: models side by side; default: demo")
    parser.add_argument("--text", action="append", help=TEXTS)
    parser.add_argument("--lengths", default=LENGTHS, help="tokens, for the needles")
    parser.add_argument("--short", default=SHORT, help="tokens, for the other tasks")
    parser.add_argument("--limit", type=int, default=100, help="questions for each task and length")
    parser.add_argument("--folder", type=Path, default=Path("aims"), help="where results are kept")
    given = parser.parse_args()
    asked = runs(given.text or [TOPICS], given.lengths, given.short, given.limit)
    models = {
        named(model): scored(run_all(asked, model, given.folder / named(model)))
        for model in given.model or ["demo"]
    }
    if len(models) > 1:
        print(table(*side_by_side(models)))
        return
    (found,) = models.values()
    heads = ["task", "tokens", "questions", "right in %, 95 %", "by text", "control", "aim", ""]
    print(table(heads, rows(found)))


if __name__ == "__main__":
    main()
