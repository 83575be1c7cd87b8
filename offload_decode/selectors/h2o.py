"""H2O: heavy hitters, the tokens with the largest sum of attention so far, and the most recent ones.

Zhang et al. 2023, Algorithm 1: half of the cache for heavy hitters, half for recent tokens. A token that
leaves the recent half, which slides on over the question and the answer, is kept only for its sum. Sums are
of a KV head, over the query heads of its group. See `evicting` for the prefill and the leniency.
"""

from __future__ import annotations

from torch import Tensor

from offload_decode.selectors.evicting import Evicting


class H2O(Evicting):
    """Drop the token with the smallest running sum of attention outside the recent half."""

    name = "h2o"
    paper = "https://arxiv.org/abs/2306.14048"

    def judge(self, merit: Tensor, attention: Tensor) -> Tensor:
        """The sum of all attention so far."""
        return merit + attention

    def recent(self, k: int) -> int:
        """Half of the cache."""
        return k // 2
