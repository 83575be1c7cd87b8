"""What the demo models are to reach, dense: `python -m benchmarks.aims --model demo --text FILE`.

RULER's needles at 8K and 32K tokens, and its harder tasks at 8K. Tasks that hide something in prose are asked
over every text (--text is repeatable), with the same number of questions each; the others have texts of their
own. Prints one table in Markdown; stopped and started again, it goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.evaluated import TEXTS, TOPICS, Run, named, run_all, shown
from benchmarks.tables import table
from offload_decode.evals.intervals import Share, wilson
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


def verdict(aim: float, score: Share) -> str:
    """Whether the aim is reached, as far as so few questions tell."""
    if score.mean >= aim:
        return "met"
    return "not told apart" if score.high >= aim else "missed"


def rows(summaries: dict[str, Summary]) -> list[list[str]]:
    """A row for each task and length, all texts together, and then each text by itself."""
    found = []
    for aim in (NEEDLES, SEVERAL, COUNTED):
        for task in (*aim.in_prose, *aim.others):
            of = [(name, c) for name, summary in summaries.items() for c in summary.cells if c.task == task]
            for length in sorted({cell.length for _, cell in of}):
                found.append(_row(aim, task, length, [(n, c) for n, c in of if c.length == length]))
    return found


def _row(aim: Aim, task: str, length: int, of: list[tuple[str, Cell]]) -> list[str]:
    cells = [cell for _, cell in of]
    score = wilson([score for cell in cells for score in cell.scores.values()])
    control = [cell.control.mean for cell in cells if cell.control]
    each = [f"{name.partition('-')[2]} {100 * cell.score.mean:.0f}" for name, cell in of if len(of) > 1]
    return [
        task,
        f"{length:,}",
        str(score.count),
        shown(score),
        ", ".join(each),
        f"{100 * fmean(control):.0f}" if control else "-",
        f"{100 * aim.share:.0f}",
        verdict(aim.share, score),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", action="append", help=TEXTS)
    parser.add_argument("--lengths", default=LENGTHS, help="tokens, for the needles")
    parser.add_argument("--short", default=SHORT, help="tokens, for the other tasks")
    parser.add_argument("--limit", type=int, default=100, help="questions for each task and length")
    parser.add_argument("--folder", type=Path, default=Path("aims"), help="where results are kept")
    given = parser.parse_args()
    folder = given.folder / named(given.model)
    asked = runs(given.text or [TOPICS], given.lengths, given.short, given.limit)
    summaries = run_all(asked, given.model, folder)
    heads = ["task", "tokens", "questions", "right in %, 95 %", "by text", "control", "aim", ""]
    print(table(heads, rows(summaries)))


if __name__ == "__main__":
    main()
