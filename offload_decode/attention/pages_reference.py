"""Quest's pages in plain torch: bounds, their scores, the best pages and the attention over them.

Quest, arXiv 2406.10774, §3.3-3.5. These are the reference that the kernels of hosts and devices are tested
against. Shapes: `Hkv` KV heads, `Q` lists of pages a KV head, `G` query heads that share a list, `P` pages of
`S` tokens, `N` tokens (the last page may be ragged), `D` channels of queries and keys, `Dv` of values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from offload_decode.attention.queries import attend
from offload_decode.types import AttentionState

SCALE_PAGES = 256  # pages that share int8 scales


class PageBounds(NamedTuple):
    """Channel-wise bounds of the keys of each page: `lower` and `upper [Hkv, P, D]`, never inside the true
    ones.

    float32 or float16 as they are, or int8 with `scale [Hkv, ceil(P / SCALE_PAGES), D]` float32: channel d of
    page p stands for `lower[p, d] · scale[p // SCALE_PAGES, d]`.
    """

    lower: Tensor
    upper: Tensor
    scale: Tensor | None = None

    def first(self, pages: int) -> PageBounds:
        """The bounds of the first pages."""
        return PageBounds(self.lower[:, :pages].contiguous(), self.upper[:, :pages].contiguous(), self.scale)

    def to(self, device: torch.device) -> PageBounds:
        """The bounds on a device."""
        scale = None if self.scale is None else self.scale.to(device)
        return PageBounds(self.lower.to(device), self.upper.to(device), scale)

    def widened(self) -> tuple[Tensor, Tensor]:
        """Both bounds in float32."""
        lower, upper = self.lower.float(), self.upper.float()
        if self.scale is None:
            return lower, upper
        scale = self.scale.repeat_interleave(SCALE_PAGES, dim=1)[:, : lower.shape[1]]
        return lower * scale, upper * scale


def page_scores(query: Tensor, bounds: PageBounds, corner: float = 1.0) -> Tensor:
    """`sum_d max(q_d · lower_d, q_d · upper_d)`, at least q·k for every key of the page, and the largest of
    it over the group: `query [Hkv, Q, G, D]` to float32 `[Hkv, Q, P]`. Below 1, `corner` narrows the bounds
    to that share of their width, around the same middle.
    """
    lower, upper = bounds.widened()
    near, far = (1 + corner) / 2, (1 - corner) / 2
    lower, upper = near * lower + far * upper, far * lower + near * upper
    query = query.float()
    rising, falling = query.clamp(min=0), query.clamp(max=0)
    scores = torch.einsum("hqgd,hpd->hqgp", rising, upper) + torch.einsum("hqgd,hpd->hqgp", falling, lower)
    return scores.amax(2)


def top_pages(scores: Tensor, k: int) -> Tensor:
    """The `k` pages with the largest scores, best first, and of equal ones the earlier first: float32
    `[Hkv, Q, P]` to int64 `[Hkv, Q, min(k, P)]`.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def page_tokens(pages: Tensor, page_size: int, n_tokens: int, limit: Tensor) -> Tensor:
    """Tokens of lists of pages: `pages [Hkv, Q, K]`, padded with -1, to int64 ids `[Hkv, Q, K · S]`, padded
    with -1.

    `limit [Hkv]` int64: the places of a list from there on are padding too, so that a budget that is no
    multiple of the page size is kept.
    """
    ids = pages.unsqueeze(-1) * page_size + torch.arange(page_size, device=pages.device)
    place = torch.arange(ids.shape[2] * page_size, device=pages.device)
    kept = (pages.unsqueeze(-1) >= 0) & (ids < n_tokens)
    ids = torch.where(kept, ids, -1).flatten(2)
    return torch.where(place < limit.to(pages.device)[:, None, None], ids, -1)


def places(tokens: Tensor, rest: int, page_size: int) -> Tensor:
    """How many places of a list hold `tokens` tokens, int64, where a page of `rest` tokens comes first."""
    return torch.where((rest > 0) & (tokens > rest), tokens + page_size - rest, tokens)


def count_tokens(pages: Tensor, page_size: int, n_tokens: int, limit: Tensor) -> int:
    """How many tokens `page_tokens` gives for all lists together."""
    places = torch.arange(pages.shape[2], device=pages.device) * page_size
    inside = (n_tokens - pages * page_size).minimum(limit.to(pages.device)[:, None, None] - places)
    return int(inside.clamp(0, page_size).masked_fill(pages < 0, 0).sum())


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    page_size: int,
    limit: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """Attend to the tokens of lists of pages (see `page_tokens`).

    `query [Hkv, Q, G, D]`, `keys [Hkv, N, D]`, `values [Hkv, N, Dv]`, `pages [Hkv, Q, K]` int64, unique in a
    list and padded with -1; `out [Hkv, Q, G, Dv]` and `lse [Hkv, Q, G]` float32. A list of nothing gives the
    empty state.
    """
    ids = page_tokens(pages, page_size, keys.shape[1], limit)
    heads, lists, tokens = ids.shape
    place = ids.clamp(min=0).flatten(1)[..., None]
    own_keys, own_values = (
        part.gather(1, place.expand(-1, -1, part.shape[2])).reshape(heads * lists, 1, tokens, -1)
        for part in (keys, values)
    )
    # Lists stand in the batch, a list's group in the query tokens.
    state = attend(
        query.reshape(heads * lists, 1, *query.shape[2:]),
        own_keys,
        own_values,
        scaling,
        mask=(ids >= 0).reshape(heads * lists, 1, 1, tokens),
        softcap=softcap,
    )
    return AttentionState(state.out.reshape(*query.shape[:-1], -1), state.lse.reshape(query.shape[:-1]))
