"""`stand_in`: torch has a CUDA device, though there is none. `references`: one arithmetic for both."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from offload_decode import attention
from offload_decode.attention import dense, device_tokens, pages_reference
from offload_decode.attention import pages as dispatch
from offload_decode.attention.queries import attend
from tests.card.device import Card
from tests.card.streams import Event, Graph

MEMORY = 1 << 40
"""Bytes of a stand-in that is to have room for everything."""


@contextmanager
def stand_in(memory: int = MEMORY) -> Iterator[Card]:
    """Within the block torch has one CUDA device of so many bytes, in this thread and in those that begin
    there; at its end every copy is over.
    """
    card = Card(memory)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Card, "present", card))
        stack.enter_context(mock.patch.multiple(torch.cuda, **_functions(card)))
        stack.enter_context(mock.patch.object(threading.Thread, "run", _run_with(card)))
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

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Card.present is not self.card:  # in a thread that goes on after it
            return function(*args, **(kwargs or {}))
        return self.card.call(function, args, kwargs or {})


def _run_with(card: Card) -> Callable[[threading.Thread], None]:
    """`Thread.run` for threads that are begun while there is a stand-in: they have its device too."""
    run = threading.Thread.run

    def run_with(thread: threading.Thread) -> None:
        with _Functions(card):
            run(thread)

    return run_with


class _Generator(torch.Generator):
    """Draws on the host, wherever it is said to be."""

    def __new__(cls, device: object = None) -> _Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def _functions(card: Card) -> dict[str, Any]:
    """What `torch.cuda` is asked for."""
    order, memory = card.order, card.memory
    share = [1.0]
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "device": lambda *_: nullcontext(),
        "Stream": lambda *_, **__: order.stream(),
        "Event": lambda *_, **__: Event(order),
        "CUDAGraph": lambda *_: Graph(order, card.call),
        "graph_pool_handle": object,
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "current_stream": lambda *_: order.current,
        "default_stream": lambda *_: order.default,
        "synchronize": lambda *_: order.synchronize(),
        "manual_seed_all": lambda *_: None,
        "get_device_name": lambda *_: "a stand-in",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=memory.total),
        "mem_get_info": lambda *_: (memory.total - memory.taken, memory.total),
        "memory_allocated": lambda *_: memory.taken,
        "memory_reserved": lambda *_: memory.taken,
        "max_memory_allocated": lambda *_: memory.peak,
        "max_memory_reserved": lambda *_: memory.peak,
        "reset_peak_memory_stats": lambda *_: memory.forget_peak(),
        "get_per_process_memory_fraction": lambda *_: share[0],
        "set_per_process_memory_fraction": lambda own, *_: share.__setitem__(0, own),
    }


def _launching(card: Card, run: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's interpreter, given the memory of the device's tensors."""

    def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        names, named = list(kwargs), list(kwargs.values())
        given = card.launch([*args, *named])
        return run(executor, *given[: len(args)], **dict(zip(names, given[len(args) :], strict=True)))

    return launched


_DEVICE = "offload_decode.attention.pages_device"


@contextmanager
def references() -> Iterator[None]:
    """Within the block attention and Quest's pages are computed by their references, on both."""
    same = {name: getattr(pages_reference, name) for name in ("page_scores", "top_pages")}
    pages = SimpleNamespace(**same, attend_pages=_attend_pages)
    known = sys.modules.get(_DEVICE)
    with (
        mock.patch.object(dense, "_fused", attend),
        mock.patch.object(dispatch, "pages_host", pages),
        mock.patch.object(device_tokens, "_by_program", device_tokens.reference),
        # Where it was imported, and where it is imported for the first time. (`mock.patch.dict` would also
        # forget what else is imported meanwhile.)
        mock.patch.object(attention, "pages_device", pages, create=True),
    ):
        sys.modules[_DEVICE] = pages  # type: ignore[assignment]
        try:
            yield
        finally:
            del sys.modules[_DEVICE]
            if known is not None:
                sys.modules[_DEVICE] = known


def _attend_pages(query: Tensor, keys: Any, values: Any, pages: Tensor, page_size: int, *more: Any) -> Any:
    if not isinstance(keys, Tensor):
        keys, values, pages = dispatch.gather_pages(keys, values, pages, page_size, query.device)
    return pages_reference.attend_pages(query, keys, values, pages, page_size, *more)
