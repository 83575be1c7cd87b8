"""How the next-token distributions of several documents become one: opinion pools, linear (`mixture`) and
logarithmic (`product`), and the best of contrasted experts (`pced`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

BETA, GAMMA = 0.25, 2.5
"""Of `pced`: how much the model without a document is taken off, and how much the weights count."""


def mixture(logs: Tensor, weights: Tensor, alone: Tensor | None) -> Tensor:
    """log Σ w p: of log-probabilities `[K, V]` and log-weights `[K]` one row `[V]`."""
    return (logs + weights[:, None]).logsumexp(0)


def product(logs: Tensor, weights: Tensor, alone: Tensor | None) -> Tensor:
    """Σ w log p, up to a constant."""
    return weights.exp() @ logs


def pced(logs: Tensor, weights: Tensor, alone: Tensor | None) -> Tensor:
    """max (1 + β) log p - β log p_alone + γ log w, up to a constant, where p_alone `[V]` is that of the model
    without a document (arXiv 2601.08670). A token that this one may not say is not raised for it.
    """
    assert alone is not None, "its conversation runs with the others"
    best = ((1 + BETA) * logs + GAMMA * weights[:, None]).amax(0)
    return torch.where((best > -torch.inf) & (alone > -torch.inf), best - BETA * alone, best)


WAYS: Mapping[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "mixture": mixture,
    "product": product,
    "pced": pced,
}
