"""Errors as users see them: one sentence on stderr and an exit code, never a traceback."""

import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import typer

from offload_decode.cli.output import note, one_line
from offload_decode.common.errors import (
    ConfigError,
    NotCompiled,
    OffloadDecodeError,
    OffloadDecodeWarning,
    UnknownIndex,
)
from offload_decode.common.memory import OUT_OF_MEMORY, is_out_of_memory

FAILURE, WRONG_USE, INTERRUPTED = 1, 2, 130
DEBUG = "OFFLOAD_DECODE_DEBUG"


@contextmanager
def guard() -> Iterator[None]:
    """Turn exceptions into a sentence and `typer.Exit`; OFFLOAD_DECODE_DEBUG=1 adds the traceback."""
    _hush_libraries()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed before the command began
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        with warnings.catch_warnings():
            if not os.environ.get(DEBUG):
                warnings.simplefilter("ignore")
            warnings.filterwarnings("default", category=OffloadDecodeWarning)
            warnings.showwarning = partial(_show, warnings.showwarning)
            yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader has left. Python flushes stdout once more when it exits: let that succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILURE) from None
    except Exception as error:
        if type(error).__module__.startswith(("typer", "click")):  # exits, and wrong use that click reports
            raise
        if os.environ.get(DEBUG):
            traceback.print_exc()
        note(f"error: {sentence(error)}")
        raise typer.Exit(exit_code(error)) from None


def _show(
    others: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any, **more: Any
) -> None:
    if issubclass(category, OffloadDecodeWarning):
        print(message, file=sys.stderr)
    else:
        others(message, category, *where, **more)


def sentence(error: BaseException) -> str:
    """What went wrong and what to do, in one line that is safe on a terminal."""
    reason = one_line(" ".join(re.split("[ \t\n]+", str(error).strip())))
    if isinstance(error, OffloadDecodeError):
        return reason
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if _lacks_files(error):
        return "no more files may be opened: allow more (ulimit -n 1024), and run the same again"
    if isinstance(error, PermissionError) and error.filename is not None:
        return one_line(f"{error.filename} may not be opened: change its permissions, or ask its owner")
    if isinstance(error, OSError) and error.strerror:
        parts = (error.filename, error.strerror)
        return one_line(": ".join(str(part) for part in parts if part is not None))
    return f"unexpected {type(error).__name__}: {reason}; set {DEBUG}=1 to see where it comes from"


def _lacks_files(error: BaseException | None) -> bool:
    """Whether a limit of open files is behind an error, however libraries failed over it."""
    own = isinstance(error, OSError) and error.errno == errno.EMFILE
    return own or (error is not None and _lacks_files(error.__cause__ or error.__context__))


def exit_code(error: BaseException) -> int:
    """2 for wrong use, 1 for any other failure."""
    return WRONG_USE if isinstance(error, ConfigError | NotCompiled | UnknownIndex) else FAILURE


def _hush_libraries() -> None:
    """No advice from libraries on stderr, and their progress bars only on a terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
