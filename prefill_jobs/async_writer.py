"""What a chunk adds to a store: written at once on a CPU, by a thread behind the computation on a GPU.

The thread writes in the order of submission: the KV of a layer leaves as soon as the layer has it, through
pinned memory and on a stream of its own. At most `QUEUED` writes wait, so that a slow disk slows the GPU and
takes no memory. A chunk is committed after all of it is written; a killed process loses at most a chunk and
the beginning of the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload_decode.attention.rows import numpy_view
from offload_decode.attention.transfers import HostCopy
from offload_decode.kv.placement import QUEUED
from offload_decode.store.writer import KVStoreWriter

Write = Callable[..., None]


class ChunkWriter:
    """Writes what it is given before it returns."""

    def __init__(self, writer: KVStoreWriter):
        self._writer = writer

    def submit(self, write: Write, *parts: Tensor) -> int:
        """Have `write` called with `parts` as numpy arrays, after earlier submissions; a number for `wait`.

        Raises what an earlier write raised.
        """
        write(*map(numpy_view, parts))
        return 0

    def wait(self, number: int) -> None:
        """Return when the submission of that number is written. Raises what an earlier write raised."""

    def commit(self, tokens: int) -> int:
        """Commit so many tokens after all submissions; how many are committed by now."""
        self._writer.commit(tokens)
        return tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class AsyncWriter(ChunkWriter):
    """Writes in a thread what a GPU computed. Leaving the block waits for all of it or, after an exception,
    for the write in progress alone.
    """

    def __init__(self, writer: KVStoreWriter, device: torch.device):
        super().__init__(writer)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._queue: SimpleQueue[tuple[Write, HostCopy | None] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._submitted = self._finished = 0
        self._last_commits: list[tuple[int, int]] = [(0, writer.done)]  # two: their numbers and tokens
        self._error: BaseException | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="store writer", daemon=True)

    def submit(self, write: Write, *parts: Tensor) -> int:
        """The current stream may overwrite the parts with whatever it is given next."""
        self.wait(self._submitted - QUEUED + 1)
        copy = None
        if parts:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                copy = HostCopy.begin(*parts)
            for part in parts:
                part.record_stream(self._stream)
        self._submitted += 1
        self._queue.put((write, copy))
        return self._submitted

    def wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._finished >= number or self._error is not None)
        if self._error is not None:
            raise self._error

    def commit(self, tokens: int) -> int:
        """Waits for the commit before this one, which it returns."""
        number = self.submit(lambda: self._writer.commit(tokens))
        self._last_commits = [self._last_commits[-1], (number, tokens)]
        before, committed = self._last_commits[0]
        self.wait(before)
        return committed

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancelled = error is not None
        self._queue.put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._cancelled or self._error is not None:
                continue
            write, copy = item
            try:
                arrays: list[NDArray[np.generic]] = []
                if copy is not None:
                    arrays = [numpy_view(part) for part in copy.wait()]
                write(*arrays)
            except BaseException as error:  # noqa: BLE001 - raised by the next call
                self._error = error
            with self._changed:
                self._finished += 1
                self._changed.notify_all()
