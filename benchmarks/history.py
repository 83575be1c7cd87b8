"""Figures by commit: `python -m benchmarks.history [NAME] [--figures 'GLOB']`.

Every full run of a benchmark adds one line of JSON to `benchmarks/results/history.jsonl`.
"""

import argparse
import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.machine import Machine, made_with

RESULTS = Path(__file__).parent / "results"
NAME = "history.jsonl"


def option_parser(about: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark of the history has."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    made.add_argument("--json", type=Path, help="save everything that was measured")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder of the history")
    return made


def begin(arguments: argparse.Namespace, title: str) -> Machine:
    """The machine, measured and printed under the title of a benchmark."""
    host = machine.measure(arguments.quick)
    print(f"# {title}\n\n{host.lines()}\n", flush=True)
    return host


def save(
    arguments: argparse.Namespace,
    benchmark: str,
    settings: Mapping[str, Any],
    figures: Mapping[str, float],
    host: Machine,
    **details: Any,
) -> None:
    """Everything to `--json`, where it was given; the figures of a full run to the history."""
    if arguments.json:
        saved = {"settings": settings, **made_with(host), "figures": figures, **details}
        arguments.json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if not arguments.quick:
        append(arguments.results, benchmark, settings, figures, host)


def append(
    folder: Path, benchmark: str, settings: Mapping[str, Any], figures: Mapping[str, float], host: Machine
) -> None:
    """Adds a run to the history in `folder`. `figures` are single numbers by name, ratios above all."""
    line = {
        "benchmark": benchmark,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **made_with(host),
        "settings": settings,
        "figures": figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / NAME, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def commit() -> str:
    """The commit that is checked out, with a + where tracked files differ from it."""
    try:
        short = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return short + ("+" if changed else "")


def read(folder: Path) -> list[dict[str, Any]]:
    """All runs, the oldest first."""
    path = folder / NAME
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(runs: Sequence[Mapping[str, Any]], pattern: str = "*", last: int = 6) -> str:
    """A table for each benchmark: a figure a row, one of the last runs a column."""
    parts = []
    for name in sorted({run["benchmark"] for run in runs}):
        shown = [run for run in runs if run["benchmark"] == name][-last:]
        figures = dict.fromkeys(figure for run in shown for figure in run["figures"])
        rows = [
            [figure, *(f"{run['figures'][figure]:.4g}" if figure in run["figures"] else "" for run in shown)]
            for figure in figures
            if fnmatch(figure, pattern)
        ]
        parts.append(table([name, *(f"{run['commit']} {run['date'][:10]}" for run in shown)], rows))
    return "\n\n".join(parts)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns for people, which are a table in Markdown too; the first column to the left."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(heads), rule, *(line(row) for row in rows)])


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benchmark", nargs="?", help="only this one, such as `step`")
    parser.add_argument("--figures", default="*", help="only the figures of these names, such as '*131072*'")
    parser.add_argument("--last", type=int, default=6, help="runs that are shown of each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the history lies")
    arguments = parser.parse_args()
    runs = [run for run in read(arguments.results) if arguments.benchmark in (None, run["benchmark"])]
    print(show(runs, arguments.figures, arguments.last) or "There is no such run.")


if __name__ == "__main__":
    main()
