"""The papers' methods side by side on one model: `python -m benchmarks.papers --model demo --text FILE`.

Dense attention; top-k with 2 % of the stored tokens, the same with more tokens for later layers (linear), and
with fixed budgets; Quest by budget; estimates of the unselected tail where words or names are counted; and a
prefill by QuoKA with 25 %, asked densely and with QuoKA's own 25 %. Prints tables in Markdown; stopped and
started again, it goes on. docs/papers.md puts what the papers report beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evaluated import TEXTS, TOPICS, Run, named, run_all, shown
from benchmarks.tables import table
from offload_decode.evals.contender import DENSE
from offload_decode.evals.summary import TRUSTED, Cell, Place, Summary, budget_of

SHARE = "2%"
BUDGETS = "64,256,1024,4096"
FOUND = ("niah_single_2", "niah_multikey_1", "niah_multikey_2", "niah_multivalue", "vt")
COUNTED = ("cwe", "fwe")
SHARED = ("niah_multikey_1", "niah_multikey_2")  # of which four questions share a text
MENTIONS = ("count-mentions",)
TAILS = ("clusters", "sample")
SPARSE = "quoka:budget=25%"
# Quest leaves a model's first two layers dense; with so few layers nothing would be left to choose in.
QUEST = "quest:dense_layers="


def selected(budgets: str, tails: bool) -> tuple[str, ...]:
    """The selectors as options of `eval`."""
    ways = [f"topk:budget={SHARE}", f"topk:budget={SHARE},schedule=linear", "topk", QUEST]
    ways += [f"topk:budget={SHARE},tail={tail}" for tail in TAILS if tails]
    return (*(part for way in ways for part in ("-s", way)), "--budgets", budgets)


def runs(text: str, lengths: Sequence[str], limit: int, budgets: str) -> list[Run]:
    """Every length by itself: the first has all tasks, longer ones those of which several questions share a
    text, for a long prefill takes longer than its answers.
    """
    found = []
    for number, length in enumerate(lengths):
        how = ("--lengths", length, "--limit", str(limit))
        finding, counting = (SHARED, ()) if number else (FOUND, COUNTED)
        asked = {
            "found": ("ruler", finding, selected(budgets, tails=False)),
            "counted": ("ruler", counting, selected(budgets, tails=True)),
            "mentions": ("aggregate", MENTIONS, selected(budgets, tails=True)),
            "quoka": ("ruler", (*finding, *counting), ("--prefill", SPARSE, "-s", SPARSE)),
        }
        for name, (suite, tasks, ways) in asked.items():
            if tasks:
                arguments = (suite, "--tasks", ",".join(tasks), *how, *ways)
                found.append(Run(f"{name}-{length}-{named(text)}", arguments, text))
    return found


def cells_of(summaries: dict[str, Summary]) -> list[Cell]:
    """The cells of all runs over stores that were prefilled densely."""
    return [cell for name, s in summaries.items() if not name.startswith("quoka") for cell in s.cells]


def by_method(summaries: dict[str, Summary], length: int) -> tuple[list[str], list[list[str]]]:
    """A row for each method, a column for each task: right answers in percent with their interval."""
    scores: dict[str, dict[str, str]] = {}
    for name, summary in summaries.items():
        for cell in summary.cells:
            if cell.length == length:
                way = f"QuoKA prefill, {cell.way}" if name.startswith("quoka") else cell.way
                scores.setdefault(way, {})[cell.task] = shown(cell.score)
    tasks = list(dict.fromkeys(task for by_task in scores.values() for task in by_task))
    return ["method", *tasks], [
        [way, *(found.get(task, "") for task in tasks)] for way, found in scores.items()
    ]


def enough(summaries: dict[str, Summary]) -> tuple[list[str], list[list[str]]]:
    """For each task and length the smallest budget from which on 99 % of dense are reached, by selector."""
    dense = {(cell.task, cell.length): cell for cell in cells_of(summaries) if cell.way == DENSE}
    reached: dict[Place, dict[str, Cell | None]] = {}
    for name, summary in summaries.items():
        if not name.startswith("quoka"):
            reached |= summary.reaching()
    families = list(dict.fromkeys(family for found in reached.values() for family in found))
    rows = []
    for place, cell in dense.items():
        told = [_budget(cell, reached.get(place, {}), family) for family in families]
        rows.append([place[0], f"{place[1]:,}", shown(cell.score), *told])
    return ["task", "tokens", "dense", *families], rows


def _budget(dense: Cell, found: dict[str, Cell | None], family: str) -> str:
    if dense.score.mean < TRUSTED:
        return f"dense is under {TRUSTED:.0%}"
    if family not in found:
        return ""
    cell = found[family]
    return "none of these" if cell is None else f"{budget_of(cell.way)} ({cell.attended / cell.stored:.2%})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", action="append", help=TEXTS)
    parser.add_argument(
        "--lengths", default="8K,32K", help="tokens; from the second on fewer tasks are asked"
    )
    parser.add_argument("--limit", type=int, default=24, help="questions for each task and length")
    parser.add_argument("--budgets", default=BUDGETS, help="tokens, for top-k and Quest")
    parser.add_argument("--folder", type=Path, default=Path("papers"), help="where results are kept")
    given = parser.parse_args()
    for text in given.text or [TOPICS]:
        asked = runs(text, given.lengths.split(","), given.limit, given.budgets)
        summaries = run_all(asked, given.model, given.folder / named(given.model))
        for length in sorted({cell.length for cell in cells_of(summaries)}):
            print(f"\n{given.model}, {named(text)}, {length:,} tokens: right in %, with 95 % intervals\n")
            print(table(*by_method(summaries, length)))
        print("\nThe smallest budget from which on 99 % of dense are reached, and its share of the tokens\n")
        print(table(*enough(summaries)), flush=True)


if __name__ == "__main__":
    main()
