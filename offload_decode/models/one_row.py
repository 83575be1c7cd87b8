"""Linear layers of one token in bfloat16 on a CPU, whose weights are all that such a product reads.

torch hands products of bfloat16 to oneDNN, which packs the weights anew in every call: of one row it reads
them at half the speed of memory or less. torch's own product of a matrix and a vector reads them where they
lie, and sums in float32 as well; it is what is taken where oneDNN is switched off. For more rows oneDNN is
faster.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

_FLAGS: Any = torch.backends.mkldnn


def read_in_place(model: Any) -> None:
    """Let linear layers of `model` with weights of bfloat16 on a CPU multiply one row without oneDNN."""
    for layer in model.modules():
        if type(layer) is torch.nn.Linear and not isinstance(layer.forward, partial):
            weight = layer.weight
            if weight.dtype is torch.bfloat16 and weight.device.type == "cpu":
                layer.forward = partial(_multiply, layer.forward)  # type: ignore[method-assign]


class _WithoutOneDNN(AbstractContextManager[None]):
    """oneDNN is switched off for the whole process, so that the last of several threads switches it on, if it
    was on before the first.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = _FLAGS.enabled
                _FLAGS.enabled = False
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _FLAGS.enabled = self._before


_without_onednn = _WithoutOneDNN()


def _multiply(forward: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """A layer's `forward` of `states [..., D]`."""
    if states.numel() != states.shape[-1] or states.device.type != "cpu":
        return forward(states)
    with _without_onednn:
        return forward(states)
