"""The `offload-decode` command: `app` has all commands, `console` is the entry point, `main` for programs."""

import atexit
import gc
import io
import logging
import os
import sys
import threading
from contextlib import suppress
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


def console() -> None:
    """`main`, without the third of a second in which Python frees what the system frees anyway."""
    try:
        main()
    except SystemExit as ended:
        _leave(ended.code)
        raise


def main() -> None:
    """Run the command that the arguments name, and raise `SystemExit` with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an answer must not fail on a terminal's encoding
    _collect_little_garbage()
    skip_slow_imports()
    for name in ("models.gguf_cache", "common.slow_work"):
        slow = logging.getLogger(f"offload_decode.{name}")
        slow.setLevel(logging.INFO)
        slow.addHandler(_Notes())
    app()


def _collect_little_garbage() -> None:
    """Look for garbage first among a million objects: imports make half of them, none of it garbage."""

    def usually(*_: object) -> None:
        gc.callbacks.remove(usually)
        gc.set_threshold(50_000, 20, 20)

    gc.callbacks.append(usually)
    gc.set_threshold(1_000_000)


def _measured() -> bool:
    """Whether a profiler or a tracer is at work: from Python 3.12 on cProfile is one of `sys.monitoring`."""
    tools = getattr(sys, "monitoring", None)
    known = tools is not None and any(tools.get_tool(number) is not None for number in range(6))
    return known or sys.getprofile() is not None or sys.gettrace() is not None


def _leave(code: object) -> None:
    """End the process as Python does, up to the point where it frees its objects one by one."""
    others = set(threading.enumerate()) - {threading.main_thread()}
    if not isinstance(code, int) or not all(one.daemon for one in others):
        return  # Python writes a message, or waits for threads
    if _measured():
        return  # whoever measures has yet to write
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # of which Python makes a code of its own
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)
