"""What a chunk adds to a store: written at once on a CPU, by a thread behind the computation on a GPU.

The thread writes in the order of submission: the KV of a layer leaves as soon as the layer has it, through
pinned memory and on a stream of its own. At most `QUEUED` writes wait, so that a slow disk slows the GPU and
takes no memory. A chunk is committed after all of it is written; a killed process loses at most a chunk and
the beginning of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch
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

    def submit(self, write: Write, *parts: Tensor) -> Future[None] | None:
        """Have `write` called with `parts` as numpy arrays, after earlier submissions; a future for `wait`,
        unless that is done. Raises what an earlier write raised.
        """
        write(*map(numpy_view, parts))
        return None

    def wait(self, submitted: Future[None] | None) -> None:
        """Return when a submission is written. Raises what it, or an earlier one, raised."""
        if submitted is not None:
            submitted.result()

    def commit(self, tokens: int) -> int:
        """Commit so many tokens after all submissions; how many are committed by now."""
        self._writer.commit(tokens)
        return tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class AsyncWriter(ChunkWriter):
    """Writes in a thread what a GPU computed. Leaving the block waits for all of it or, after an exception,
    for the write in progress alone.
    """

    def __init__(self, writer: KVStoreWriter, device: torch.device):
        super().__init__(writer)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store writer")
        self._futures: deque[Future[None]] = deque(maxlen=QUEUED)
        self._last_commits: list[tuple[Future[None] | None, int]] = [(None, writer.done)]  # or two
        self._error: BaseException | None = None

    def submit(self, write: Write, *parts: Tensor) -> Future[None]:
        """The current stream may overwrite the parts with whatever it is given next."""
        if self._error is not None:
            raise self._error
        if len(self._futures) == QUEUED:
            self.wait(self._futures[0])
        copy = None
        if parts:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                copy = HostCopy.begin(*parts)
            for part in parts:
                part.record_stream(self._stream)
        self._futures.append(self._executor.submit(self._write, write, copy))
        return self._futures[-1]

    def commit(self, tokens: int) -> int:
        """Waits for the commit before this one, which it returns."""
        future = self.submit(lambda: self._writer.commit(tokens))
        self._last_commits = [self._last_commits[-1], (future, tokens)]
        before, committed = self._last_commits[0]
        self.wait(before)
        return committed

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._executor.shutdown(cancel_futures=error is not None)
        if error is None and self._error is not None:
            raise self._error

    def _write(self, write: Write, copy: HostCopy | None) -> None:
        """In the thread; after an error, nothing more is written."""
        if self._error is None:
            try:
                write(*([] if copy is None else map(numpy_view, copy.wait())))
            except BaseException as error:  # noqa: BLE001 - raised by the next call
                self._error = error
        if self._error is not None:
            raise self._error
