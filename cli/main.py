"""The `offload-decode` command: `app` has all commands, `main` is the console entry point."""

import atexit
import gc
import io
import logging
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from offload_decode.cli import (
    append,
    ask,
    batch,
    cache,
    chat,
    collect,
    demo,
    doctor,
    eval,
    index,
    inspect,
    mcp,
    models,
    output,
    plan,
    prefill,
    push_pull,
    renew,
    selectors,
    serve,
    verify,
)
from offload_decode.cli.errors import guard
from offload_decode.cli.options import PanelledCommand
from offload_decode.common.fast_import import skip_slow_imports


class Commands(TyperGroup):
    """Turns errors of commands into sentences and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        with guard():
            return super().invoke(ctx)


app = typer.Typer(
    name="offload-decode",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.answer(output.facts(doctor.versions()))
        raise typer.Exit


@app.callback()
def offload_decode(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version and what is installed, and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Prefill a corpus once, then answer questions from it again and again.

    Answers go to stdout, progress to stderr. Exit codes: 0 success, 1 a failure, 2 wrong use.
    """


for command in (
    *(prefill.prefill, append.append, renew.renew, collect.collect, plan.plan, index.index),
    *(ask.ask, chat.chat, batch.batch, serve.serve, mcp.mcp, models.models, selectors.selectors),
    *(inspect.inspect, verify.verify, push_pull.push, push_pull.pull, cache.cache, demo.demo, doctor.doctor),
):
    panelled = command in (ask.ask, chat.chat, batch.batch)
    app.command(command.__name__, cls=PanelledCommand if panelled else None)(command)
app.add_typer(eval.app, name="eval")


class _Notes(logging.Handler):
    """Prints what takes a while as a model is loaded, such as hashing its weights."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:  # a server has its own form
            output.note(record.getMessage())


def main() -> None:
    """Run the command that the arguments name, and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an answer must not fail on a terminal's encoding
    gc.set_threshold(50_000, 20, 20)  # imports make a million objects, none of them garbage
    skip_slow_imports()
    for name in ("models.gguf_cache", "common.slow_work"):
        slow = logging.getLogger(f"offload_decode.{name}")
        slow.setLevel(logging.INFO)
        slow.addHandler(_Notes())
    atexit.register(_leave_garbage)
    app()


def _leave_garbage() -> None:
    """Skip the last garbage collection, which takes half a second with torch loaded; but not with Triton,
    which would print a page on stderr about leftovers.
    """
    if "triton" not in sys.modules:
        gc.freeze()
