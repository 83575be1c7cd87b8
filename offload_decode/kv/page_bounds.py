"""Bounds of each page's keys for Quest (arXiv 2406.10774, §3.3), rounded outward to few bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload_decode.attention.pages_reference import SCALE_PAGES, PageBounds
from offload_decode.attention.rows import Rows, tensor_view
from offload_decode.common.errors import ConfigError, StoreError
from offload_decode.store.base import Store
from offload_decode.types import PAGE_METADATA

STEP_TOKENS = 1 << 14  # widened to float32 at a time
_HALF_MAX = torch.finfo(torch.float16).max
_LARGEST = 3.4e38  # a step more of an int8 scale is infinite


def bounds_bytes(kv_heads: int, pages: int, dim: int, metadata: str) -> int:
    """Bytes of the bounds of a layer's whole pages, with the scales of int8."""
    bounds = 2 * kv_heads * pages * dim
    return 2 * bounds if metadata == "fp16" else bounds + 4 * kv_heads * -(-pages // SCALE_PAGES) * dim


def stored_bounds(store: Store, layer: int, page_size: int, metadata: str) -> GrowingBounds:
    """Bounds of one layer's keys, on the host: from its pages where these divide `page_size`, or keys."""
    bounds, manifest = GrowingBounds(page_size, metadata), store.manifest
    heads, stride = range(manifest.shape.kv_heads), manifest.page_size
    host = torch.device("cpu")
    step = max(1, STEP_TOKENS // stride) * stride
    for start in range(0, manifest.n_tokens, step):
        end = min(start + step, manifest.n_tokens)
        if page_size % stride == 0:
            part = slice(start // stride, -(-end // stride))
            own = [store.pages(layer, head) for head in heads]
            lower, upper = (torch.stack([tensor_view(page[side][part]) for page in own]) for side in (0, 1))
            bounds.append_pages(lower, upper, stride, end - start)
        else:
            keys = [Rows(store.keys(layer, head)[start:end]) for head in heads]
            bounds.append(torch.stack([own.read(slice(None), host) for own in keys]))
    return bounds


class GrowingBounds:
    """The bounds of one layer's pages of `page_size` tokens, kept as `metadata` says: `fp16` or `int8`,
    however the tokens were appended.
    """

    def __init__(self, page_size: int, metadata: str):
        assert metadata in PAGE_METADATA, f"metadata {metadata!r} is none of {', '.join(PAGE_METADATA)}"
        self.page_size = page_size
        self.metadata = metadata
        self.length = 0
        self._round = _half if metadata == "fp16" else _bytes
        self._closed: list[PageBounds] = []
        # (-lower, upper) [2, Hkv, P', D] float32 of the pages whose scale is not known yet: exact.
        self._open: Tensor | None = None

    def append(self, keys: Tensor) -> None:
        """Go on with `keys [Hkv, T, D]`. Raises `StoreError` for keys that are not finite and `ConfigError`
        for those that fp16 cannot bound.
        """
        self._extend(keys, keys, 1, keys.shape[1])

    def append_pages(self, lower: Tensor, upper: Tensor, page_size: int, tokens: int) -> None:
        """Go on with `tokens` that came as bounds `[Hkv, P', D]` of smaller pages, which divide these."""
        assert self.page_size % page_size == 0, "pages are folded whole"
        assert self.length % page_size == 0, "only keys can fill a ragged page"
        self._extend(lower, upper, page_size, tokens)

    @property
    def bounds(self) -> PageBounds:
        """The bounds of all pages so far, the ragged last one included; only after the first `append`."""
        parts = self._closed if self._open is None else [*self._closed, self._round(self._open)]
        lower, upper = (
            torch.cat(side, dim=1) for side in zip(*((part.lower, part.upper) for part in parts), strict=True)
        )
        scales = [part.scale for part in parts if part.scale is not None]
        return PageBounds(lower, upper, torch.cat(scales, dim=1) if scales else None)

    def _extend(self, lower: Tensor, upper: Tensor, row_tokens: int, tokens: int) -> None:
        block = SCALE_PAGES * self.page_size
        while tokens:
            taken = min(tokens, block - self.length % block)
            rows = -(-taken // row_tokens)
            self._fold(torch.stack([-lower[:, :rows].float(), upper[:, :rows].float()]), row_tokens)
            lower, upper, tokens = lower[:, rows:], upper[:, rows:], tokens - taken
            self.length += taken
            if self._open is not None and self.length % block == 0:
                self._closed.append(self._round(self._open))
                self._open = None

    def _fold(self, rows: Tensor, row_tokens: int) -> None:
        """Takes `rows [2, Hkv, R, D]`, which end no later than the open pages' scale."""
        if not bool((rows.abs() <= _LARGEST).all()):
            raise StoreError("The keys hold NaN or infinite values: prefill the store again.")
        filled, width = (tokens // row_tokens for tokens in (self.length % self.page_size, self.page_size))
        pages = rows + 0.0  # -0 and 0 are one bound
        if width > 1:
            ahead = pad(pages, (0, 0, filled, -(filled + rows.shape[2]) % width), value=-torch.inf)
            pages = ahead.reshape(*rows.shape[:2], -1, width, rows.shape[3]).amax(3)
        if self._open is None:
            self._open = pages
            return
        if filled:
            pages[:, :, 0] = torch.maximum(pages[:, :, 0], self._open[:, :, -1])
        self._open = torch.cat([self._open[:, :, : self._open.shape[2] - bool(filled)], pages], dim=2)


def _half(outer: Tensor) -> PageBounds:
    """`outer` = (-lower, upper), rounded up to float16."""
    if float(outer.max()) > _HALF_MAX:
        raise ConfigError(
            f"keys reach {float(outer.max()):g}, beyond the range of fp16: "
            "keep the page bounds in bytes with -o metadata=int8"
        )
    near = outer.half()
    bits = near.view(torch.int16)
    # The next larger number is one step of the bits away from zero, for a negative one towards it.
    above = torch.where(bits < 0, bits - 1, bits + 1).view(torch.float16)
    up = torch.where(near.float() < outer, above, near)
    return PageBounds(up[0].neg_(), up[1])


def _bytes(outer: Tensor) -> PageBounds:
    """`outer` = (-lower, upper), rounded up to 127 steps on either side, one scale a channel."""
    largest = outer.abs().amax(dim=(0, 2))
    scale = largest / 127
    scale = torch.where(scale * 127 < largest, torch.nextafter(scale, scale + torch.inf), scale)[:, None]
    steps = torch.where(scale > 0, torch.ceil(outer / scale), 0.0)
    steps = torch.where(steps * scale < outer, steps + 1, steps).clamp(-127, 127)
    return PageBounds(-steps[0].to(torch.int8), steps[1].to(torch.int8), scale)
