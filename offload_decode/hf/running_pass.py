"""One object carries a pass: what masks, rotations and attention need and transformers hands to none."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor


@dataclass(eq=False)
class Pass:
    """A decoder's run over new tokens: what its masks, rotations and attention calls need to know of it, and
    transformers hands to none of them. `hf.hooks` makes one for every run.

    rotated_for: the length of text that keys are rotated for; None: as transformers does. mask: the 2-D mask
    that the run was given, over the prefix too. unpadded: what a token sees follows from its place alone.
    positions: where the new tokens stand, int64 `[B, T]`; None where no padding stands before them.
    """

    rotated_for: int | None = None
    mask: Tensor | None = None
    unpadded: bool = False
    positions: Tensor | None = None
    _by_key: dict[int, tuple[ref[Tensor], Any]] = field(default_factory=dict, init=False)
    _updated: Any = field(default=None, init=False)
    _whole: tuple[Tensor, bool] | None = field(default=None, init=False)

    def updated(self, layer: Any, keys: Tensor) -> None:
        """`layer` was appended to, and gave these keys to the attention call."""
        self._by_key[id(keys)] = ref(keys), layer
        self._updated = layer

    def layer_of(self, keys: Tensor) -> Any:
        """The layer that gave these keys; None of others."""
        found = self._by_key.get(id(keys))
        return found[1] if found is not None and found[0]() is keys else None

    def layer_before(self, index: int) -> Any:
        """The layer that was appended to last, if it has that index, for a model that makes keys of what it
        cached; asked once.
        """
        layer, self._updated = self._updated, None
        return layer if layer is not None and layer.index == index else None

    def sees_all(self, mask: Tensor | None) -> bool:
        """Whether a mask hides nothing. One on a device is read once for the layers that share it."""
        if mask is None:
            return True
        if self._whole is None or self._whole[0] is not mask:
            self._whole = mask, bool(mask.all())
        return self._whole[1]


class _Running(threading.local):
    """The run of this thread: the one place where rotations, masks and attention, which transformers calls
    without a word of each other, can find it.
    """

    def __init__(self) -> None:
        self.current = Pass()


RUNNING = _Running()
