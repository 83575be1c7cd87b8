"""TOVA: drop, at every step, the token that the current query attends to least.

Oren et al. 2024: nothing else is remembered, and recent tokens have no privilege. The paper averages the
attention over a layer's heads; here it is that of a KV head's group, and in the prefill that of the one head
that was sampled. See `evicting` for the prefill and the leniency.
"""

from __future__ import annotations

from torch import Tensor

from offload_decode.selectors.evicting import Evicting


class TOVA(Evicting):
    """Drop the token with the lowest attention of the current query."""

    name = "tova"
    paper = "https://arxiv.org/abs/2401.06104"

    def judge(self, merit: Tensor, attention: Tensor) -> Tensor:
        """The attention of the current query."""
        return attention

    def recent(self, k: int) -> int:
        """None."""
        return 0
