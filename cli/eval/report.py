"""`offload-decode eval report`: runs as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload_decode.cli import output
from offload_decode.cli.options import Quiet, option
from offload_decode.common.errors import ConfigError


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Files of evaluations: .jsonl, needle.json, fidelity.json."),
    ],
    out: Annotated[Path, option("FILE", "Where the page is written.")] = Path("report.html"),
    force: Annotated[bool, option(None, "Replace a page that is there.", "--force")] = False,
    quiet: Quiet = False,
) -> None:
    """Show runs on one page.

    The page needs nothing from elsewhere: it can be opened, printed and sent as it is. First it says whether
    the model does better than chance, and shows the worst task and the mean; then accuracy with intervals by
    task and budget, against tokens loaded, and by depth; likelihoods and sparsity where they were measured;
    speed; answers that were wrong; and what each was measured with.
    """
    if out.exists() and not force:
        raise ConfigError(f"{out} exists already: choose another --out, or say --force")

    from offload_decode.common import files
    from offload_decode.evals.report.page import page

    text = page(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write(out, text.encode())
    output.note(str(out), quiet)
