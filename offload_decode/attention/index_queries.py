"""What a model's own indexer asks of earlier tokens: the scores of DeepSeek Sparse Attention.

DeepSeek-V3.2 (arXiv 2512.02556, §2.1, eq. 1): the score of token s for a query t is
I(t, s) = Σ_j w(t, j) · ReLU(q(t, j) · k(s)), the sum over the indexer's own heads, which share a key. The
query attends to the tokens of the `topk` largest scores, stored and generated ones together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PRODUCTS = 1 << 22  # of queries and keys, float32, in memory at once


@dataclass(eq=False)
class IndexQueries:
    """The queries of one pass to the index keys of `layer`, which the layers behind it may share.

    `vectors [B, T, heads, dim]` and `weights [B, T, heads]` float32, up to a positive factor in all scores.
    `generated`: scores `[B, T, S]` of the tokens after the prefix, -inf where one is not seen. Whoever
    chooses among the stored tokens leaves here what later calls go by: `least`, the score `[B, T]` from which
    on a query attends to a token (None: to all it sees), and `ids` of stored tokens, int64 `[B · T, k]`, best
    first and padded with -1.
    """

    layer: int
    vectors: Tensor
    weights: Tensor
    generated: Tensor
    least: Tensor | None = None
    ids: Tensor | None = None

    def scores(self, keys: Tensor) -> Tensor:
        """Scores `[B, T, S]` of index keys `[B or 1, S, dim]`."""
        return index_scores(self.vectors, self.weights, keys)

    def seen(self) -> Tensor | None:
        """Which generated tokens a query attends to, bool `[B, 1, T, S]`; None where nothing is left out."""
        if self.least is None:
            return None
        chosen = (self.generated >= self.least.unsqueeze(-1)) & ~self.generated.isneginf()
        return chosen.unsqueeze(1)

    def part(self, start: int, stop: int) -> IndexQueries:
        """Those of tokens `start:stop`, for which nothing is chosen yet."""
        own = slice(start, stop)
        return IndexQueries(self.layer, self.vectors[:, own], self.weights[:, own], self.generated[:, own])


def index_scores(vectors: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Eq. 1 for `vectors [B, T, heads, dim]`, `weights [B, T, heads]` and `keys [B or 1, S, dim]`: float32
    `[B, T, S]`.
    """
    batch, tokens, heads, dim = vectors.shape
    flat, count = vectors.reshape(batch, -1, dim), keys.shape[1]
    scores = torch.empty(batch, tokens, count, device=vectors.device)
    step = max(1, _PRODUCTS // max(1, batch * tokens * heads))
    for start in range(0, count, step):
        products = (flat @ keys[:, start : start + step].float().mT).relu_()
        products = products.view(batch, tokens, heads, -1)
        scores[..., start : start + step] = (weights.unsqueeze(-2) @ products).squeeze(-2)
    return scores
