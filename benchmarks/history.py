"""Figures by commit: `python -m benchmarks.history [NAME] [--figures 'GLOB']`.

Every full run of a benchmark adds one line of JSON to `benchmarks/results/history.jsonl`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.machine import Machine, made_with
from benchmarks.tables import table

RESULTS = Path(__file__).parent / "results"
NAME = "history.jsonl"


def append(
    folder: Path, benchmark: str, settings: Mapping[str, Any], figures: Mapping[str, float], machine: Machine
) -> None:
    """Adds a run to the history in `folder`. `figures` are single numbers by name, ratios above all."""
    line = {
        "benchmark": benchmark,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **made_with(machine),
        "settings": dict(settings),
        "figures": dict(figures),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / NAME, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def commit() -> str:
    """The commit that is checked out, with a + where tracked files differ from it."""
    try:
        short = _git("rev-parse", "--short", "HEAD")
        return short + (
            "+"
            if _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
            else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read(folder: Path) -> list[dict[str, Any]]:
    """All runs, the oldest first."""
    path = folder / NAME
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(runs: Sequence[Mapping[str, Any]], pattern: str = "*", last: int = 6) -> str:
    """A table for each benchmark: a figure a row, one of the last runs a column."""
    parts = []
    for name in sorted({run["benchmark"] for run in runs}):
        own = [run for run in runs if run["benchmark"] == name][-last:]
        figures = list(dict.fromkeys(f for run in own for f in run["figures"]))
        rows = [
            [figure, *(_cell(run["figures"].get(figure)) for run in own)]
            for figure in figures
            if fnmatch(figure, pattern)
        ]
        heads = [name, *(f"{run['commit']} {run['date'][:10]}" for run in own)]
        parts.append(table(heads, rows))
    return "\n\n".join(parts)


def _cell(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.4g}"


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
