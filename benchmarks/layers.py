"""One attention layer to measure on, and how much of its dense attention a step keeps: the share of the mass
and the error of the output, beside the reference of `eval fidelity` (`evals.closeness.Exact`).

Made up, with a long tail. Topics with Zipf weights persist over runs of about 32 tokens; a key is its topic's
centre, noise of its own and an offset that all keys of a head share, in channels of unequal strength. A query
is a direction that no key has, noise, and sixteen topics, half of them shared by the group, with weights that
fall as a power; rare topics are as likely as frequent ones.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload_decode.attention.queries import Queries
from offload_decode.evals.closeness import Exact
from offload_decode.indexes.files import aligned
from offload_decode.kv.host_cache import HostKV
from offload_decode.store.memory import MemoryStore
from offload_decode.types import LayerKind, ModelShape, Selection, StepStats

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

TOPICS, RUN, STRONG = 4096, 32, 16  # topics, their tokens at a stretch, and how many a query attends to
TOPIC_SHARE = 0.5  # of a key's variance about the offset
SPECTRUM = 0.75  # channels' variances fall as their rank to this power
DECAY, LOUDNESS = 0.7, 1.25  # of a query's topics; so loud that the weights fall about as 1 / rank at 128K
TUNING = 64  # steps of queries for tuning
BLOCK = 1 << 16
ENOUGH = 0.99  # of the oracle's mass, on average: below, a time does not count
TUNING_ROWS = 64  # queries of each head


@dataclass(frozen=True)
class Layer:
    """keys, values: for each KV head `[N, D]`, as stored. steps `[S, Hkv, G, D]` float32: queries of decoding
    steps, to be timed and judged. tuning `[Hkv, M, D]` float32: other queries, from which indexes may learn.
    """

    keys: list[Array]
    values: list[Array]
    steps: Float32
    tuning: Float32
    scaling: float

    @property
    def length(self) -> int:
        """Stored tokens."""
        return len(self.keys[0])

    @property
    def shape(self) -> str:
        """For people."""
        _, heads, group, dim = self.steps.shape
        return f"{heads} KV heads x {group}, D = {dim}, {self.keys[0].dtype.name}"

    def first(self, length: int) -> Layer:
        """Only the first tokens, as views."""
        keys, values = ([rows[:length] for rows in side] for side in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def heads(self, count: int) -> Layer:
        """Only the first heads."""
        return replace(
            self,
            keys=self.keys[:count],
            values=self.values[:count],
            steps=self.steps[:, :count],
            tuning=self.tuning[:count],
        )


@dataclass(frozen=True)
class MadeUp:
    """`length` made-up tokens of a layer; the same ones for the same numbers on every machine."""

    length: int
    heads: int = 8
    group: int = 4
    dim: int = 128
    dtype: str = "float16"
    steps: int = 8
    seed: int = 0

    def long_tailed(self) -> Layer:
        """Topics that recur, and queries whose attention falls as a power."""
        dim, topics = self.dim, _topics(self.length, np.random.default_rng([self.seed, 0]))

        def head(number: int) -> tuple[Array, Array, Float32]:
            generator = np.random.default_rng([self.seed, 1, number])
            strength = (np.arange(dim, dtype=np.float32) + 1) ** (-SPECTRUM / 2)
            strength *= np.float32(np.sqrt(dim / np.sum(strength**2)))
            generator.shuffle(strength)
            centres = _normal(generator, TOPICS, dim) * strength * np.float32(TOPIC_SHARE**0.5)
            offset = _normal(generator, 1, dim) * strength
            noise = strength * np.float32((1 - TOPIC_SHARE) ** 0.5)
            keys = self._rows(2, number, centres + offset, noise, topics)
            meanings = _normal(generator, TOPICS, dim) * np.float32(TOPIC_SHARE**0.5)
            noise = np.full(dim, (1 - TOPIC_SHARE) ** 0.5, np.float32)
            values = self._rows(3, number, meanings, noise, topics)
            elsewhere = 0.5 * _normal(generator, 1, dim) * strength - np.float32(0.3) * offset
            attended = _attended(generator, self.steps + TUNING, self.group)
            weights = (np.arange(STRONG, dtype=np.float32) + 1) ** -DECAY
            weights /= np.float32(np.sqrt(np.sum(weights**2) * TOPIC_SHARE))
            queries = np.einsum("j,sgjd->sgd", weights, centres[attended])
            queries += self._queries(generator) * strength
            return keys, values, (np.float32(LOUDNESS) * (queries + elsewhere)).astype(np.float32)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            keys, values, queries = zip(*pool.map(head, range(self.heads)), strict=True)
        by_step = np.ascontiguousarray(np.stack(queries).swapaxes(0, 1))
        tuning = by_step[self.steps :].swapaxes(0, 1).reshape(self.heads, -1, dim)
        steps, scaling = by_step[: self.steps], dim**-0.5
        return Layer(list(keys), list(values), steps, np.ascontiguousarray(tuning), scaling)

    def _queries(self, generator: np.random.Generator) -> Float32:
        rows = _normal(generator, (self.steps + TUNING) * self.group, self.dim)
        return rows.reshape(-1, self.group, self.dim)

    def _rows(self, side: int, head: int, centres: Float32, noise: Float32, topics: Ids) -> Array:
        """Rows `[N, D]`: each its topic's centre and noise; one block at a time in float32."""
        rows = np.empty((self.length, self.dim), np.dtype(self.dtype))
        for start in range(0, self.length, BLOCK):
            stop = min(start + BLOCK, self.length)
            block = _normal(np.random.default_rng([self.seed, side, head, start]), stop - start, self.dim)
            block *= noise
            block += centres[topics[start:stop]]
            rows[start:stop] = block
        return aligned(rows)  # as a store's are


