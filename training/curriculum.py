"""What the demo models are trained on: repeats, then phrases, then facts in windows of several lengths."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from training import several, synthetic
from training.fillers import Fillers
from training.items import ALTERNATIVES, HINTS
from training.marks import NOTHING
from training.rows import Row, Rows

FAR_KEYS = 192  # sampled keys that stand for the filler of other texts
FAR_FACTS = 64  # and for facts with other keys
FAR_SHARE = 0.6  # of the rows that may have far distractors
LEAST_FAR = 300
CROWD = 64
CROWDED = 1 << 16  # tokens of the longest list that is simulated
MOST_FACTS = 6e4  # tokens of facts: two thousand needles
BOUND = 128  # values' tokens of a row that are led to the names they belong to
FARTHEST = 1_200_000  # places of a rotary model in training


class Batch(NamedTuple):
    """The arguments of `Trainee.forward`, and what each row is."""

    tokens: np.ndarray
    places: np.ndarray
    picked: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    others: np.ndarray
    guided: np.ndarray
    hints: np.ndarray
    opens: np.ndarray
    ends: np.ndarray
    origins: np.ndarray
    so_far: np.ndarray
    counted: np.ndarray
    bound: np.ndarray
    crowd: np.ndarray
    branches: np.ndarray
    far_index: np.ndarray
    far_places: np.ndarray
    far_bias: np.ndarray
    kinds: list[str]

    def tensors(self, device: str = "cpu") -> list[torch.Tensor]:
        """All but the kinds."""
        arrays: Any = self[:-1]
        return [torch.as_tensor(x).to(device, non_blocking=True) for x in arrays]


@dataclass(frozen=True)
class Stage:
    """Ends when the kind `watch` is right to the share `goal`, or after `steps`; 0 steps have no end."""

    name: str
    windows: Mapping[int, float]
    mixture: Mapping[str, float]  # of windows of 1,024 tokens at most
    steps: int = 0
    watch: str = ""
    goal: float = 2.0
    tokens: int = 4096  # of one step
    softening: tuple[float, ...] = (1.0,)  # by turns: full layers' scores made smaller leave a margin
    far: float = 0  # how many tokens of other texts to simulate at most
    rate: float = 2.5e-3
    lists: Mapping[str, float] = field(default_factory=dict)  # mixture of longer windows


SYNTHETIC = {"repeats": 0.02, "phrases": 0.03, "recall": 0.05, "several": 0.2}
FACTS = {
    "needles": 0.13,
    "identifiers": 0.07,
    "pairs": 0.04,
    "values": 0.13,
    "plain": 0.06,
    "records": 0.07,
    "tracking": 0.11,
    "documents": 0.25,
    "common": 0.14,
    "coded": 0.1,
    "suite": 0.06,
}
SIMPLE = {"pairs": 0.3, "needles": 0.2, "plain": 0.2, "records": 0.14, "documents": 0.1}
MIXED = SYNTHETIC | FACTS
LISTS = {
    "common": 0.36,
    "coded": 0.14,
    "suite": 0.05,
    "needles": 0.16,
    "identifiers": 0.1,
    "values": 0.12,
    "tracking": 0.05,
    "documents": 0.14,
}

WINDOWS = {256: 0.06, 512: 0.26, 1024: 0.2, 2048: 0.24, 4096: 0.24}
SOFT = (1.0, 0.8, 0.65)

STAGES = (
    Stage("repeats-few", {64: 1}, {"repeats-few": 1}, 3000, "repeats-few", 0.7, tokens=2048),
    Stage("repeats", {128: 1}, {"repeats": 1}, 3000, "repeats", 0.8, tokens=2048),
    Stage("phrases", {256: 1}, {"repeats": 0.2, "phrases": 0.8}, 600, "phrases", 0.91),
    Stage("recall", {128: 0.5, 256: 0.5}, {"phrases": 0.2, "recall": 0.8}, 300, "recall", 0.9),
    Stage("several", {256: 1}, {"phrases": 0.1, "recall": 0.2, "several": 0.7}, 900, "several", 0.96),
    Stage("simple", {256: 1}, SYNTHETIC | SIMPLE, 600, "needles", 0.92),
    Stage("facts", {512: 1}, MIXED, 600, softening=SOFT[:2], far=3e4),
    Stage("long", WINDOWS, MIXED, 0, "", 2.0, 8192, SOFT, 1.5e6, 1.5e-3, LISTS),
)


class Mixer:
    """Draws rows and makes batches of them: the same seed, step, stage and rank give the same rows."""

    def __init__(self, tokenizer: Any, fillers: Fillers, rotary: bool, seed: int, rank: int = 0) -> None:
        self.rows = Rows(tokenizer, fillers)
        self.words = self.rows.words
        self.common = fillers.common()
        self.rotary, self.seed, self.rank = rotary, seed, rank

    def drawn(self, step: int, stage: Stage, times: float = 1) -> list[Row]:
        """One step's rows, all of one length, whatever the rank; `times` as many tokens as the stage says."""
        rng = np.random.default_rng((self.seed, step))
        window = int(rng.choice(list(stage.windows), p=list(stage.windows.values())))
        rng = np.random.default_rng((self.seed, step, 0, self.rank))
        mixture = stage.lists if stage.lists and window > 1024 else stage.mixture
        share = np.array(list(mixture.values()))
        count = max(1, int(times * stage.tokens) // window)
        kinds = rng.choice(list(mixture), count, p=share / share.sum())
        return [self.row(rng, str(kind), window) for kind in kinds]

    def batch(self, step: int, stage: Stage, rows: list[Row]) -> Batch:
        """The step's batch of its rows."""
        return assembled(np.random.default_rng((self.seed, step, 1, self.rank)), rows, stage.far, self.rotary)

    def row(self, rng: np.random.Generator, kind: str, length: int) -> Row:
        """One row of a kind."""
        nothing = np.zeros(length, bool)
        others = np.full((length, ALTERNATIVES), -1, np.int64)
        if kind == "several":
            made, belongs, lists = several.several(rng, length, self.words, self.common, self.rows.bos)
            none = np.zeros(length, np.int64)
            return Row(*made, made.ends, belongs, nothing, nothing, False, none, kind, lists)
        hints = np.full((length, HINTS), -1, np.int64)
        if kind == "phrases":
            tokens, weights = synthetic.phrase_bank(rng, length, self.words)
        elif kind == "recall":
            tokens, weights = synthetic.recall(rng, length, self.words, self.common)
        elif kind in ("repeats-few", "repeats"):
            few = kind == "repeats-few"
            tokens, weights = synthetic.repeats(rng, length, self.words[:: 8 if few else 1])
        else:
            return self.rows.row(random.Random(int(rng.integers(2**62))), length, kind)
        none = np.zeros(length, np.int64)
        taught = (tokens, weights, others, ~nothing, hints, none, tokens, none, NOTHING)
        return Row(*taught, nothing, nothing, False, none, kind)


class Steps(torch.utils.data.Dataset[list[Row]]):
    """The rows of a stage by their step, for a loader that may draw them in other processes."""

    def __init__(self, mixer: Mixer, stage: Stage, times: float) -> None:
        self.mixer, self.stage, self.times = mixer, stage, times

    def __getitem__(self, step: int) -> list[Row]:
        return self.mixer.drawn(step, self.stage, self.times)


def assembled(rng: np.random.Generator, rows: list[Row], far: float, rotary: bool) -> Batch:
    """Rows of one length as arrays: which tokens are predicted, which keys of other rows are met."""
    length = len(rows[0].tokens)
    tokens = np.stack([row.tokens for row in rows])
    most = max(32, length // 4)
    picked = np.zeros((len(rows), most), np.int64)
    targets = np.zeros((len(rows), most), np.int64)
    weights = np.zeros((len(rows), most), np.float32)
    others = np.full((len(rows), most, ALTERNATIVES), -1, np.int64)
    guided = np.zeros((len(rows), most), np.float32)
    hints = np.full((len(rows), most, HINTS), -1, np.int64)
    opens = np.zeros((len(rows), length), np.int64)
    counted = np.zeros((len(rows), length // 4), np.int64)
    bound = np.full((len(rows), BOUND, 3), -1, np.int64)
    for i, row in enumerate(rows):
        at = np.flatnonzero(row.weights[1:])
        if len(at) > most:
            # All that count in full as long as there is room, then some of the rest.
            order = rng.permutation(len(at))
            order = order[np.argsort(-row.weights[at[order] + 1], kind="stable")]
            at = np.sort(at[order[:most]])
        picked[i, : len(at)] = at
        targets[i, : len(at)] = row.tokens[at + 1]
        weights[i, : len(at)] = row.weights[at + 1]
        others[i, : len(at)] = row.others[at + 1]
        guided[i, : len(at)] = row.guided[at + 1]
        hints[i, : len(at)] = row.hints[at + 1]
        for number, said in enumerate(row.lists, 1):
            opens[i, said.start + np.array(said.starts)] = number
        some = rng.permutation(np.flatnonzero(row.so_far))[: counted.shape[1]]
        counted[i, : len(some)] = some
        some = rng.permutation(len(row.belongs))[:BOUND]
        bound[i, : len(some)] = row.belongs[some]
    ends, origins = np.stack([row.ends for row in rows]), np.stack([row.origins for row in rows])
    index, bias = distractors(rng, rows, far)
    places, far_places = spread(rng, len(rows), length, len(index)) if rotary else (None, None)
    if places is None or far_places is None:
        places = np.broadcast_to(np.arange(length), (len(rows), length)).copy()
        far_places = np.zeros(len(index), np.int64)
    branches = np.stack([row.branches for row in rows])
    places = side_by_side(places, branches)
    kinds = [row.kind for row in rows]
    crowd = np.stack([crowded(rng, row) for row in rows])
    so_far = np.stack([row.so_far for row in rows])
    led = (guided, hints, opens, ends, origins, so_far, counted, bound, crowd, branches)
    return Batch(tokens, places, picked, targets, weights, others, *led, index, far_places, bias, kinds)


def crowded(rng: np.random.Generator, row: Row) -> np.ndarray:
    """The logarithm of how many tokens each of a row stands for in the last layer, float32[T].

    That is one, but for a numbered list's tokens that are not of its common words: as if the list were up to
    CROWD times as long, or CROWDED tokens, and the common words had come no more often.
    """
    out = np.zeros(len(row.tokens), np.float32)
    if row.kind == "common":
        times = np.bincount(row.ends)
        times[0] = 0
        listed = np.flatnonzero(row.ends)
        common = set()
        for word in np.flatnonzero(times == times.max()):
            at = int(np.flatnonzero(row.ends == word)[0])
            while row.so_far[at]:
                common.add(int(row.so_far[at]))
                at -= 1
        rare = ~np.isin(row.so_far, list(common))
        rare[: listed[0]] = rare[listed[-1] + 1 :] = False
        out[rare] = rng.uniform(0, np.log(min(CROWD, CROWDED / len(row.tokens))))
    return out


def side_by_side(places: np.ndarray, branches: np.ndarray) -> np.ndarray:
    """Places int64[B, T] where each branch stands right behind what all of them see."""
    places = places.copy()
    for row, own in zip(places, branches, strict=True):
        first = np.flatnonzero(np.diff(own, prepend=0))  # of each branch
        for start, end in zip(first, [*first, len(own)][1:], strict=True):
            row[start:end] += row[first[0]] - row[start]
    return places


def distractors(rng: np.random.Generator, rows: list[Row], far: float) -> tuple[np.ndarray, np.ndarray]:
    """Keys of other rows, int64[N] into all tokens, and for each row the logarithms of what each stands for.

    Filler stands for at most `far` tokens, facts for a number drawn by itself.
    """
    if not far:
        return np.zeros(0, np.int64), np.zeros((len(rows), 0), np.float32)
    length = len(rows[0].tokens)
    pools = [
        (FAR_KEYS, far, np.flatnonzero(np.concatenate([row.background for row in rows]))),
        (FAR_FACTS, min(far, MOST_FACTS), np.flatnonzero(np.concatenate([row.facts for row in rows]))),
    ]
    index = np.zeros(FAR_KEYS + FAR_FACTS, np.int64)
    bias = np.full((len(rows), len(index)), -np.inf, np.float32)
    met = [row.far and rng.random() < FAR_SHARE for row in rows]
    start = 0
    for count, most, marked in pools:
        part = slice(start, start + count)
        start += count
        if len(marked) < count:
            continue
        index[part] = rng.choice(marked, count, replace=False)
        of_row = index[part] // length
        for i in np.flatnonzero(met):
            others = of_row != i
            if others.any():
                simulated = rng.uniform(np.log(LEAST_FAR), np.log(most))
                bias[i, part][others] = simulated - np.log(others.sum())
    return index, bias


def spread(rng: np.random.Generator, rows: int, length: int, far: int) -> tuple[np.ndarray, np.ndarray]:
    """Places with a few gaps (PoSE, arXiv 2309.10400): a short window knows the distances of a long text."""
    reach = int(np.exp(rng.uniform(np.log(length), np.log(FARTHEST))))
    steps = np.ones((rows, length), np.int64)
    steps[:, 0] = 0
    for i in range(rows):
        gaps = int(rng.integers(0, 4))
        for at in rng.integers(1, length, gaps):
            steps[i, at] += int(rng.integers(0, reach))
    start = reach
    return start + steps.cumsum(1), rng.integers(0, start, far)
