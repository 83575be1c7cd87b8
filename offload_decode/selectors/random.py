"""Random tokens: the control that every selector must beat."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.selectors.base import Selector, SelectorOptions
from offload_decode.types import Selection


@dataclass(frozen=True)
class Options(SelectorOptions):
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
    options_type = Options
    options: Options
    one_question = True  # whose rows draw one after the other

    def prepare(self) -> None:
        self.draws = 0

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """k tokens for each row."""
        # For small shares numpy draws with Floyd's algorithm, whose cost is that of k, not of N.
        generator = np.random.default_rng([self.options.seed, self.draws])
        self.draws += 1
        heads, rows, _ = queries.rows.shape
        ids = np.empty((heads * rows, k), dtype=np.int64)
        for row in ids:
            row[:] = generator.choice(self.host.length, k, replace=False)
        return Selection(torch.from_numpy(ids).reshape(heads, rows, k))

    def reset(self) -> None:
        self.draws = 0

    def fork(self) -> Self:
        return copy.copy(self)
