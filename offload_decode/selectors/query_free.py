"""Selectors that choose whatever is asked, and what others are measured against."""

import copy
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import Rows
from offload_decode.common.errors import ConfigError
from offload_decode.selectors.base import EVERYTHING, Selector, SelectorOptions
from offload_decode.selectors.scores import blocks, top_tokens
from offload_decode.types import Selection


@dataclass(frozen=True)
class DenseOptions(SelectorOptions):
    """The budget is everything."""

    budget: str = "100%"


class Dense(Selector):
    """Select every stored token, read block by block."""

    name = "dense"
    paper = "https://arxiv.org/abs/1706.03762"
    reads = "nothing"
    holds = "nothing"
    options_type = DenseOptions

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """Everything, whatever the budget says."""
        return EVERYTHING


class KeyDiff(Selector):
    """Select the keys that are least similar (cosine) to the mean key.

    Park et al. 2025: the mean is that of the keys at unit length, so that the cosine with it ranks a key by
    its mean cosine with all keys. The paper evicts block by block; here the whole store is ranked at once.
    """

    name = "keydiff"
    paper = "https://arxiv.org/abs/2504.15364"
    reads = "nothing (every key at a layer's first use)"
    holds = "k ids"

    def prepare(self) -> None:
        self._ranked: dict[int, Tensor] = {}  # int64 [Hkv, k] for the largest k so far

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The k least similar, the same for every row of a KV head."""
        ranked = self._ranked.get(layer)
        if ranked is None or ranked.shape[1] < k:
            ranked = torch.stack([self._least_similar(keys, k) for keys in self.host.layer_keys(layer)])
            self._ranked[layer] = ranked = ranked.cpu()
        return Selection(ranked[:, None, :k].expand(-1, queries.vectors.shape[1], -1))

    def _least_similar(self, keys: Rows, k: int) -> Tensor:
        length, device = len(keys), self.host.device

        def unit(part: slice) -> Tensor:
            return normalize(keys.read(part, device), dim=-1)

        anchor = sum((unit(part).sum(0) for part in blocks(length)), torch.zeros(keys.dim, device=device))
        return top_tokens(lambda part: -(unit(part) @ anchor)[None], 1, length, k)[1][0]


@dataclass(frozen=True)
class RandomOptions(SelectorOptions):
    """`seed`: which draws are made."""

    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"option seed {self.seed} is out of range: it must be 0 or more")


class Random(Selector):
    """Select tokens drawn uniformly without replacement, anew for every row and step.

    Draws are counted from the question on: asked again, it meets the same ones, and a fork goes on as the
    conversation that it was taken from would.
    """

    name = "random"
    paper = "none: a control"
    reads = "nothing"
    holds = "nothing"
    options_type = RandomOptions
    options: RandomOptions
    one_question = True  # whose rows draw one after the other

    def prepare(self) -> None:
        self.draws = 0

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """k tokens for each row."""
        # For small shares numpy draws with Floyd's algorithm, whose cost is that of k, not of N.
        generator = np.random.default_rng([self.options.seed, self.draws])
        self.draws += 1
        heads, rows, _ = queries.vectors.shape
        ids = np.empty((heads * rows, k), dtype=np.int64)
        for row in ids:
            row[:] = generator.choice(self.host.length, k, replace=False)
        return Selection(torch.from_numpy(ids).reshape(heads, rows, k))

    def reset(self) -> None:
        self.draws = 0

    def fork(self) -> Self:
        return copy.copy(self)


@dataclass(frozen=True)
class StreamingOptions(SelectorOptions):
    """`sinks`: how many of the first tokens are kept."""

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(f"option sinks {self.sinks} is out of range: it must be 0 or more")


class Streaming(Selector):
    """Select the first tokens and the most recent ones.

    Xiao et al. 2023; positions stay those of the prefill, because the keys are stored after RoPE.
    """

    name = "streaming"
    paper = "https://arxiv.org/abs/2309.17453"
    reads = "nothing"
    holds = "nothing"
    options_type = StreamingOptions
    options: StreamingOptions

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The sinks, then the last tokens, the latest first; the same for every row."""
        sinks = min(self.options.sinks, k)
        latest = self.host.length - 1 - torch.arange(k - sinks)
        ids = torch.cat([torch.arange(sinks), latest])
        return Selection(ids.expand(*queries.vectors.shape[:2], k))
