"""What the stand-in's memory holds: every storage as long as some tensor has it. There is no pool; what is
freed is free at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Memory:
    """`total` bytes, of which `taken` are held by tensors; `peak` is the most that ever were."""

    def __init__(self, total: int):
        self.total = total
        self.peak = 0
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
