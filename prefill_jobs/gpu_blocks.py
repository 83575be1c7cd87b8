"""What came before a chunk, on a card: the first blocks stay there while they fit, the others come anew for
every chunk, each copied while the one before it is attended to.

Blocks are the same whether they stay or come, and so are the numbers: a prefill that goes on beside less
memory, or after it was killed, writes the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor

from offload_decode.attention.rows import Rows
from offload_decode.attention.transfers import Staging
from offload_decode.hf.compat import device_room
from offload_decode.kv.placement import AHEAD, BLOCK_TOKENS

Stored = Sequence[Sequence[Rows]]
"""The keys of every KV head of a layer, and their values where these are not the same."""


class CardBlocks:
    """Blocks of the tokens of every one of `layers`. `stored` gives a layer's rows as they are stored, once
    they are; `needed`: tokens that some chunk attends to, in all.
    """

    def __init__(
        self, layers: Sequence[int], stored: Callable[[int], Stored], needed: int, device: torch.device
    ):
        self._layers = layers
        self._stored = stored
        self._like = stored(layers[0])
        self._needed = needed
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._kept: dict[int, list[_Room]] = {layer: [] for layer in layers}
        self._passing: deque[_Room] = deque()  # the one whose block was attended to longest ago first
        self._staging = cycle([Staging(pinned=True) for _ in range(2 * AHEAD)])
        self._met = False
        self._pass = _Pass(device)

    @property
    def kept(self) -> int:
        """Blocks of every layer that stay on the card."""
        return min(map(len, self._kept.values()), default=0)

    def blocks(self, layer: int, length: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values `[1, Hkv, S, …]` of the first `length` tokens, block by block; what the current
        stream is given before the next one is asked for may read a block.
        """
        self._met |= length > 0
        coming: deque[tuple[_Room, int]] = deque()
        for number, start in enumerate(range(0, length, BLOCK_TOKENS)):
            coming.append(self._brought(layer, number, min(BLOCK_TOKENS, length - start)))
            if len(coming) == AHEAD:
                yield from self._used(*coming.popleft(), dtype)
        while coming:
            yield from self._used(*coming.popleft(), dtype)

    def keep(self, layer: int, start: int, parts: Sequence[Tensor]) -> None:
        """The tokens from `start` on of a layer, `[Hkv, T, …]` each as they will be stored, are on the card
        already: those of blocks that stay there need not come.
        """
        end = start + parts[0].shape[1]
        for number, room in enumerate(self._kept[layer]):
            first = number * BLOCK_TOKENS
            here = slice(max(start, first), min(end, first + room.tokens))
            if here.start < here.stop and room.rows == here.start - first:
                room.arrive()
                for own, part in zip(room.raw, parts, strict=True):
                    own[:, here.start - first : here.stop - first] = part[
                        :, here.start - start : here.stop - start
                    ]
                room.rows = here.stop - first

    def begin_pass(self) -> None:
        """A chunk begins."""
        self._pass.begin()

    def grow(self, length: int) -> None:
        """Let more blocks stay, of the first `length` tokens, as long as there is room for them beside a
        pass. Nothing stays before a chunk has met what came before it, which shows what that takes.
        """
        if not self._met:
            return
        room, length = self._pass.room(), min(length, self._needed)
        while (first := self.kept * BLOCK_TOKENS) < length:
            tokens = min(BLOCK_TOKENS, self._needed - first)
            room -= len(self._layers) * sum(tokens * own.row_bytes for kind in self._like for own in kind)
            if room < 0:
                return
            try:
                made = [self._made(tokens) for _ in self._layers]
            except torch.OutOfMemoryError:  # what is free lies in pieces: the block comes, as later ones do
                return
            for layer, own in zip(self._layers, made, strict=True):
                self._kept[layer].append(own)

    def _brought(self, layer: int, number: int, rows: int) -> tuple[_Room, int]:
        """The room of a block and its rows, which are on their way there."""
        room = self._kept[layer][number] if number < self.kept else self._passed()
        if room.rows < rows:
            self._copy(layer, number * BLOCK_TOKENS, room, rows)
        return room, rows

    def _passed(self) -> _Room:
        """Empty room, which another block leaves where there are as many as there may be."""
        few = len(self._passing) < AHEAD
        room = self._made(min(BLOCK_TOKENS, self._needed)) if few else self._passing.popleft()
        self._passing.append(room)
        room.rows = 0
        return room

    def _made(self, tokens: int) -> _Room:
        return _Room(self._like, tokens, self._device, self._copies)

    def _copy(self, layer: int, first: int, room: _Room, rows: int) -> None:
        """Let the rows come that a room lacks of those from `first` on."""
        stored = self._stored(layer)
        here = slice(room.rows, rows)
        there = slice(first + here.start, first + here.stop)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(room.used)
            for kind, target in zip(stored, room.raw, strict=True):
                staging = next(self._staging)
                pinned = staging.room(len(kind) * (rows - room.rows), kind[0].row_bytes)
                pinned = pinned.view(target.dtype).view(len(kind), rows - room.rows, -1)
                for head, own in enumerate(kind):
                    pinned[head].copy_(own.raw[there])
                    target[head, here].copy_(pinned[head], non_blocking=True)
                staging.sent = self._copies.record_event()
            room.arrived = self._copies.record_event()
        room.rows = rows

    def _used(self, room: _Room, rows: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        room.arrive()
        parts = [
            kind[0].floats(own[:, :rows]).to(dtype)[None]
            for kind, own in zip(self._like, room.raw, strict=True)
        ]
        yield parts[0], parts[-1]
        room.used = torch.cuda.current_stream(self._device).record_event()


class _Room:
    """Memory on a card for the rows of a block as they are stored, `raw [Hkv, tokens, W]` of each kind. The
    first `rows` tokens are there once `arrived` has happened; what comes next waits for `used`.
    """

    def __init__(self, like: Stored, tokens: int, device: torch.device, copies: torch.cuda.Stream):
        self._device = device
        self.tokens = tokens
        with torch.inference_mode(False):  # it is made between passes and written in them
            self.raw = [
                kind[0].raw.new_empty(len(kind), tokens, kind[0].raw.shape[1], device=device) for kind in like
            ]
        for own in self.raw:
            own.record_stream(copies)
        self.rows = 0
        self.arrived: torch.cuda.Event | None = None
        # Whoever had this memory before may still be at work.
        self.used = torch.cuda.current_stream(device).record_event()

    def arrive(self) -> None:
        """What is done with it from now on waits for what is on its way."""
        if self.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self.arrived)
            self.arrived = None


class _Pass:
    """What the dearest pass so far took of a card's memory, beyond what was held when it began."""

    def __init__(self, device: torch.device):
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._took = 0
        self.begin()

    def begin(self) -> None:
        """A pass begins."""
        self._held = torch.cuda.memory_allocated(self._device)

    def room(self) -> int:
        """Bytes that may be kept beside such a pass."""
        self._took = max(self._took, torch.cuda.max_memory_allocated(self._device) - self._held)
        return device_room(self._device) - self._took
