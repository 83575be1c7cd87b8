"""What the demo model is trained on: repeats, then phrases, then facts in ever longer windows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from training import synthetic
from training.contexts import Contexts
from training.synthetic import Row


@dataclass(frozen=True)
class Batch:
    """tokens int64[B, T], weights float32[B, T] of predicting each token, and what each row is."""

    tokens: np.ndarray
    weights: np.ndarray
    kinds: list[str]


@dataclass(frozen=True)
class Stage:
    """Ends after `steps`, or earlier when the accuracy of the kind `watch` reaches `goal`."""

    name: str
    window: int
    steps: int
    mixture: Mapping[str, float] = field(default_factory=dict)
    watch: str = "facts"
    goal: float = 2.0
    rate: tuple[float, float] = (3e-3, 3e-3)
    tokens: int = 4096  # of one step
    softening: tuple[float, ...] = (1.0,)  # by turns; see network.training_attention
    stated: bool = False  # answers are sentences that end as the fact does


MIXED = {"repeats": 0.02, "phrases": 0.05, "facts": 0.93}
SOFT = (1.0, 0.8, 0.6)

STAGES = (
    Stage("repeats-few", 64, 3000, {"repeats-few": 1}, "repeats-few", 0.7, tokens=2048),
    Stage("repeats", 128, 3000, {"repeats": 1}, "repeats", 0.8, tokens=2048),
    Stage("phrases", 256, 300, {"repeats": 0.2, "phrases": 0.8}, "phrases", 0.95, tokens=2048),
    Stage("facts-256", 256, 100, MIXED),
    Stage("facts-512", 512, 1000, MIXED, rate=(3e-3, 2e-3)),
    Stage("facts-1024", 1024, 1500, MIXED, rate=(2e-3, 1.5e-3), softening=SOFT),
    Stage("facts-2048", 2048, 500, MIXED, rate=(1.5e-3, 6e-4), softening=SOFT),
    Stage("facts-4096", 4096, 150, MIXED, rate=(6e-4, 1e-5), softening=SOFT),
    Stage("stated-512", 512, 600, MIXED, rate=(2e-3, 2e-3), stated=True),
    Stage("stated-1024", 1024, 700, MIXED, rate=(2e-3, 1e-3), softening=SOFT, stated=True),
    Stage("stated-2048", 2048, 400, MIXED, rate=(1e-3, 4e-4), softening=SOFT, stated=True),
    Stage("stated-4096", 4096, 150, MIXED, rate=(4e-4, 1e-5), softening=SOFT, stated=True),
    Stage("stated-last", 4096, 480, MIXED, rate=(1e-3, 1e-5), softening=SOFT, stated=True),
)


class Mixer:
    """Draws batches: the same generator state and stage give the same batch."""

    def __init__(self, tokenizer: Any, prose: list[str]) -> None:
        self.contexts = Contexts(tokenizer, prose)
        self.words = self.contexts.words

    def batch(self, rng: np.random.Generator, stage: Stage) -> Batch:
        """One step's rows, each `stage.window` tokens long."""
        kinds = rng.choice(list(stage.mixture), stage.tokens // stage.window, p=list(stage.mixture.values()))
        rows = [self.row(rng, str(kind), stage) for kind in kinds]
        return Batch(np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows]), [str(k) for k in kinds])

    def row(self, rng: np.random.Generator, kind: str, stage: Stage) -> Row:
        """One row of a kind."""
        length = stage.window
        if kind == "repeats-few":
            return synthetic.repeats(rng, length, self.words[::8])
        if kind == "repeats":
            return synthetic.repeats(rng, length, self.words)
        if kind == "phrases":
            return synthetic.phrase_bank(rng, length, self.words)
        return self.contexts.row(random.Random(int(rng.integers(2**62))), length, stage.stated)
