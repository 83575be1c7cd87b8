"""What travels between the host and the stand-in, and memory of the host that is pinned for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.card.streams import Order, Seen, done


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
        """Whether a tensor of the host is pinned."""
        return address(tensor) in self._pinned

    def send(self, target: Tensor, source: Tensor, non_blocking: bool) -> Seen:
        """Copy the host's `source` to the device's `target`, behind what the current stream was given."""
        self.check_arrived("copy", source)
        with self.order.lock:
            work = self.order.launch()
            target.copy_(source)
            if non_blocking and self.pinned(source):
                self._going.append((work, source, source.clone()))
            elif source.numel():
                self.order.wait("sent", "copy", self.order.current.seen)
        return work

    def fetch(self, target: Tensor, source: Tensor, non_blocking: bool) -> Seen:
        """Copy the device's `source` to the host's `target`, behind what the current stream was given."""
        self.check_arrived("copy", target)
        with self.order.lock:
            work = self.order.launch()
            target.copy_(source)
            if non_blocking and self.pinned(target):
                self._coming[address(target)] = work
            elif source.numel():
                self.order.wait("read", "copy", self.order.current.seen)
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
        for _, source, sent in over:
            if not torch.equal(_bytes(source), _bytes(sent)):
                raise RuntimeError("pinned memory was written while a copy to the device still read it")


def address(tensor: Tensor) -> int:
    """Where the storage of a tensor lies."""
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
