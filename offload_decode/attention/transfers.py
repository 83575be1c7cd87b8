"""Between a host and its device, without waiting where nobody needs to: through pinned memory, which torch
does not give to others before a copy of it is done.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class HostCopy:
    """Tensors in pinned host memory, there once `done` has happened on the device."""

    parts: tuple[Tensor, ...]
    done: torch.cuda.Event

    @classmethod
    def begin(cls, *parts: Tensor) -> Self:
        """Let the copies of a device's tensors join what it is doing, without waiting."""
        pinned = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
        copies = [copy.copy_(part, non_blocking=True) for copy, part in zip(pinned, parts, strict=True)]
        return cls(tuple(copies), torch.cuda.current_stream(parts[0].device).record_event())

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors; other threads and later work of the device go on meanwhile."""
        self.done.synchronize()
        return self.parts


def to_host(*parts: Tensor) -> tuple[Tensor, ...]:
    """The same in host memory; for all that lie on a device the host waits once."""
    away = [part for part in parts if part.is_cuda]
    copies = iter(HostCopy.begin(*away).wait() if away else ())
    return tuple(next(copies) if part.is_cuda else part for part in parts)


def to_device(part: Tensor, device: torch.device) -> Tensor:
    """The same on a device, of which the host waits for nothing."""
    if part.is_cuda or device.type != "cuda":
        return part.to(device)
    return part.pin_memory().to(device, non_blocking=True)


def power_of_two(number: int) -> int:
    """The next power of two, which is what torch takes of pinned memory for so many bytes; 0 of 0."""
    return 1 << (number - 1).bit_length() if number else 0


class Staging:
    """Host memory that a copy to a device reads, pinned once and used again when that copy is done."""

    def __init__(self, pinned: bool):
        self.sent: torch.cuda.Event | None = None
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)

    def room(self, rows: int, row_bytes: int) -> Tensor:
        """Bytes `[rows, row_bytes]` that no copy reads any more; the caller sets `sent` for the next one."""
        if self.sent is not None:
            self.sent.synchronize()
        size = rows * row_bytes
        if size > len(self._memory):
            self._memory = torch.empty(power_of_two(size), dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory[:size].view(rows, row_bytes)
