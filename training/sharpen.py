"""Sharper scores in the full layers, for texts far longer than any window of training.

A factor on the query weights (and biases) lets a match stand out of more tokens; too large a one hurts what
counts or averages. It is chosen by the loss on rows behind which up to a million tokens are simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from training.curriculum import Batch
from training.forward import Trainee

FACTORS = (0.9, 1.0, 1.1, 1.2, 1.35, 1.5)


@torch.no_grad()
def losses(
    trainee: Trainee, batches: Iterable[Batch], eos: int, factors: Sequence[float] = FACTORS
) -> list[float]:
    """The mean loss of the batches with each factor."""
    sums = [0.0] * len(factors)
    for batch in batches:
        arrays = batch.tensors()
        for i, factor in enumerate(factors):
            loss, *_ = trainee(*arrays, torch.tensor(factor), eos)
            sums[i] += float(loss)
    return sums


@torch.no_grad()
def sharpen(model: Any, factor: float) -> None:
    """Fold the factor into the queries of the full layers."""
    for layer in model.model.layers:
        attention = layer.self_attn
        if getattr(attention, "sliding_window", None) is None:
            attention.q_proj.weight.mul_(factor)
            if attention.q_proj.bias is not None:
                attention.q_proj.bias.mul_(factor)
