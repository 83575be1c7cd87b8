"""`offload-decode eval compare`: what changed from one run to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload_decode.cli import output
from offload_decode.cli.options import Json, Quiet

if TYPE_CHECKING:
    from offload_decode.evals.compare import Change, Comparison, Mean


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
    groups. The p-values are corrected for all cells. The means over all tasks stand first; there p-values are
    of texts, and are corrected for these means alone.
    """
    from offload_decode.evals import runs
    from offload_decode.evals.compare import compare, sentence

    found = compare(runs.read(first), runs.read(second))
    if as_json:
        output.answer_json(_plain(found) | {"verdict": sentence(found)})
        return
    output.answer(output.table([_HEADING, *map(_mean, found.means), *map(_row, found.changes)]))
    output.answer(sentence(found))
    for line in _notes(found):
        output.note(line, quiet)


_HEADING = ["task", "tokens", "way", "before", "after", "change in points", "95 %", "p", "asked", ""]


def _row(change: Change) -> list[str]:
    scores = change.before.score.mean, change.after.score.mean
    asked = f"{change.pairs:,} the same" if change.pairs else "others"
    return _cells(change.task, change, scores, asked)


def _mean(mean: Mean) -> list[str]:
    asked = f"{mean.pairs:,} the same texts" if mean.pairs else "others"
    return _cells(f"mean of {mean.tasks} tasks", mean, (mean.before, mean.after), asked)


def _cells(task: str, of: Change | Mean, scores: tuple[float, float], asked: str) -> list[str]:
    from offload_decode.evals.lengths import label

    span = f"{100 * of.change.low:+.0f} to {100 * of.change.high:+.0f}"
    told = "more than noise" if of.more_than_noise else ""
    both = [f"{100 * score:.1f}" for score in scores]
    where = [task, label(of.length), of.way]
    return [*where, *both, f"{100 * of.change.mean:+.1f}", span, f"{of.p:.2g}", asked, told]


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


def _tested(of: Change | Mean) -> dict[str, Any]:
    return {
        "change": of.change.mean,
        "interval": [of.change.low, of.change.high],
        "p": of.p,
        "more_than_noise": of.more_than_noise,
    }


def _plain(found: Comparison) -> dict[str, Any]:
    changes = [
        {
            "task": change.task,
            "length": change.length,
            "way": change.way,
            "before": change.before.score.mean,
            "after": change.after.score.mean,
            **_tested(change),
            "pairs": change.pairs,
        }
        for change in found.changes
    ]
    means = [
        {
            "tasks": mean.tasks,
            "length": mean.length,
            "way": mean.way,
            "before": mean.before,
            "after": mean.after,
            **_tested(mean),
            "texts": mean.pairs,
        }
        for mean in found.means
    ]
    return {
        "means": means,
        "changes": changes,
        "only_in_first": found.only[0],
        "only_in_second": found.only[1],
        "differs": found.differs,
        "bytes_ratio": found.bytes_ratio,
        "seconds_ratio": found.seconds_ratio,
    }
