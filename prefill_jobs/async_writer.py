"""What a chunk adds to a store: written at once on a CPU, behind the computation where a card computes.

Behind it, a thread writes in the order in which it was given things: rows of a layer leave as soon as the
layer has them, through pinned memory and on a stream of their own. At most `QUEUED` of them wait, so that a
slow disk slows the card and takes no memory. A chunk is committed after all of its rows are written, as ever;
a process that is killed loses what it computed since, at most a chunk and the beginning of the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload_decode.attention.rows import numpy_view
from offload_decode.attention.transfers import HostCopy
from offload_decode.kv.placement import QUEUED
from offload_decode.store.writer import KVStoreWriter

Write = Callable[..., None]


class Sink(Protocol):
    """Where a chunk's rows go."""

    def give(self, write: Write, *parts: Tensor) -> int:
        """Have `write` called with `parts` as numpy arrays, after what was given before; returns a number
        for `wait`. Raises what an earlier one raised.
        """
        ...

    def wait(self, given: int) -> None:
        """Return when what has that number is written. Raises what went wrong before."""
        ...

    def commit(self, tokens: int) -> int:
        """Commit so many tokens after all that was given; returns how many are committed by now."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def sink_for(writer: KVStoreWriter, device: torch.device) -> Sink:
    """The sink for tensors of a device."""
    return Behind(writer, device) if device.type == "cuda" else AtOnce(writer)


class AtOnce:
    """Writes what it is given."""

    def __init__(self, writer: KVStoreWriter):
        self._writer = writer

    def give(self, write: Write, *parts: Tensor) -> int:
        """It is written on return."""
        write(*map(numpy_view, parts))
        return 0

    def wait(self, given: int) -> None:
        """It is written already."""

    def commit(self, tokens: int) -> int:
        """All of them are committed on return."""
        self._writer.commit(tokens)
        return tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to do."""


class Behind:
    """Writes in a thread what a card computed. Leaving the block waits for all of it, or, where an exception
    leaves it, for what is being written just then alone.
    """

    def __init__(self, writer: KVStoreWriter, device: torch.device):
        self._writer = writer
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._things: SimpleQueue[tuple[Write, HostCopy | None] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._given = self._finished = 0
        self._commits: list[tuple[int, int]] = [(0, writer.done)]  # the last two: their numbers and tokens
        self._error: BaseException | None = None
        self._left = False
        self._thread = threading.Thread(target=self._run, name="store writer", daemon=True)

    def give(self, write: Write, *parts: Tensor) -> int:
        """See `Sink.give`; the parts may be written to when what the current stream is given next has run."""
        self.wait(self._given - QUEUED + 1)
        copy = None
        if parts:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                copy = HostCopy.begin(*parts)
            for part in parts:
                part.record_stream(self._stream)
        self._given += 1
        self._things.put((write, copy))
        return self._given

    def wait(self, given: int) -> None:
        """See `Sink.wait`."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished >= given or self._error is not None)
        if self._error is not None:
            raise self._error

    def commit(self, tokens: int) -> int:
        """Waits for the commit before this one, which it returns."""
        given = self.give(lambda: self._writer.commit(tokens))
        self._commits = [self._commits[-1], (given, tokens)]
        number, committed = self._commits[0]
        self.wait(number)
        return committed

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = error is not None
        self._things.put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (thing := self._things.get()) is not None:
            if self._left or self._error is not None:
                continue
            write, copy = thing
            try:
                arrays: list[NDArray[np.generic]] = []
                if copy is not None:
                    arrays = [numpy_view(part) for part in copy.wait()]
                write(*arrays)
            except BaseException as error:  # noqa: BLE001 - raised where the next thing is given
                self._error = error
            with self._changed:
                self._finished += 1
                self._changed.notify_all()
