"""Weights that stay in host memory and come to a card layer by layer, for a prefill on a card that cannot
hold them: the numbers are those of weights that lie there.

The card has room for the weights of two decoder layers. While one layer computes, the next one's come into
the other room, on a stream of their own. What is in no layer (embeddings, norms) lies on the card, and so do
all buffers; an output layer of its own stays on the host, because a prefill makes no logits. On the host the
layers' weights are pinned: each is copied once from the map of its file, into memory that torch rounds up to
a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from offload_decode.common.errors import ConfigError, UnsupportedModel

NO_CARD = "weights are streamed to a GPU, and a CPU reads them where they lie: leave --weights out"
"""Why there are none on a CPU."""
_ALIGNED = 256  # bytes: a weight begins in its room where torch would let it begin


def check_card(device: torch.device) -> None:
    """`ConfigError` for a device that weights are not streamed to."""
    if device.type != "cuda":
        raise ConfigError(NO_CARD)


def layers_of(model: Any) -> Sequence[nn.Module]:
    """The decoder layers of a model: of its outermost lists of modules the one with most weights, or none."""
    lists: list[nn.ModuleList] = []
    inner: set[nn.Module] = set()
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and module not in inner:
            lists.append(module)
            inner |= {*module.modules()}
    return list(max(lists, key=lambda own: sum(weight.numel() for weight in own.parameters()), default=()))


def stream(model: Any, device: torch.device) -> None:
    """Put `model`, which is on the CPU, on `device`, but for the weights of its decoder layers, which come
    there as each layer runs, and an output layer of its own. Raises `ConfigError` for a CPU, and
    `UnsupportedModel` where no layers are found.
    """
    check_card(device)
    layers = layers_of(model)
    if not layers:
        kind = model.config.model_type
        raise UnsupportedModel(
            f"this '{kind}' model has no list of layers whose weights could be streamed: leave --weights "
            "out, or take int8 or int4"
        )
    waiting = dict.fromkeys(module for layer in layers for module in layer.modules())
    output = model.get_output_embeddings()
    if output is not None and output.weight is model.get_input_embeddings().weight:
        output = None  # it has no weights of its own
    with torch.inference_mode(False), torch.no_grad():
        there: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
            if module not in waiting and module is not output:
                _replace(module, there, lambda weight: weight.to(device))
        for module in waiting:
            _replace(module, there, lambda weight: weight.contiguous().pin_memory())
        _Layers(layers, device)


class _Layers:
    """Decoder layers whose weights, but for those that are on `device` already, come there as they run."""

    def __init__(self, layers: Sequence[Any], device: torch.device):
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._places = [
            [(own, name) for part in layer.modules() for own, name in _places(part) if not own[name].is_cuda]
            for layer in layers
        ]
        self._host = [[own[name] for own, name in places] for places in self._places]
        self._rooms = [_Room(self._host, device, self._copies) for _ in range(2)]
        for number, layer in enumerate(layers):
            # Not hooks: those that follow a pass are left out when the user interrupts it.
            layer.forward = update_wrapper(partial(self._run, number, layer.forward), layer.forward)

    def _run(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A layer's `forward` with its weights on the device, while the next one's are on their way."""
        room = self._brought(number)
        self._brought((number + 1) % len(self._host), beside=room)
        torch.cuda.current_stream(self._device).wait_event(room.arrived)
        try:
            self._put(number, room.weights[number])
            return forward(*args, **kwargs)
        finally:
            self._put(number, self._host[number])
            room.used = torch.cuda.current_stream(self._device).record_event()

    def _brought(self, number: int, beside: _Room | None = None) -> _Room:
        """The room where a layer's weights are, or will be: they are sent to one that is not `beside`."""
        known = next((room for room in self._rooms if room.holds == number), None)
        return known or self._sent(number, next(room for room in self._rooms if room is not beside))

    def _sent(self, number: int, room: _Room) -> _Room:
        room.holds = None
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(room.used)
            for target, source in zip(room.weights[number], self._host[number], strict=True):
                target.copy_(source, non_blocking=True)
            room.arrived = self._copies.record_event()
        room.holds = number
        return room

    def _put(self, number: int, weights: Sequence[nn.Parameter]) -> None:
        for (parameters, name), weight in zip(self._places[number], weights, strict=True):
            parameters[name] = weight


class _Room:
    """Memory on a card for the weights of any one of the layers, `weights` of each. Those of the layer that
    it `holds` are there once `arrived` has happened; what comes next waits for `used`.
    """

    def __init__(self, layers: list[list[nn.Parameter]], device: torch.device, copies: torch.cuda.Stream):
        size = max(sum(_aligned(weight.nbytes) for weight in layer) for layer in layers)
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        memory.record_stream(copies)
        self.weights = [[*_laid_out(memory, layer)] for layer in layers]
        self.holds: int | None = None
        # Whoever had this memory before may still be at work.
        self.used = self.arrived = torch.cuda.current_stream(device).record_event()


def _laid_out(memory: torch.Tensor, layer: Sequence[nn.Parameter]) -> Iterator[nn.Parameter]:
    start = 0
    for weight in layer:
        yield _fixed(memory[start : start + weight.nbytes].view(weight.dtype).view(weight.shape))
        start += _aligned(weight.nbytes)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _replace(module: nn.Module, known: dict[int, nn.Parameter], move: Callable[[Any], Any]) -> None:
    """Give a module its own weights as `move` makes them, or as they are known: models share some. `known`:
    by the identity of what they were, which is freed here and was there at once with all others.
    """
    for parameters, name in _places(module):
        weight = parameters[name]
        if id(weight) not in known:
            known[id(weight)] = _fixed(move(weight.detach()))
        parameters[name] = known[id(weight)]


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a module has its weights: its parameters, and the name of each."""
    for name, weight in module._parameters.items():
        if weight is not None:
            yield module._parameters, name


def _fixed(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
