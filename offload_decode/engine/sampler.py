"""Choosing the next token from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload_decode.errors import ConfigError


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
            return logits.argmax(-1)
        if self._generator is None:
            self._generator = torch.Generator(logits.device).manual_seed(self.seed)
        # In float64 and from the largest down, so that no temperature is too low.
        scaled = (logits.double() - logits.amax(-1, keepdim=True)) / self.temperature
        weights, tokens = torch.softmax(scaled, -1).float().sort(-1, descending=True)
        # A token stays if the ones before it do not fill the nucleus yet; the first always stays.
        weights = torch.where(weights.cumsum(-1) - weights < self.top_p, weights, 0.0)
        picked = torch.multinomial(weights, 1, generator=self._generator)
        return tokens.gather(-1, picked).squeeze(-1)
