"""Muon (Jordan 2024; scaled as in arXiv 2502.16982, section 2.2), all matrices of a shape at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made nearly orthogonal. Updates have the size of AdamW's."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        momentum: float = 0.95,
        decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
            for weight in group["params"]:
                shapes.setdefault(tuple(weight.shape), []).append(weight)
            for shape, weights in shapes.items():
                grads = torch.stack([w.grad for w in weights if w.grad is not None])
                state = self.state[weights[0]]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(grads)
                buffer = state["buffer"].lerp_(grads, 1 - group["momentum"])
                updates = orthogonal(grads.lerp(buffer, group["momentum"]))
                size = 0.2 * max(shape) ** 0.5 * group["lr"]
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-size)


def orthogonal(grads: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest orthogonal matrices [N, R, C] by Newton-Schulz iteration of order five, about."""
    x = grads.bfloat16() if grads.is_cuda else grads
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if tall else x).to(grads.dtype)
