"""`offload-decode eval`: measures of answers."""

import typer

from offload_decode.cli.eval import compare, fidelity, perplexity, sparsity, suites

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure how good the answers are.")
for command in (
    *(suites.needle, suites.ruler, suites.aggregate, suites.passkey),
    *(fidelity.fidelity, perplexity.perplexity, sparsity.sparsity, compare.report, compare.compare),
):
    app.command(command.__name__)(command)
