"""The generated KV, of the question and of generated tokens, and `Prefix`: attention to what is before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from offload_decode.attention.host_dense import layer_rows
from offload_decode.attention.index_queries import IndexQueries
from offload_decode.attention.pages_reference import PageBounds
from offload_decode.attention.rows import LayerRows
from offload_decode.kv.page_bounds import GrowingBounds
from offload_decode.types import AttentionState

ROOM = 4096
"""Most tokens of spare room: a long chunk of a prefill never doubles its memory."""


def room_for(tokens: int) -> int:
    """Tokens to allocate when the generated KV grows to hold so many."""
    return max(64, min(2 * tokens, tokens + ROOM))


class GeneratedKV:
    """Keys and values of the question and of generated tokens: `[B, Hkv, S, …]`, preallocated, grown by
    doubling, though never by more than `ROOM`; with bounds of their pages once somebody asks for these. A
    fork copies them as it appends, and not before.
    """

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._bounds: GrowingBounds | None = None
        self._compiled: tuple[Tensor | None, Tensor | None, LayerRows, LayerRows] | None = None
        self._shared = False  # with a fork: copy before writing
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, with the room for more; those that are shared with a fork too."""
        if self._keys is None or self._values is None:
            return 0
        return int(self._keys.nbytes) + (0 if self._values is self._keys else int(self._values.nbytes))

    @property
    def batch(self) -> int | None:
        """Rows of the batch; None as long as any number may come."""
        return None if self._keys is None else len(self._keys)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add keys `[B, Hkv, T, D]` and values `[B, Hkv, T, Dv]`, held once where they are the same, in the
        dtype of the first.
        """
        end, latent = self.length + keys.shape[2], values is keys
        if self._keys is None or self._values is None or self._shared or self._keys.shape[2] < end:
            self._keys = self._grown(self._keys, keys, end)
            self._values = self._keys if latent else self._grown(self._values, values, end)
            self._shared = False
        self._keys[:, :, self.length : end] = keys.detach()
        if not latent:
            self._values[:, :, self.length : end] = values.detach()
        self.length = end

    def _grown(self, buffer: Tensor | None, like: Tensor, needed: int) -> Tensor:
        batch, heads, _, dim = like.shape
        own = like if buffer is None else buffer
        with torch.inference_mode(False):  # a pass in that mode and one out of it may write to it
            grown = torch.empty(batch, heads, room_for(needed), dim, dtype=own.dtype, device=own.device)
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def view(self) -> tuple[Tensor, Tensor]:
        """Keys and values so far, without a copy; only after the first `append`."""
        assert self._keys is not None, "nothing was appended"
        assert self._values is not None
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    @property
    def compiled(self) -> tuple[LayerRows, LayerRows]:
        """Keys and values on a host, as compiled functions take them; only after the first `append`."""
        known = self._compiled
        if known is None or known[0] is not self._keys or known[1] is not self._values:
            buffers = self._keys, self._values
            keys, values = (layer_rows(one) for one in buffers if one is not None)
            known = self._compiled = *buffers, keys, values
        lengths = np.full(len(known[2].addresses), self.length)
        return known[2]._replace(lengths=lengths), known[3]._replace(lengths=lengths)

    def page_bounds(self, page_size: int, metadata: str) -> PageBounds:
        """Bounds of the pages of the one sequence that is held, extended by what was appended since."""
        keys, _ = self.view()
        assert len(keys) == 1, "pages are of one sequence"
        known = self._bounds
        if known is None or (known.page_size, known.metadata) != (page_size, metadata):
            known = self._bounds = GrowingBounds(page_size, metadata)
        if known.length < self.length:
            known.append(keys[0, :, known.length :])
        return known.bounds

    def fork(self) -> GeneratedKV:
        """An independent continuation."""
        copy = GeneratedKV()
        copy._keys, copy._values, copy.length = self._keys, self._values, self.length
        copy._shared = self._shared = self._keys is not None
        return copy

    def trim(self) -> None:
        """Release the spare room, and the page bounds, which are rebuilt when needed."""
        self._bounds = None
        if self._keys is not None and self._keys.shape[2] > self.length:
            self._replace(lambda buffer: buffer[:, :, : self.length].clone())

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        assert 0 <= length <= self.length
        self.length = length
        if not length:  # a batch of another size may follow
            self._keys = self._values = None
        if self._bounds is not None and self._bounds.length > length:
            self._bounds = None

    def rows(self, index: Tensor) -> None:
        """Reorder, repeat or drop batch rows: `index` int64 over the present rows."""
        self._replace(lambda buffer: buffer.index_select(0, index.to(buffer.device)))
        self._bounds = None

    def _replace(self, made: Callable[[Tensor], Tensor]) -> None:
        """Put what is made of keys and values in their place."""
        if self._keys is None or self._values is None:
            return
        latent = self._values is self._keys
        with torch.inference_mode(False):
            self._keys = made(self._keys)
            self._values = self._keys if latent else made(self._values)
        self._shared = False


class Attendable(Protocol):
    """What the tokens of a pass attend to beside the generated KV: a prefix, or several side by side."""

    def begin(
        self,
        layer: int,
        query: Tensor,
        scaling: float,
        softcap: float | None,
        index: IndexQueries | None = None,
    ) -> Callable[[], AttentionState]:
        """Begin to attend from `query [B, H, T, D]` to the prefix of one full-attention layer; every row sees
        all of it. `index`: what the model's own indexer asks for the same tokens. Calling what is returned
        finishes it: work that a device is given in between, such as the attention to the generated KV, runs
        while the host searches.
        """


class Prefix(Attendable, Protocol):
    """What precedes the generated KV: a stored corpus (decoding) or its part written so far (prefill)."""

    @property
    def length(self) -> int:
        """Tokens in the prefix."""

    @property
    def remembers(self) -> bool:
        """Attention depends on earlier tokens, so none can be taken back."""

    @property
    def by_token(self) -> bool:
        """Whether it has `attend_token(layer, query, generated, scaling, softcap)`, which attends from one
        token on a host, float32 `query [H, D]`, to the prefix and all of the generated KV: `[H, Dv]`.
        """

    @property
    def whole_generated(self) -> float:
        """Tokens of the generated KV up to which all of it is attended."""

    def attend_generated(
        self, layer: int, query: Tensor, generated: GeneratedKV, scaling: float, softcap: float | None
    ) -> AttentionState | None:
        """Attend to a part of the generated KV; None where all of it is to be attended."""
