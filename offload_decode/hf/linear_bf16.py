"""Linear layers of one token in bfloat16 on a CPU, whose speed is that of reading the weights.

torch runs products of bfloat16 in oneDNN, which packs the weights in every call: for one token this reads
them at half to two thirds of the speed of memory. torch's own product of a matrix and a vector, which runs
where oneDNN is switched off, reads them in place, and sums in float32 as well. For more tokens oneDNN is
many times faster.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Condition
from typing import Any

import torch
from torch import Tensor

_FLAGS: Any = torch.backends.mkldnn


def read_in_place(model: Any) -> None:
    """Let linear layers of `model` with weights of bfloat16 on a CPU multiply one token without oneDNN."""
    for layer in model.modules():
        if type(layer) is torch.nn.Linear and not isinstance(layer.forward, partial):
            weight = layer.weight
            if weight.dtype is torch.bfloat16 and weight.device.type == "cpu":
                layer.forward = partial(_multiply, layer.forward)  # type: ignore[method-assign]


class _Turns:
    """Turns of products without and with oneDNN, which is switched for the whole process: never both."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._single, self._several = 0, 0  # products that run; of several tokens those that wait too
        self._before = True

    @contextmanager
    def single(self) -> Iterator[None]:
        """Without oneDNN, unless another product needs it now."""
        with self._changed:
            off = not self._several
            if off and not self._single:
                self._before, _FLAGS.enabled = _FLAGS.enabled, False
            self._single += off
        try:
            yield
        finally:
            with self._changed:
                self._single -= off
                if off and not self._single:
                    _FLAGS.enabled = self._before
                    self._changed.notify_all()

    @contextmanager
    def several(self) -> Iterator[None]:
        """With oneDNN: waits for running products of one token."""
        with self._changed:
            self._several += 1
            self._changed.wait_for(lambda: not self._single)
        try:
            yield
        finally:
            with self._changed:
                self._several -= 1


_turns = _Turns()


def _multiply(forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    if input.device.type != "cpu":
        return forward(input)
    with _turns.single() if input.numel() == input.shape[-1] else _turns.several():
        return forward(input)
