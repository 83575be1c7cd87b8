"""KeyDiff: the keys least similar to the others, whatever is asked.

Park et al. 2025: the mean is that of the keys at unit length, so that the cosine with it ranks a key by
its mean cosine with all keys. The paper evicts block by block; here the whole store is ranked at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import Rows
from offload_decode.selectors.base import Selector
from offload_decode.selectors.scores import blocks, top_tokens
from offload_decode.types import Selection


class KeyDiff(Selector):
    """Select the keys that are least similar (cosine) to the mean key."""

    name = "keydiff"
    paper = "https://arxiv.org/abs/2504.15364"
    reads = "nothing (every key at a layer's first use)"
    holds = "k ids"

    def prepare(self) -> None:
        self._ranked: dict[int, Tensor] = {}  # int64 [Hkv, k] for the largest k so far

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The k least similar, the same for every row of a KV head."""
        ranked = self._ranked.get(layer)
        if ranked is None or ranked.shape[1] < k:
            ranked = torch.stack([self._least_similar(keys, k) for keys in self.host.layer_keys(layer)])
            self._ranked[layer] = ranked = ranked.cpu()
        return Selection(ranked[:, None, :k].expand(-1, queries.rows.shape[1], -1))

    def _least_similar(self, keys: Rows, k: int) -> Tensor:
        length, device = len(keys), self.host.device

        def unit(part: slice) -> Tensor:
            return normalize(keys.read(part, device), dim=-1)

        anchor = sum((unit(part).sum(0) for part in blocks(length)), torch.zeros(keys.dim, device=device))
        return top_tokens(lambda part: -(unit(part) @ anchor)[None], 1, length, k)[1][0]
