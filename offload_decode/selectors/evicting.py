"""H2O and TOVA, a cache that forgets: replayed over the prefill, then used up by a question.

The corpus was prefilled before any question was known, and so was its eviction. The store's sampled prefill
queries stand for all of them: at a sample at position p the cache is what was kept and the tokens since the
last sample, up to p; the sample attends to it, and all but k tokens are dropped. The last sample also stands
for the queries behind it: it sees the last tokens too. A sample is of one query head of its GQA group and
counts as the N·G / n queries that it stands for. The result is the same for every question.

A question's tokens follow one by one. The cache of k holds them and the answer's as well: each attends to
what is kept, then takes the place of a stored token. What is dropped stays away until the next question.
Lenient: the generated KV (question, answer, earlier turns) is attended to densely and never dropped, even
where k tokens do not hold it. Attention is normalised over the stored tokens that are kept, as its keys are
not seen here. A budget of the whole store is no limit: nothing is dropped.
"""

from abc import abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload_decode.attention.queries import Queries, softmax
from offload_decode.attention.rows import tensor_view
from offload_decode.selectors.base import EVERYTHING, Memory
from offload_decode.types import Selection


class Kept(NamedTuple):
    """One layer's cache: `ids` int64 and `merit` float32 `[Hkv, m]`, after `asked` tokens of a question."""

    ids: Tensor
    merit: Tensor
    asked: int = 0


class Evicting(Memory[Kept]):
    """Subclasses say how attention makes a token's merit; the lowest is dropped first."""

    reads = "the at most k keys that are kept (every key once, when the prefill is replayed)"
    holds = "k ids and their merits"

    def prepare(self) -> None:
        super().prepare()
        # Shared by all forks: what is left of the corpus before a question is put.
        self.replays: dict[tuple[int, int, float, float | None], Kept] = {}

    @abstractmethod
    def judge(self, merit: Tensor, attention: Tensor) -> Tensor:
        """The merit of tokens that had `merit` and now received `attention`, both `[Hkv, m]`."""

    @abstractmethod
    def recent(self, k: int) -> int:
        """How many of the newest tokens of a cache of k are not dropped."""

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """What is kept when each token comes, with its scores: one place fewer for every token before it."""
        if k >= self.host.length:
            return EVERYTHING
        replay = layer, k, queries.scaling, queries.softcap
        if layer not in self.state and replay not in self.replays:
            self.replays[replay] = self._replay(layer, queries, k)
        ids, merit, asked = self.state.get(layer) or self.replays[replay]
        stored = self.host.layer_keys(layer)
        keys = [rows.read(own, self.host.device) for rows, own in zip(stored, ids.cpu(), strict=True)]
        scores = queries.by_token()[:, 0] @ torch.stack(keys)[:, None].transpose(-1, -2)  # [Hkv, G, T, m]
        logits, seen = queries.logits(scores), []
        for row in range(queries.tokens):
            seen.append(ids)
            asked += 1
            merit, dropped = self._step(ids, merit, logits[:, :, row], 1.0, self.host.length + asked, k)
            ids = ids.scatter(1, dropped, -1)
        self.state[layer] = Kept(*_alive(ids, merit, max(0, k - asked)), asked)

        per_row = torch.stack(seen, dim=1)[:, None].expand_as(scores)
        scores, order = scores.masked_fill(per_row < 0, -torch.inf).sort(dim=-1, descending=True)
        moved = ids.numel() * stored[0].row_bytes
        return Selection(per_row.gather(-1, order).flatten(1, 2), scores.flatten(1, 2), moved)

    def _step(
        self, ids: Tensor, merit: Tensor, logits: Tensor, weight: float, end: int, k: int
    ) -> tuple[Tensor, Tensor]:
        """Let queries with `logits [Hkv, q, m]` attend to the cache `ids [Hkv, m]`, -1 where a slot is free.

        Returns the new merit, and the slots that are free then: k of them hold a token, less those that the
        question's hold. `end` tokens have come, stored ones and the question's.
        """
        free = ids < 0
        weights, _ = softmax(logits.masked_fill(free[:, None], -torch.inf))
        merit = self.judge(merit, weight * weights.sum(1))
        rank = merit.masked_fill(ids >= end - self.recent(k), torch.inf).masked_fill(free, -torch.inf)
        places = max(0, k - max(0, end - self.host.length))
        return merit, rank.topk(ids.shape[1] - places, largest=False).indices

    def _replay(self, layer: int, queries: Queries, k: int) -> Kept:
        """The cache after the prefill: slots for k tokens and for those that come between two samples."""
        host, store, device = self.host, self.host.store, queries.vectors.device
        heads = range(self.shape.kv_heads)
        stored = host.layer_keys(layer)
        asked = torch.stack([tensor_view(store.queries(layer, head)) for head in heads]).to(device).float()

        positions, first = np.unique(store.query_positions, return_index=True)
        ends = np.append(positions[:-1] + 1, host.length)
        starts = np.append(0, ends[:-1])
        weight = host.length * self.shape.group / asked.shape[1]

        slots = k + int((ends - starts).max())
        ids = torch.full((len(heads), slots), -1, device=device)
        merit = torch.zeros(len(heads), slots, device=device)
        keys = torch.zeros(len(heads), slots, asked.shape[2], device=device)
        free = torch.arange(slots - k, device=device).expand(len(heads), -1)
        rows = torch.arange(len(heads), device=device)[:, None]
        samples = np.split(np.arange(asked.shape[1]), first[1:])
        for start, end, sample in zip(starts.tolist(), ends.tolist(), samples, strict=True):
            taken = free[:, : end - start]
            ids[rows, taken] = torch.arange(start, end, device=device)
            merit[rows, taken] = 0.0
            keys[rows, taken] = torch.stack([own.read(slice(start, end), device) for own in stored])
            logits = queries.logits(asked[:, sample[0] : sample[-1] + 1] @ keys.transpose(1, 2))
            merit, free = self._step(ids, merit, logits, weight, end, k)
            ids[rows, free] = -1
        return Kept(*_alive(ids, merit, k))


def _alive(ids: Tensor, merit: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The slots that hold a token, `count` in every head, in their order."""
    slots = (ids < 0).byte().sort(dim=1, stable=True).indices[:, :count]
    return ids.gather(1, slots), merit.gather(1, slots)


class H2O(Evicting):
    """Drop the token with the smallest running sum of attention outside the recent half.

    Heavy hitters (Zhang et al. 2023, Algorithm 1): half of the cache for these, half for recent tokens. A
    token that leaves the recent half, which slides on over the question and the answer, is kept only for its
    sum. Sums are of a KV head, over the query heads of its group.
    """

    name = "h2o"
    paper = "https://arxiv.org/abs/2306.14048"

    def judge(self, merit: Tensor, attention: Tensor) -> Tensor:
        """The sum of all attention so far."""
        return merit + attention

    def recent(self, k: int) -> int:
        """Half of the cache."""
        return k // 2


class TOVA(Evicting):
    """Drop the token with the lowest attention of the current query.

    Oren et al. 2024: nothing else is remembered, and recent tokens have no privilege. The paper averages the
    attention over a layer's heads; here it is that of a KV head's group, and in the prefill that of the one
    head that was sampled.
    """

    name = "tova"
    paper = "https://arxiv.org/abs/2401.06104"

    def judge(self, merit: Tensor, attention: Tensor) -> Tensor:
        """The attention of the current query."""
        return attention

    def recent(self, k: int) -> int:
        """None."""
        return 0
