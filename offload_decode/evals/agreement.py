"""Do a selector's next tokens agree with those of dense attention?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offload_decode.engine.engine import Engine
from offload_decode.evals.live_queries import DenseRun


@dataclass(frozen=True)
class Agreement:
    """Over so many generated tokens: KL(dense ‖ selector) in nats, and how often the first choice agrees."""

    tokens: int
    kl_mean: float
    kl_p95: float
    kl_max: float
    top1: float


def forced(engine: Engine, run: DenseRun, progress: Callable[[], None]) -> Tensor:
    """Logits `[n, V]` of an engine that is given a dense run's tokens one by one, whatever it would say."""
    logits = [engine.ask(run.question)]
    progress()
    for token in run.tokens[:-1]:
        logits.append(engine.extend([token]))
        progress()
    return torch.stack(logits)


def divergence(dense: Tensor, other: Tensor) -> Tensor:
    """KL(dense ‖ other) in nats, float64 `[n]`, of logits `[n, V]`."""
    expected, given = (torch.log_softmax(logits.double(), dim=-1) for logits in (dense, other))
    # A token that dense attention rules out (-inf) adds nothing.
    terms = torch.where(torch.isneginf(expected), 0.0, expected.exp() * (expected - given))
    return terms.sum(-1).clamp(min=0.0)


def agreement(pairs: Sequence[tuple[Tensor, Tensor]]) -> Agreement:
    """Over the logits `(dense, other)` of all runs."""
    divergences = torch.cat([divergence(dense, other) for dense, other in pairs]).cpu().numpy()
    same = torch.cat([dense.argmax(-1) == other.argmax(-1) for dense, other in pairs])
    return Agreement(
        tokens=len(same),
        kl_mean=float(divergences.mean()),
        kl_p95=float(np.percentile(divergences, 95)),
        kl_max=float(divergences.max()),
        top1=float(same.double().mean()),
    )
