"""Every full run of a benchmark adds one line of JSON to `benchmarks/results/history.jsonl`."""

import argparse
import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
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
    """Everything to `--json`, where it was given; the figures of a full run, which are single numbers by
    name, ratios above all, to the history.
    """
    found = {**made_with(host), "settings": settings, "figures": figures}
    if arguments.json:
        arguments.json.write_text(json.dumps({**found, **details}, indent=1) + "\n", encoding="utf-8")
    if not arguments.quick:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        line = {"benchmark": benchmark, "commit": commit(), "date": date, **found}
        arguments.results.mkdir(parents=True, exist_ok=True)
        with open(arguments.results / NAME, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def commit() -> str:
    """The commit that is checked out, with a + where tracked files differ from it."""
    try:
        short = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return short + ("+" if changed else "")


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