class MemoryLayer:
    """A layer behind the engine's `HostKV`, without a store on disk."""

    def __init__(self, layer: Layer):
        self.layer = layer
        _, heads, self.group, dim = layer.steps.shape
        self.shape = ModelShape.uniform((LayerKind.FULL,), heads * self.group, heads, dim)
        self.host = HostKV(MemoryStore(self.shape, [layer.keys], [layer.values]), torch.device("cpu"))

    def queries(self, rows: Float32) -> Queries:
        return Queries(torch.from_numpy(rows), self.layer.scaling, None, self.group)

    def attend(self, rows: Float32, selection: Selection) -> Float32:
        out: Float32 = self.host.attend(0, self.queries(rows), selection, StepStats()).out.numpy()
        return out


@dataclass(frozen=True)
class Fidelity:
    """Means over rows. ratio: mass of the tokens attended to over that of the exact top-k, at most 1, for a
    row's surplus makes no other row good. error: relative distance of the output to that of dense attention.
    """

    ratio: float
    error: float

    @property
    def enough(self) -> bool:
        return self.ratio >= ENOUGH


class Truth:
    """Dense attention and exact top-k attention, for each k, of queries `rows [Hkv, R, D]` of a layer."""

    def __init__(self, layer: Layer, rows: Float32, ks: Collection[int]) -> None:
        memory = MemoryLayer(layer)
        self.rows = rows
        self.exact = Exact(memory.host, 0, memory.queries(rows), {min(k, layer.length) for k in ks})

    @classmethod
    def of_steps(cls, layer: Layer, ks: Collection[int]) -> Truth:
        """Of the queries that are timed and judged, step by step."""
        return cls(layer, together(layer.steps), ks)

    @classmethod
    def of_sample(cls, layer: Layer, k: int) -> Truth:
        """Of queries that choose a search parameter, apart from those that are judged."""
        heads, group, dim = layer.steps.shape[1:]
        steps = layer.tuning.reshape(heads, -1, group, dim)
        spread = np.linspace(0, steps.shape[1] - 1, min(steps.shape[1], -(-TUNING_ROWS // group))).astype(int)
        return cls(layer, np.ascontiguousarray(steps[:, spread].reshape(heads, -1, dim)), [k])

    def judge(self, k: int, ids: Sequence[Ids] | None, out: Float32 | None = None) -> Fidelity:
        """Of tokens that were attended to, `[R, n]` of each head and padded with -1, or None for all tokens;
        `out [Hkv, R, D]`. Their mass is counted from the keys, whatever scores a method claims.
        """
        k = min(k, self.exact.host.length)
        chosen = None if ids is None else torch.from_numpy(np.stack(ids))
        given = self.exact.out if out is None else torch.from_numpy(out)
        _, mass, error, *_ = self.exact.judge(slice(None), chosen, given, k)
        return Fidelity(float((mass / self.exact.held[k]).clamp(max=1).mean()), float(error.mean()))


def together(steps: Float32) -> Float32:
    """Rows `[Hkv, S · G, D]` of steps `[S, Hkv, G, D]`, a step's group together."""
    _, heads, _, dim = steps.shape
    return np.ascontiguousarray(steps.swapaxes(0, 1)).reshape(heads, -1, dim)


def _topics(length: int, generator: np.random.Generator) -> Ids:
    """The topic of each token."""
    weights = 1 / np.arange(1, TOPICS + 1)
    runs = length * 5 // (4 * RUN) + 64
    topics = generator.choice(TOPICS, runs, p=weights / weights.sum())
    lengths = generator.geometric(1 / RUN, runs)
    while lengths.sum() < length:
        lengths *= 2
    tokens: Ids = np.repeat(topics, lengths)[:length].astype(np.int64)
    return tokens


def _attended(generator: np.random.Generator, steps: int, group: int) -> Ids:
    """Topics `[steps, group, STRONG]`: every other one is the whole group's."""
    own, shared = (np.exp(generator.random((steps, count, STRONG)) * np.log(TOPICS)) for count in (group, 1))
    chosen = np.where(np.arange(STRONG) % 2 == 0, shared, own)
    return np.minimum(chosen.astype(np.int64), TOPICS - 1)


def _normal(generator: np.random.Generator, rows: int, dim: int) -> Float32:
    return generator.standard_normal((rows, dim), dtype=np.float32)
