"""Graphs: what a stream is given is not done but noted, and done as often as the graph is replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.card.rules import tensors
from tests.card.streams import Order
from tests.card.transfers import address


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
        """Nothing more is noted."""
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
        """All that was noted, with the same tensors."""
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
