"""Streams and events that run nothing late and know what of each other they have waited for; copies between
the host and the stand-in; what its memory holds; and graphs of what a stream is given.

Every stream counts what it was given. `seen` says, of each stream, how far its work is known to be done: for
a stream before its next piece of work begins, for the host now (vector clocks: Mattern, Virtual Time and
Global States of Distributed Systems, 1989).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.card.rules import tensors

Seen = dict["Stream", int]
_HERE = str(Path(__file__).parent)
_OUTSIDE = (f"{_HERE}/", "/torch/", "<", "/contextlib.py")


class Waited(NamedTuple):
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

    def wait_event(self, event: Event | Stream) -> None:
        """What the stream is given from now on waits for the event, or for what another was given so far."""
        join(self.seen, event.seen)

    wait_stream = wait_event

    def synchronize(self) -> None:
        """The host waits for the stream, unless it knows it to be done."""
        if not self.query():
            self.order.wait("joined", "Stream.synchronize", self.seen)

    def query(self) -> bool:
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
        (stream or self.order.current).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for it, unless it knows that it happened."""
        if not self.query():
            self.order.wait("joined", "Event.synchronize", self.seen)

    def query(self) -> bool:
        return self.order.knows(self.seen)

    def elapsed_time(self, other: Event) -> float:
        return 0.0


def join(seen: Seen, more: Seen) -> None:
    """`seen` knows what `more` knows too."""
    for stream, count in more.items():
        seen[stream] = max(seen.get(stream, 0), count)


def done(seen: Seen, work: Seen) -> bool:
    """Whether all of `work` is known to be done."""
    return all(seen.get(stream, 0) >= count for stream, count in work.items())


class Transfers:
    """Copies that the host does not wait for: what they write is not looked at, and what they read not
    written, before it has waited.
    """

    def __init__(self) -> None:
        self.order = Order(self._over)
        self._pinned: dict[int, Any] = {}  # storages by address; kept, so that none is another one later
        self._coming: dict[int, Seen] = {}  # storages of the host that copies write
        self._going: list[tuple[Seen, Tensor, Tensor]] = []  # what copies read, and what was to be sent

    def pin(self, tensor: Tensor) -> Tensor:
        """The same tensor of the host, pinned."""
        self._pinned[address(tensor)] = tensor.untyped_storage()
        return tensor

    def pinned(self, tensor: Tensor) -> bool:
        return address(tensor) in self._pinned

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool, sent: bool) -> Seen:
        """Copy to the device (`sent`) or from it, behind what the current stream was given."""
        on_host = source if sent else target
        self.check_arrived("copy", on_host)
        with self.order.lock:
            work = self.order.launch()
            target.copy_(source)
            if not (non_blocking and self.pinned(on_host)):
                if source.numel():
                    self.order.wait("sent" if sent else "read", "copy", self.order.current.seen)
            elif sent:
                self._going.append((work, source, source.clone()))
            else:
                self._coming[address(target)] = work
        return work

    def check_arrived(self, name: str, tensor: Tensor) -> None:
        """Raises if a copy that the host did not wait for still writes this memory."""
        if address(tensor) in self._coming:
            raise RuntimeError(f"{name}: touches memory that a copy from the device still writes")

    def _over(self) -> None:
        """The host has waited: which copies are over is known now."""
        known = self.order.host
        self._coming = {at: seen for at, seen in self._coming.items() if not done(known, seen)}
        over = [copy for copy in self._going if done(known, copy[0])]
        self._going = [copy for copy in self._going if not done(known, copy[0])]
        if any(not torch.equal(_bytes(source), _bytes(sent)) for _, source, sent in over):
            raise RuntimeError("pinned memory was written while a copy to the device still read it")


def address(tensor: Tensor) -> int:
    """Where the storage of a tensor lies."""
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class Memory:
    """`total` bytes, of which `taken` are held by tensors; `peak` is the most that ever were."""

    def __init__(self, total: int):
        self.total, self.peak = total, 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}  # by address
        self._most = 0  # that may be held: what was freed since `taken` was last counted is in it

    @property
    def taken(self) -> int:
        """Bytes of all storages that some tensor has."""
        self._held = {at: own for at, own in self._held.items() if not own[0].expired()}  # type: ignore[no-untyped-call]
        self._most = sum(size for _, size in self._held.values())
        return self._most

    def take(self, tensor: Tensor) -> None:
        """A new storage is made. Raises `torch.OutOfMemoryError` where there is no room for it."""
        storage = tensor.untyped_storage()
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._held[storage.data_ptr()] = weak, storage.nbytes()
        self._most += storage.nbytes()
        if self._most > self.peak:
            self.peak = max(self.peak, taken := self.taken)
            if taken > self.total:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory: the stand-in has {self.total} bytes, and {taken} are wanted"
                )

    def forget_peak(self) -> None:
        """From now on the peak is counted anew."""
        self.peak = self.taken


class Graph:
    """Stands for `torch.cuda.CUDAGraph`. Functions are computed as they are noted, for the shapes of what
    they give; the numbers are taken away at the end.
    """

    def __init__(self, order: Order, call: Callable[..., Any]):
        self._order = order
        self._call = call
        self._noted: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._written: list[tuple[Tensor, Tensor]] = []  # tensors, and what was in them
        self._over = False

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """What this thread gives the device from now on is noted. Raises on the default stream."""
        if self._order.current is self._order.default or self._order.capturing is not None or self._over:
            raise RuntimeError("a graph is captured once, alone, and not on the default stream")
        self._order.capturing = threading.get_ident(), self

    def capture_end(self) -> None:
        if self._order.capturing is None or self._order.capturing[1] is not self:
            raise RuntimeError("this graph is not being captured")
        self._order.capturing, self._over = None, True
        for target, before in reversed(self._written):
            target.as_subclass(Tensor).copy_(before)
        self._written = []
        for _, args, kwargs, result in self._noted:
            held = {address(part) for part in tensors((args, kwargs))}
            for part in tensors(result):
                if part.is_floating_point() and address(part) not in held:
                    part.as_subclass(Tensor).fill_(torch.nan)

    def keep(self, target: Tensor) -> None:
        """A function is going to write to `target`, which is to be as before when the capture ends."""
        self._written.append((target, target.as_subclass(Tensor).clone()))

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A function that made `result`, or wrote to its first tensor."""
        self._noted.append((function, _at_their_places(args), _at_their_places(kwargs), result))

    def replay(self) -> None:
        if not self._over:
            raise RuntimeError("a graph is replayed when it has been captured")
        for function, args, kwargs, result in self._noted:
            again = self._call(function, args, kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                for part, new in zip(tensors(result), tensors(again), strict=True):
                    if address(part) != address(new):
                        part.as_subclass(Tensor).copy_(new.as_subclass(Tensor))


def _at_their_places(given: Any) -> Any:
    """Arguments with tensors of the same memory in place of their own, which may move elsewhere."""
    if isinstance(given, Tensor):
        held = given.as_subclass(Tensor).detach()
        return held if type(given) in (Tensor, torch.nn.Parameter) else held.as_subclass(type(given))
    if isinstance(given, slice):
        return slice(*map(_at_their_places, (given.start, given.stop, given.step)))
    if isinstance(given, dict):
        return {name: _at_their_places(part) for name, part in given.items()}
    if isinstance(given, list | tuple) and not hasattr(given, "_fields"):
        return type(given)(map(_at_their_places, given))
    return given
