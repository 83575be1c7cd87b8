"""How the next token is picked from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload_decode.common.errors import ConfigError

_FEW = 1024


@dataclass
class Sampler:
    """Greedy at `temperature` 0, else nucleus sampling (`top_p`) from a generator seeded with `seed`."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    _generator: torch.Generator | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise ConfigError("temperature must be 0 or more and finite, and top_p above 0 and at most 1")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed {self.seed} is out of range: it must be 0 or more and fit in 64 bits")

    def __call__(self, logits: Tensor) -> Tensor:
        """`logits [B, V]` to token ids `[B]`."""
        if self.temperature == 0:
            if logits.device.type == "cpu" and logits.dtype == torch.float32:
                # numpy's loop takes a twentieth of torch's time.
                return torch.from_numpy(logits.detach().numpy().argmax(-1))
            return logits.argmax(-1)
        if self._generator is None:
            self._generator = torch.Generator(logits.device).manual_seed(self.seed)
        # In float64 and from the largest down, so that no temperature is too low.
        scaled = (logits.double() - logits.amax(-1, keepdim=True)) / self.temperature
        weights, tokens = torch.softmax(scaled, -1).float(), None
        if self.top_p < 1:
            weights, tokens = _nucleus(weights, self.top_p)
        so_far = weights.cumsum(-1, dtype=torch.float64)
        total = so_far[:, -1:]
        drawn = torch.rand(total.shape, dtype=total.dtype, device=total.device, generator=self._generator)
        # A product may be rounded up to the total, behind which there is no token.
        drawn = torch.minimum(drawn * total, torch.nextafter(total, torch.zeros_like(total)))
        picked = torch.searchsorted(so_far, drawn, right=True)
        return (picked if tokens is None else tokens.gather(-1, picked)).squeeze(-1)


def _nucleus(weights: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The fewest largest of `weights [B, V]` that hold this share: `[B, K]`, others 0, and their places."""
    best, places = weights.topk(min(_FEW, weights.shape[-1]), -1)
    if bool((best.sum(-1) < share).any()):  # to sort all takes ten times as long
        best, places = weights.sort(-1, descending=True)
    # A token stays if the ones before it do not fill the nucleus yet; the first always stays.
    before = best.cumsum(-1, dtype=torch.float64) - best
    return torch.where(before < share, best, 0.0), places
