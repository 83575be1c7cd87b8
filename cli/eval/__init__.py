"""`offload-decode eval`: measures of answers, one file a command."""

from __future__ import annotations

import typer

from offload_decode.cli.eval import (
    ablation,
    aggregate,
    compare,
    fidelity,
    needle,
    passkey,
    perplexity,
    report,
    ruler,
    sparsity,
)

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure how good the answers are.")
app.command("needle")(needle.needle)
app.command("ruler")(ruler.ruler)
app.command("aggregate")(aggregate.aggregate)
app.command("passkey")(passkey.passkey)
app.command("ablation")(ablation.ablation)
app.command("fidelity")(fidelity.fidelity)
app.command("perplexity")(perplexity.perplexity)
app.command("sparsity")(sparsity.sparsity)
app.command("report")(report.report)
app.command("compare")(compare.compare)
