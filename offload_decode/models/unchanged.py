"""Whether a module is still what it was: the same parts, weights at the same addresses, no more hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Snapshot:
    """Of a module as it is now. Looking costs some tenths of a microsecond for each part and weight."""

    def __init__(self, module: torch.nn.Module):
        self._slots: list[tuple[dict[str, Any], str, Any]] = []
        sized: list[dict[str, Any]] = []
        for part in module.modules():
            held = (part._modules, part._parameters, part._buffers)
            self._slots += [(own, name, one) for own in held for name, one in own.items()]
            self._slots.append((part.__dict__, "forward", part.__dict__.get("forward")))
            sized += [*held, *(getattr(part, hooks) for hooks in _HOOKS)]
        self._sized, self._sizes = sized, [len(own) for own in sized]
        self._tensors = [one for _, _, one in self._slots if isinstance(one, Tensor)]
        self._places = [one.data_ptr() for one in self._tensors]

    def holds(self) -> bool:
        """Whether nothing was taken out, put in or moved since."""
        return (
            [len(own) for own in self._sized] == self._sizes
            and all(own.get(name) is one for own, name, one in self._slots)
            and [one.data_ptr() for one in self._tensors] == self._places
        )
