"""`offload-decode eval compare`: what changed from one run to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import output
from cli.options import Json, Quiet

if TYPE_CHECKING:
    from offload_decode.evals.compare import Change, Comparison


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The run before, as `eval` wrote it.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The run after.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what changed between two runs.

    And whether it is more than noise. Both are runs of one evaluation, with other models, selectors or
    versions. Cells are compared by task, length and way
    of answering: question by question where both runs asked the same questions of the same texts, else as two
    groups. The p-values are corrected for all cells.
    """
    from offload_decode.evals import results
    from offload_decode.evals.compare import compare, sentence

    found = compare(results.read(first), results.read(second))
    if as_json:
        output.answer_json(_plain(found) | {"verdict": sentence(found)})
        return
    output.answer(output.table([_HEADING, *map(_row, found.changes)]))
    output.answer(sentence(found))
    for line in _notes(found):
        output.note(line, quiet)


_HEADING = ["task", "tokens", "way", "before", "after", "change in points", "95 %", "p", "asked", ""]


def _row(change: Change) -> list[str]:
    from offload_decode.evals.lengths import label

    span = f"{100 * change.change.low:+.0f} to {100 * change.change.high:+.0f}"
    asked = f"{change.pairs:,} the same" if change.pairs else "others"
    scores = [f"{100 * cell.score.mean:.1f}" for cell in (change.before, change.after)]
    told = "more than noise" if change.more_than_noise else ""
    where = [change.task, label(change.length), change.way]
    return [*where, *scores, f"{100 * change.change.mean:+.1f}", span, f"{change.p:.2g}", asked, told]


def _notes(found: Comparison) -> list[str]:
    lines = [
        f"differs: {name}: {before!s:.200} -> {after!s:.200}"
        for name, (before, after) in found.differs.items()
    ]
    for cells, which in zip(found.only, ("first", "second"), strict=True):
        if cells:
            more = f" and {len(cells) - 3:,} more" if len(cells) > 3 else ""
            lines.append(f"only in the {which} run: {'; '.join(cells[:3])}{more}")
    if found.bytes_ratio is not None:
        lines.append(f"bytes moved a token: {found.bytes_ratio:.3g} times as many")
    if found.seconds_ratio is None:
        lines.append("times are not compared: the runs were made on different machines or devices")
    else:
        took = f"seconds a token: {found.seconds_ratio:.3g} times as long"
        lines.append(f"{took}, if nothing else ran on the machine either time")
    return lines


def _plain(found: Comparison) -> dict[str, Any]:
    changes = [
        {
            "task": change.task,
            "length": change.length,
            "way": change.way,
            "before": change.before.score.mean,
            "after": change.after.score.mean,
            "change": change.change.mean,
            "interval": [change.change.low, change.change.high],
            "p": change.p,
            "pairs": change.pairs,
            "more_than_noise": change.more_than_noise,
        }
        for change in found.changes
    ]
    return {
        "changes": changes,
        "only_in_first": found.only[0],
        "only_in_second": found.only[1],
        "differs": found.differs,
        "bytes_ratio": found.bytes_ratio,
        "seconds_ratio": found.seconds_ratio,
    }
