"""`offload-decode eval compare` and `report`: what changed between two runs, and runs as one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from offload_decode.cli import output
from offload_decode.cli.options import Json, Quiet, argument, option
from offload_decode.common.errors import ConfigError

if TYPE_CHECKING:
    from offload_decode.evals.compare import Change, Comparison


def compare(
    first: Annotated[Path, argument("A", "The run before, as `eval` wrote it.")],
    second: Annotated[Path, argument("B", "The run after.")],
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
    from offload_decode.evals.compare import compare

    found = compare(runs.read(first), runs.read(second))
    if as_json:
        output.answer_json(_plain(found))
        return
    output.answer(output.table([_HEADING, *map(_row, (*found.means, *found.changes))]))
    for line in _notes(found):
        output.note(line, quiet)


_HEADING = ["task", "tokens", "way", "before", "after", "change in points", "95 %", "p", "asked", ""]


def _row(change: Change) -> list[str]:
    from offload_decode.evals.contender import label

    task = change.task or f"mean of {change.tasks} tasks"
    scores = [f"{100 * score:.1f}" for score in (change.before, change.after)]
    points = f"{100 * change.change.mean:+.1f}"
    span = f"{100 * change.change.low:+.0f} to {100 * change.change.high:+.0f}"
    same = f"{change.pairs:,} the same{'' if change.task else ' texts'}"
    told = "more than noise" if change.more_than_noise else ""
    where = [task, label(change.length), change.way]
    return [*where, *scores, points, span, f"{change.p:.2g}", same if change.pairs else "others", told]


def _notes(found: Comparison) -> list[str]:
    changed = found.differs.items()
    lines = [f"differs: {name}: {before!s:.200} -> {after!s:.200}" for name, (before, after) in changed]
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
    def plain(of: Change) -> dict[str, Any]:
        about: dict[str, Any] = {"task": of.task} if of.task else {"tasks": of.tasks}
        about |= {"length": of.length, "way": of.way, "before": of.before, "after": of.after}
        about |= {"change": of.change.mean, "interval": [of.change.low, of.change.high], "p": of.p}
        return about | {"more_than_noise": of.more_than_noise, "pairs" if of.task else "texts": of.pairs}

    return {
        "means": list(map(plain, found.means)),
        "changes": list(map(plain, found.changes)),
        "only_in_first": found.only[0],
        "only_in_second": found.only[1],
        "differs": found.differs,
        "bytes_ratio": found.bytes_ratio,
        "seconds_ratio": found.seconds_ratio,
    }


def report(
    runs: Annotated[list[Path], argument("RUN…", "Files of evaluations: .jsonl, fidelity.json.")],
    out: Annotated[Path, option("FILE", "Where the page is written.")] = Path("report.html"),
    force: Annotated[bool, option(None, "Replace a page that is there.", "--force")] = False,
    quiet: Quiet = False,
) -> None:
    """Show runs on one page.

    The page needs nothing from elsewhere: it can be opened, printed and sent as it is. It shows the worst
    task and the mean; accuracy with intervals by task and budget, against tokens loaded, and by depth;
    likelihoods, sparsity and fidelity where they were measured; speed; answers that were wrong; and what each
    was measured with.
    """
    if out.exists() and not force:
        raise ConfigError(f"{out} exists already: choose another --out, or say --force")

    from offload_decode.common import files
    from offload_decode.evals.report.page import page

    text = page(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write(out, text.encode())
    output.note(str(out), quiet)
