"""From logits to the next token, and to its text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
            return _largest(logits)
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


def _largest(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # numpy's loop takes a twentieth of torch's time.
        return torch.from_numpy(logits.detach().numpy().argmax(-1))
    return logits.argmax(-1)


def _nucleus(weights: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The fewest largest of `weights [B, V]` that hold this share: `[B, K]`, others 0, and their places."""
    best, places = weights.topk(min(_FEW, weights.shape[-1]), -1)
    if bool((best.sum(-1) < share).any()):  # to sort all takes ten times as long
        best, places = weights.sort(-1, descending=True)
    # A token stays if the ones before it do not fill the nucleus yet; the first always stays.
    before = best.cumsum(-1, dtype=torch.float64) - best
    return torch.where(before < share, best, 0.0), places


# So many tokens whose text is not whole yet are no character any more.
_LONG = 64


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text of generated tokens, as they spell it: no spaces are removed before full stops."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Pieces:
    """Tokens in, text out: no piece ends within a character, and together they are the text of all tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        # The first `_ready` were shown last; they may join with what follows.
        self._tokens: list[int] = []
        self._ready = 0

    def push(self, token: int) -> str:
        """The text that one more token completes; it may be empty."""
        self._tokens.append(token)
        many = len(self._tokens)
        if many > _LONG and many % (many // 8):  # all are decoded again, so not after every one
            return ""
        before, written = decode(self._tokenizer, self._tokens[: self._ready]), self._written
        # A character of several bytes may lack its last ones: they decode to U+FFFD until they come.
        if written.endswith("\ufffd"):
            return ""
        # Of special tokens nothing is shown, and behind nothing a decoder leaves out a space.
        if written != before:
            del self._tokens[: self._ready]
        self._ready = len(self._tokens)
        return written[len(before) :]

    def rest(self) -> str:
        """The text that is left when no more tokens come."""
        before = decode(self._tokenizer, self._tokens[: self._ready])
        rest, self._tokens, self._ready = self._written[len(before) :], [], 0
        return rest

    @property
    def _written(self) -> str:
        return decode(self._tokenizer, self._tokens)
