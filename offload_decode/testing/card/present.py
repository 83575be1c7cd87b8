"""`stand_in`: torch has a CUDA device, though there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from offload_decode.testing.card.device import Card
from offload_decode.testing.card.streams import Event, Order


@contextmanager
def stand_in() -> Iterator[Card]:
    """Within the block torch has one CUDA device, in this thread; at its end every copy is over."""
    card = Card()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Card, "present", card))
        stack.enter_context(mock.patch.multiple(torch.cuda, **_functions(card.order)))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        # None of the operators that a build for CUDA brings along is there.
        stack.enter_context(mock.patch.object(torch.backends.cuda, "is_built", return_value=False))
        if find_spec("triton") is not None:
            interpreter = import_module("triton.runtime.interpreter").GridExecutor
            launched = _launching(card, interpreter.__call__)
            stack.enter_context(mock.patch.object(interpreter, "__call__", launched))
        stack.enter_context(_Functions(card))
        yield card
        card.order.synchronize()


class _Functions(TorchFunctionMode):
    """Every function of torch, those that are given no tensor too."""

    def __init__(self, card: Card):
        super().__init__()
        self.card = card

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.card.call(function, args, kwargs or {})


class _Generator(torch.Generator):
    """Draws on the host, wherever it is said to be."""

    def __new__(cls, device: object = None) -> _Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def _functions(order: Order) -> dict[str, Any]:
    """What `torch.cuda` is asked for."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "device": lambda *_: nullcontext(),
        "Stream": lambda *_, **__: order.stream(),
        "Event": lambda *_, **__: Event(order),
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "current_stream": lambda *_: order.current,
        "default_stream": lambda *_: order.default,
        "synchronize": lambda *_: order.synchronize(),
        "manual_seed_all": lambda *_: None,
    }


def _launching(card: Card, run: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's interpreter, given the memory of the device's tensors."""

    def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        names, named = list(kwargs), list(kwargs.values())
        given = card.launch([*args, *named])
        return run(executor, *given[: len(args)], **dict(zip(names, given[len(args) :], strict=True)))

    return launched
