"""`error=0.05@0.95`: attention whose error is stated, row by row: exact at the top, a sample of the rest
(docs/methods.md §2, after vAttention, arXiv 2510.05688).

A query attends to its k best tokens, and to a uniform sample of the others, each of which stands for as many
as were not drawn. The sample lies in groups; how much these differ states the error of the output. It does
not show what it has missed: of that the scores of the next best tokens tell, which the search has found too.
Rows whose error may be too large try again with four times as many of both, and at last attend to everything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from offload_decode.attention.host_dense import attend_all, attend_groups
from offload_decode.attention.host_tokens import attend_tokens
from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import HeadRows, Rows
from offload_decode.common.rows.arrays import Float32
from offload_decode.indexes.base import Hits
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors.base import EVERYTHING, Attended
from offload_decode.selectors.budgets import ErrorBound
from offload_decode.types import AttentionState, Selection

GROUPS = 16
ROWS = 256  # of a head at once: those of a long question are taken in parts

Ids = npt.NDArray[np.int64]
Search = Callable[[int, list[int], Float32, int], Hits]
"""The k best keys of some heads of a layer for their queries `[h, R, D]`; none of a high score is missed."""


class Rung(NamedTuple):
    """How many tokens a row attends to: its best, and of the others so many that are `drawn`."""

    best: int
    drawn: int


RUNGS = (Rung(256, 1024), Rung(1024, 4096), Rung(4096, 16384))


def rungs_of(length: int) -> tuple[Rung, ...]:
    """Those of a store: to read half of the tokens in no order takes as long as to read all."""
    return tuple(rung for rung in RUNGS if 2 * sum(rung) <= length)


class _Sample(NamedTuple):
    """Tokens drawn from each KV head: their rows in the order of the draw, ids `[H, m]` int64 ascending, the
    place of each in that order, and a bit for each stored token, which says whether it was drawn. Of their
    values the `mean` `[H, Dv]`, and the mean square of their lengths, `square` `[H]`.
    """

    keys: HeadRows
    values: HeadRows
    ids: Ids
    places: Ids
    bits: npt.NDArray[np.uint8]
    mean: Float32
    square: Float32


class _Found(NamedTuple):
    """What H heads' rows have so far: the ids of their best tokens `[H, R, k]`, -1 where there is none, with
    their scores; a state; the error that is stated of the output; how many tokens of each kind it is made of.
    """

    ids: Ids
    scores: Float32
    out: Float32
    lse: Float32
    stated: Float32
    best: Ids
    others: Ids

    @classmethod
    def nothing(cls, heads: int, rows: int, k: int, width: int) -> _Found:
        ids, zeros = np.full((heads, rows, k), -1, np.int64), np.zeros((heads, rows), np.int64)
        scores, none = np.full(ids.shape, -np.inf, np.float32), np.full((heads, rows), -np.inf, np.float32)
        return cls(ids, scores, np.zeros((heads, rows, width), np.float32), none, -none, zeros, zeros.copy())


class _Left(NamedTuple):
    """Rows that wait: of some heads `[h]`, `rows [h, r]`, as many of each as of the one that has most. Those
    that do not wait, or not any more, are there to fill it up: what becomes of them is not kept.
    """

    heads: Ids
    rows: Ids
    waits: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, pending: npt.NDArray[np.bool_]) -> _Left:
        heads = np.flatnonzero(pending.any(1))
        most = pending.sum(1).max()
        rows = np.argsort(~pending[heads], axis=1, kind="stable")[:, :most]
        return cls(heads, rows, np.take_along_axis(pending[heads], rows, 1))

    def take(self, every: Any) -> Any:
        return every[self.heads[:, None], self.rows]

    def put(self, every: Any, own: Any) -> None:
        head, row = np.nonzero(self.waits)
        every[self.heads[head], self.rows[head, row]] = own[head, row]


class WithinError:
    """Of one prefix; forks share it, and with it the samples, drawn once for each layer and rung."""

    seed = 0

    def __init__(self, host: HostKV, bound: ErrorBound, search: Search):
        self.host, self.bound, self.search = host, bound, search
        self.rungs = rungs_of(host.length)
        self._samples: dict[tuple[int, Rung], _Sample] = {}

    def attend(self, layer: int, queries: Queries, everything: bool = False) -> Attended:
        """What a row attends to does not depend on other rows. Of rows that attend to everything, as they all
        do if `everything` says so, the selection names the best tokens that were found.
        """
        rungs, (heads, count, _) = () if everything else self.rungs, queries.vectors.shape
        most, width = rungs[-1].best if rungs else 0, self.host.values(layer, 0).dim
        found, began = _Found.nothing(heads, count, most, width), time.perf_counter()
        read, search_s = 0, 0.0
        for start in range(0, count, ROWS):
            own = _Found._make(part[:, start : start + ROWS] for part in found)
            of_rows = _Rows(self, layer, queries.part(start, start + ROWS), own)
            of_rows.climb(rungs)
            read, search_s = read + of_rows.read, search_s + of_rows.search_s
        found.ids[np.arange(most) >= found.best[..., None]] = -1
        return Attended(
            AttentionState(torch.from_numpy(found.out), torch.from_numpy(found.lse)),
            Selection(torch.from_numpy(found.ids)) if rungs else EVERYTHING,
            int(found.best.sum() + found.others.sum()),
            read,
            search_s / (time.perf_counter() - began),
            float(found.stated.mean()),
            int((found.best + found.others == self.host.length).sum()),
        )

    def sample(self, layer: int, rung: Rung) -> _Sample:
        """The same in every process."""
        if (layer, rung) not in self._samples:
            keys, values, length = (
                self.host.layer_keys(layer),
                self.host.layer_values(layer),
                self.host.length,
            )
            rngs = [np.random.default_rng((self.seed, layer, head)) for head in range(len(keys))]
            drawn = np.array([rng.choice(length, rung.drawn, replace=False) for rng in rngs])
            places = np.argsort(drawn, axis=1)
            there = np.zeros((len(keys), length), np.bool_)
            np.put_along_axis(there, drawn, True, 1)
            sampled = HeadRows(Rows(own.array[ids]) for own, ids in zip(values, drawn, strict=True))
            floats = torch.stack([own.read(slice(None), torch.device("cpu")) for own in sampled])
            self._samples[layer, rung] = _Sample(
                HeadRows(Rows(own.array[ids]) for own, ids in zip(keys, drawn, strict=True)),
                sampled,
                np.take_along_axis(drawn, places, 1),
                places,
                np.packbits(there, axis=1, bitorder="little"),
                floats.mean(1).numpy(),
                floats.square().sum(-1).mean(1).numpy(),
            )
        return self._samples[layer, rung]


class _Rows:
    """Some rows of a layer on their way; `read`: bytes of keys and values, `search_s`: seconds."""

    def __init__(self, within: WithinError, layer: int, queries: Queries, found: _Found):
        self.within, self.layer, self.found = within, layer, found
        self.vectors, self.how = queries.vectors.contiguous().numpy(), (queries.scaling, queries.softcap)
        self.keys, self.values = within.host.layer_keys(layer), within.host.layer_values(layer)
        self.read, self.search_s, self.searched = 0, 0.0, 0

    def climb(self, rungs: tuple[Rung, ...]) -> None:
        """Rung by rung those rows whose stated error is too large; all tokens for those that are left."""
        for rung, further in zip(rungs, (*rungs[1:], *rungs[-1:]), strict=True):
            if not (pending := self.found.stated > self.within.bound.error).any():
                return
            left = _Left.of(pending)
            if rung.best > self.searched:
                self._search(left, further.best)
            self._try(left, rung)
        for head in np.flatnonzero((self.found.stated > self.within.bound.error).any(1)):
            self._attend_all(int(head))

    def _search(self, left: _Left, k: int) -> None:
        """For as many as the next rung wants: to find more takes hardly longer, and to search again does."""
        began = time.perf_counter()
        hits = self.within.search(self.layer, left.heads.tolist(), left.take(self.vectors), k)
        left.put(self.found.ids[..., :k], hits.ids)
        left.put(self.found.scores[..., :k], hits.scores)
        self.searched, self.search_s = k, self.search_s + time.perf_counter() - began

    def _try(self, left: _Left, rung: Rung) -> None:
        keys, values = _some(self.keys, left.heads), _some(self.values, left.heads)
        vectors, ids, scores = map(left.take, (self.vectors, self.found.ids, self.found.scores))
        further = scores[..., rung.best - 1 : self.searched]
        ids, scores = (np.ascontiguousarray(part[..., : rung.best]) for part in (ids, scores))
        queries = Queries(torch.from_numpy(vectors), *self.how)
        state, read = attend_tokens(queries, keys, values, torch.from_numpy(ids), torch.from_numpy(scores))
        out, lse = (part.numpy() for part in state)

        sample = self.within.sample(self.layer, rung)
        drawn = _some(sample.keys, left.heads).compiled, _some(sample.values, left.heads).compiled
        skipped = np.zeros((*lse.shape, rung.drawn), np.bool_)
        _mark(ids, sample.ids[left.heads], sample.places[left.heads], sample.bits[left.heads], skipped)
        groups = attend_groups(vectors, *drawn, out.shape[2], rung.drawn // GROUPS, skipped, *self.how)
        self.read += read + len(left.heads) * rung.drawn * (keys[0].row_bytes + values[0].row_bytes)

        best, counted = (ids >= 0).sum(-1), rung.drawn - skipped.sum(-1)
        stated, bound = np.empty(lse.shape, np.float32), self.within.bound
        others = self.within.host.length - best
        _merge(out, lse, groups[0], groups[1], counted, others, (bound.normal, bound.normal_of_sum), stated)
        apart = sample.square[left.heads][:, None] - 2 * np.einsum("hrd,hd->hr", out, sample.mean[left.heads])
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = np.sqrt(np.maximum(1, 1 + apart / np.square(out).sum(-1)))
            missed = self._missed(further, lse, counted / others)
        np.maximum(stated, apart * missed, out=stated)
        for every, own in zip(self.found[2:], (out, lse, stated, best, counted), strict=True):
            left.put(every, own)

    def _missed(self, further: Float32, lse: Float32, drawn: Any) -> Any:
        """The error of the sum of weights `[h, r]` by tokens of which few were `drawn`, a share of all.

        The scores `further` are known, from the last token on that is attended to: the spread of a sample of
        these follows. No other token weighs more than the last of them; if none was drawn of some that weigh
        as much, these are so few, with the probability that is wanted.
        """
        scaling, softcap = self.how
        logits = scaling * further.astype(np.float64)
        logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
        weights, bound = np.exp(logits - lse[..., None]), self.within.bound
        spread = np.sqrt((1 - drawn) / drawn * np.square(weights[..., 1:]).sum(-1))
        unseen = -math.log(1 - bound.share) * weights[..., -1] / drawn
        return np.maximum(bound.normal_of_sum * spread, unseen)

    def _attend_all(self, head: int) -> None:
        rows, keys, values = (
            self.found.stated[head] > self.within.bound.error,
            self.keys[head],
            self.values[head],
        )
        query = torch.from_numpy(self.vectors[head : head + 1, rows])
        state = attend_all(query, HeadRows((keys,)), HeadRows((values,)), *self.how)
        self.found.out[head, rows], self.found.lse[head, rows] = (part[0].numpy() for part in state)
        self.found.stated[head, rows] = 0
        self.found.others[head, rows] = len(keys) - self.found.best[head, rows]
        self.read += len(keys) * (keys.row_bytes + values.row_bytes)


def _some(rows: HeadRows, heads: Ids) -> HeadRows:
    return rows if len(heads) == len(rows) else HeadRows(rows[head] for head in heads)


@njit(nogil=True, cache=True)
def _mark(ids: Any, drawn: Any, places: Any, bits: Any, skipped: Any) -> None:
    """Marks in `skipped [H, R, m]` those of a row's best, `ids [H, R, k]`, that were drawn: see `_Sample`."""
    for head in range(len(ids)):
        for r in range(ids.shape[1]):
            for j in range(ids.shape[2]):
                token = ids[head, r, j]
                if token >= 0 and bits[head, token >> 3] >> (token & 7) & 1:
                    skipped[head, r, places[head, np.searchsorted(drawn[head], token)]] = True


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _merge(
    out: Any, lse: Any, group_out: Any, group_lse: Any, counted: Any, others: Any, normal: Any, stated: Any
) -> None:
    """Merges into the state of the best tokens, `out [H, R, Dv]` and `lse [H, R]`, that of all `others
    [H, R]` as the groups `[P, H, R, …]` show it, in which so many are `counted`. `stated [H, R]` becomes the
    relative error of the output that is kept to with the wanted probability, or of the sum of weights if that
    is larger. normal: one-sided and two-sided quantiles of the normal distribution.
    """
    groups, dim = len(group_out), out.shape[2]
    weights, apart = np.empty(groups), np.empty((groups, dim))
    for head in range(lse.shape[0]):
        for r in range(lse.shape[1]):
            if not counted[head, r]:
                stated[head, r] = np.inf
                continue
            # Each token that is counted stands for as many as were not drawn.
            each = others[head, r] / counted[head, r]
            highest = np.float64(max(lse[head, r], group_lse[:, head, r].max()))
            own = math.exp(lse[head, r] - highest)
            for g in range(groups):
                weights[g] = each * math.exp(group_lse[g, head, r] - highest)
            total = own + weights.sum()
            lse[head, r] = highest + math.log(total)
            weights /= total
            out[head, r] *= np.float32(own / total)
            for g in range(groups):
                out[head, r] += np.float32(weights[g]) * group_out[g, head, r]
            # What each group adds to the error of the output, less the mean of all groups.
            for g in range(groups):
                for d in range(dim):
                    apart[g, d] = weights[g] * (group_out[g, head, r, d] - out[head, r, d])
            for d in range(dim):
                apart[:, d] -= apart[:, d].sum() / groups
            trace, squares = 0.0, 0.0
            for g in range(groups):
                for other in range(g + 1):
                    product = 0.0
                    for d in range(dim):
                        product += apart[g, d] * apart[other, d]
                    trace += product if g == other else 0.0
                    squares += product * product * (1 if g == other else 2)
            missed = (1 - counted[head, r] / others[head, r]) * groups / (groups - 1)
            stated[head, r] = normal[1] * math.sqrt(missed * ((weights - weights.sum() / groups) ** 2).sum())
            if trace > 0:
                # Quantile of a quadratic form of normal variables by two moments, and Wilson and Hilferty's.
                spread = 2 * squares / (9 * trace * trace)
                quantile = (1 - spread + normal[0] * math.sqrt(spread)) ** 3
                length = (out[head, r] * out[head, r]).sum()
                stated[head, r] = max(stated[head, r], math.sqrt(missed * quantile * trace / length))
