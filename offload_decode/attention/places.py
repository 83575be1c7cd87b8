"""What a row of a text sees of it, where that follows from its place alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """T rows that stand one behind the other, the last of them at the last of S keys: each sees the keys up
    to its own, of a `window` the last so many alone, its own counted.
    """

    window: int | None = None

    def seen(self, rows: slice, tokens: int, keys: int) -> slice:
        """The keys that some of these rows see."""
        first, last = keys - tokens + rows.start, keys - tokens + rows.stop
        return slice(0 if self.window is None else max(0, first - self.window + 1), last)

    def mask(self, rows: slice, tokens: int, keys: int, device: torch.device) -> Tensor:
        """Which keys of `seen` each of these rows sees, bool `[1, 1, rows, seen]`."""
        seen = self.seen(rows, tokens, keys)
        own = torch.arange(rows.start, rows.stop, device=device)[:, None] + (keys - tokens)
        key = torch.arange(seen.start, seen.stop, device=device)
        mask = key <= own
        if self.window is not None:
            mask &= own - key < self.window
        return mask[None, None]
