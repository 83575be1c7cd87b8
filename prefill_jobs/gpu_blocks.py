"""Earlier tokens on a GPU: the first blocks stay there while they fit; the others are copied anew for every
chunk, each while the one before it is attended to.

Blocks are the same whether they stay or are copied, and so are the numbers: a prefill that resumes with less
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


class GPUBlocks:
    """Blocks of the tokens of each of `layers`. `stored` waits for a layer's keys and values and gives them
    as they are stored; `needed`: how many tokens the chunks attend to at most.
    """

    def __init__(
        self, layers: Sequence[int], stored: Callable[[int], Stored], needed: int, device: torch.device
    ):
        self._layers = layers
        self._stored = stored
        self._first_layer = stored(layers[0])
        self._row_bytes = sum(rows.row_bytes for kind in self._first_layer for rows in kind)
        self._needed = needed
        self._device = device
        self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._kept: dict[int, list[_Block]] = {layer: [] for layer in layers}
        self._recycle: deque[_Block] = deque()  # least recently used first
        self._staging = cycle([Staging(pinned=True) for _ in range(2 * AHEAD)])
        self._attended = False
        self._pass_memory = 0  # the most that a pass took, beyond what was allocated when it began
        torch.cuda.reset_peak_memory_stats(device)
        self.begin_pass()

    @property
    def kept(self) -> int:
        """Blocks of every layer that stay on the GPU."""
        return min(map(len, self._kept.values()), default=0)

    def blocks(self, layer: int, length: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values `[1, Hkv, S, …]` of the first `length` tokens, block by block. A block may be
        read by what the current stream is given before the next one is asked for.
        """
        self._attended |= length > 0
        pending: deque[tuple[_Block, int]] = deque()
        for number, start in enumerate(range(0, length, BLOCK_TOKENS)):
            rows = min(BLOCK_TOKENS, length - start)
            block = self._kept[layer][number] if number < self.kept else self._recycled()
            if block.rows < rows:
                self._copy(layer, start, block, rows)
            pending.append((block, rows))
            if len(pending) == AHEAD:
                yield from self._lent(*pending.popleft(), dtype)
        while pending:
            yield from self._lent(*pending.popleft(), dtype)

    def keep(self, layer: int, start: int, parts: Sequence[Tensor]) -> None:
        """Fill the blocks that stay with a layer's tokens from `start` on, `[Hkv, T, …]` each, which are on
        the GPU already and will be stored as they are.
        """
        end = start + parts[0].shape[1]
        for number, block in enumerate(self._kept[layer]):
            first = number * BLOCK_TOKENS
            here = slice(max(start, first), min(end, first + block.tokens))
            if here.start < here.stop and block.rows == here.start - first:
                block.await_copy()
                there = slice(here.start - start, here.stop - start)
                for target, part in zip(block.raw, parts, strict=True):
                    target[:, here.start - first : here.stop - first] = part[:, there]
                block.rows = here.stop - first

    def begin_pass(self) -> None:
        self._held = torch.cuda.memory_allocated(self._device)

    def grow(self, length: int) -> None:
        """Let more blocks of the first `length` tokens stay, as long as there is room for them beside a pass.
        Nothing stays before a chunk has attended to earlier tokens, which shows how much memory that takes.
        """
        if not self._attended:
            return
        took = torch.cuda.max_memory_allocated(self._device) - self._held
        self._pass_memory = max(self._pass_memory, took)
        room, length = device_room(self._device) - self._pass_memory, min(length, self._needed)
        while (first := self.kept * BLOCK_TOKENS) < length:
            tokens = min(BLOCK_TOKENS, self._needed - first)
            room -= len(self._layers) * tokens * self._row_bytes
            if room < 0:
                return
            try:
                made = [self._allocate(tokens) for _ in self._layers]
            except torch.OutOfMemoryError:  # fragmented memory: copy this block every time, as later ones
                return
            for layer, own in zip(self._layers, made, strict=True):
                self._kept[layer].append(own)

    def _recycled(self) -> _Block:
        """An empty block: a new one, or the least recently used one where there are `AHEAD`."""
        few = len(self._recycle) < AHEAD
        block = self._allocate(min(BLOCK_TOKENS, self._needed)) if few else self._recycle.popleft()
        self._recycle.append(block)
        block.rows = 0
        return block

    def _allocate(self, tokens: int) -> _Block:
        return _Block(self._first_layer, tokens, self._device, self._copy_stream)

    def _copy(self, layer: int, first: int, block: _Block, rows: int) -> None:
        """Copy the rows that a block lacks; its first one is the token `first`."""
        stored = self._stored(layer)
        here = slice(block.rows, rows)
        there = slice(first + here.start, first + here.stop)
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(block.used)
            for kind, target in zip(stored, block.raw, strict=True):
                staging = next(self._staging)
                pinned = staging.room(len(kind) * (rows - block.rows), kind[0].row_bytes)
                pinned = pinned.view(target.dtype).view(len(kind), rows - block.rows, -1)
                for head, own in enumerate(kind):
                    pinned[head].copy_(own.raw[there])
                    target[head, here].copy_(pinned[head], non_blocking=True)
                staging.sent = self._copy_stream.record_event()
            block.arrived = self._copy_stream.record_event()
        block.rows = rows

    def _lent(self, block: _Block, rows: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        block.await_copy()
        parts = [
            kind[0].floats(own[:, :rows]).to(dtype)[None]
            for kind, own in zip(self._first_layer, block.raw, strict=True)
        ]
        yield parts[0], parts[-1]
        block.used = torch.cuda.current_stream(self._device).record_event()


class _Block:
    """Memory on a GPU for the keys and values of a block as they are stored, `raw [Hkv, tokens, W]` of each.
    The first `rows` tokens are there once `arrived` has happened; the next copy waits for `used`.
    """

    def __init__(self, like: Stored, tokens: int, device: torch.device, copies: torch.cuda.Stream):
        self._device = device
        self.tokens = tokens
        with torch.inference_mode(False):  # made between passes, written in them
            self.raw = [
                kind[0].raw.new_empty(len(kind), tokens, kind[0].raw.shape[1], device=device) for kind in like
            ]
        for own in self.raw:
            own.record_stream(copies)
        self.rows = 0
        self.arrived: torch.cuda.Event | None = None
        # A kernel that used this memory before may still be running.
        self.used = torch.cuda.current_stream(device).record_event()

    def await_copy(self) -> None:
        """The current stream waits for what is on its way."""
        if self.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self.arrived)
            self.arrived = None
