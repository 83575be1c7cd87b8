"""Streams and events that run nothing late, and know what of each other they have waited for.

Every stream counts what it was given. `seen` says, of each stream, how far its work is known to be done: for
a stream before its next piece of work begins, for the host now (vector clocks: Mattern, Virtual Time and
Global States of Distributed Systems, 1989).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

Seen = dict["Stream", int]

_HERE = str(Path(__file__).parent)
_OUTSIDE = (f"{_HERE}/", "/torch/", "<", "/contextlib.py")


@dataclass(frozen=True)
class Waited:
    """The host waited for the device: `read` what it computed, `sent` it what was not pinned, or `joined` a
    stream or an event; by which function of torch, asked for by which line of which file.
    """

    kind: str
    function: str
    file: str
    line: int


class Order:
    """Who waited for whom, and the stream that each thread gives its work to."""

    def __init__(self, when_waited: Callable[[], None]) -> None:
        self.host: Seen = {}
        self.waits: list[Waited] = []
        self.when_waited = when_waited
        self.default = Stream(self)
        self.streams: list[Stream] = [self.default]
        self.capturing: tuple[int, Any] | None = None  # the thread whose work a graph notes, and the graph
        self._chosen = threading.local()
        self.lock = threading.RLock()  # what one thread has waited for, others know at once, and look at

    @property
    def current(self) -> Stream:
        """The stream that this thread gives its work to."""
        return getattr(self._chosen, "stream", self.default)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._chosen.stream = stream

    @property
    def graph(self) -> Any:
        """What notes this thread's work, if a graph does."""
        capturing = self.capturing
        return capturing[1] if capturing is not None and capturing[0] == threading.get_ident() else None

    def stream(self) -> Stream:
        """One more stream."""
        self.streams.append(Stream(self))
        return self.streams[-1]

    def launch(self) -> Seen:
        """The current stream is given a piece of work: which."""
        stream = self.current
        with self.lock:
            join(stream.seen, self.host)
            stream.count += 1
            stream.seen[stream] = stream.count
            return {stream: stream.count}

    def synchronize(self) -> None:
        """The host waits for all streams."""
        for stream in self.streams:
            self.wait("joined", "synchronize", stream.seen)

    def wait(self, kind: str, function: str, seen: Seen) -> None:
        """The host waits for all of `seen`. Raises while a graph is captured, when nothing is being done."""
        if self.graph is not None:
            raise RuntimeError(f"{function}: operation not permitted when stream is capturing")
        frame: Any = sys._getframe(1)
        while any(part in frame.f_code.co_filename for part in _OUTSIDE) and frame.f_back:
            frame = frame.f_back
        with self.lock:
            join(self.host, seen)
            self.waits.append(Waited(kind, function, frame.f_code.co_filename, frame.f_lineno))
            self.when_waited()

    def knows(self, seen: Seen) -> bool:
        """Whether the host knows all of `seen` to be done."""
        with self.lock:
            return done(self.host, seen)


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, order: Order):
        self.order = order
        self.count = 0
        self.seen: Seen = {}

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind what the stream was given so far."""
        event = event or Event(self.order)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What the stream is given from now on waits for the event."""
        join(self.seen, event.seen)

    def wait_stream(self, stream: Stream) -> None:
        """What the stream is given from now on waits for what another was given so far."""
        join(self.seen, stream.seen)

    def synchronize(self) -> None:
        """The host waits for the stream, unless it knows it to be done."""
        if not self.query():
            self.order.wait("joined", "Stream.synchronize", self.seen)

    def query(self) -> bool:
        """Whether the host knows it to be done."""
        return self.order.knows(self.seen)

    def __enter__(self) -> Self:
        self._before, self.order.current = self.order.current, self
        return self

    def __exit__(self, *_: object) -> None:
        self.order.current = self._before


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, order: Order):
        self.order = order
        self.seen: Seen = {}

    def record(self, stream: Stream | None = None) -> None:
        """It happens when the stream has done what it was given so far."""
        self.seen = dict((stream or self.order.current).seen)

    def wait(self, stream: Stream | None = None) -> None:
        """What the stream is given from now on waits for it."""
        (stream or self.order.current).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for it, unless it knows that it happened."""
        if not self.query():
            self.order.wait("joined", "Event.synchronize", self.seen)

    def query(self) -> bool:
        """Whether the host knows that it happened."""
        return self.order.knows(self.seen)

    def elapsed_time(self, other: Event) -> float:
        """No time passes on a stand-in."""
        return 0.0


def join(seen: Seen, more: Seen) -> None:
    """`seen` knows what `more` knows too."""
    for stream, count in more.items():
        seen[stream] = max(seen.get(stream, 0), count)


def done(seen: Seen, work: Seen) -> bool:
    """Whether all of `work` is known to be done."""
    return all(seen.get(stream, 0) >= count for stream, count in work.items())
