"""What the scripts share: how they read options, the command line tool, and tables."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOOL = str(Path(sys.executable).with_name("offload-decode"))


def option_parser(about: str | None) -> argparse.ArgumentParser:
    """Whose help is the docstring of a script as it stands there."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def lines_of(out: Path) -> list[dict[str, Any]]:
    """What a JSONL file of answers has so far, with which the same command goes on."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under their heads; the first column to the left."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(heads), rule, *(line(row) for row in rows)])
