"""Folders that are watched: by what the system tells of them, and now and then in any case."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Event

log = logging.getLogger("offload_decode.server")

POLL_S = 2.0
"""File systems of a network tell nothing, nor is it told what happens below the folders."""
_SETTLE_MS, _STEP_MS = 100, 50


def watch(folders: Iterable[Path], stop: Event, changed: Callable[[], None]) -> None:
    """Call `changed` when something came into one of `folders` or went, and every `POLL_S`, until `stop` is
    set. An error of the file system is logged, and it goes on.
    """
    for _ in _moments([*folders], stop):
        if stop.is_set():
            return
        try:
            changed()
        except OSError as error:
            log.warning("%s cannot be looked at: %s", error.filename, error.strerror)
        except Exception:  # whatever it was, the next change is noticed
            log.exception("a look at the folders failed")


def _moments(folders: list[Path], stop: Event) -> Iterator[object]:
    try:
        from watchfiles import watch as notified

        yield from notified(
            *folders,
            watch_filter=None,
            debounce=_SETTLE_MS,
            step=_STEP_MS,
            stop_event=stop,
            rust_timeout=int(POLL_S * 1000),
            yield_on_timeout=True,
            raise_interrupt=False,
            recursive=False,
            ignore_permission_denied=True,
        )
    # The package is not there, no watch is to be had, or a name in a folder is no text (a RuntimeError).
    except (ImportError, OSError, RuntimeError) as error:
        log.info("folders are looked at every %.0f s, because %s", POLL_S, error)
    while not stop.wait(POLL_S):
        yield None
