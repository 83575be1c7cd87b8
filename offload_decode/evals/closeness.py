"""How close what a selector chose and attended comes to exact attention, row by row and in sum.

The reference is `Exact`: plain torch in float32, without index, selector or fast kernel. `Hkv` KV heads, `R`
queries of each, `N` stored tokens, `D` channels of keys, `Dv` of values.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload_decode.attention.queries import Queries, attend, empty_state, merge_states, softmax
from offload_decode.attention.rows import Rows
from offload_decode.kv.host_cache import BLOCK_TOKENS, HostKV
from offload_decode.selectors.scores import blocks, top_scores

MEASURES = ("recall", "mass", "error", "approximation", "search")
_NUMBERS = 1 << 24  # of the gathered keys or values [r, k, D] that are in memory at once
_ROUNDING = 1e-5  # of a row's largest score: float32 inner products that differ by less are equal


class Exact:
    """Dense attention and exact top-k attention, for every k of `ks`, of one layer's rows.

    `out [Hkv, R, Dv]`, `lse [Hkv, R]` of dense attention; `top[k] [Hkv, R, Dv]` of the k largest scores,
    `held[k] [Hkv, R]` their share of dense attention, and `kth[k] [Hkv, R]` the smallest of them, -inf where
    k is N or more.
    """

    def __init__(self, host: HostKV, layer: int, queries: Queries, ks: Collection[int]):
        self.host, self.layer, self.queries = host, layer, queries
        self.ks = sorted({k for k in ks if k < host.length})
        self.out, self.lse = empty_state(queries.vectors, host.values(layer, 0).dim)
        self.largest = torch.zeros_like(self.lse)
        self.top = {k: torch.zeros_like(self.out) if k in self.ks else self.out for k in ks}
        self.held = {k: torch.ones_like(self.lse) for k in ks}
        self.kth = {k: torch.full_like(self.lse, -torch.inf) for k in ks}
        for head in range(len(queries.vectors)):
            self._attend(head)
            self._rank(head)

    def judge(self, rows: slice, ids: Tensor | None, out: Tensor, k: int) -> Tensor:
        """Measures `[5, Hkv, r]`, in the order of `MEASURES`, of what was chosen and attended for some rows.

        `ids [Hkv, r, w]` padded with -1, or None for every token; `out [Hkv, r, Dv]`. recall: how many of the
        k tokens with the largest scores were chosen, as a share (equally large ones are equally good). mass:
        the chosen tokens' share of dense attention. error: ‖out − dense‖ / ‖dense‖; approximation: the same
        of exact top-k attention; search: ‖out − exact top-k‖ / ‖dense‖; so error ≤ approximation + search.
        """
        dense = self.out[:, rows]
        top = self.top[k][:, rows]
        found = torch.ones(2, *dense.shape[:2]) if ids is None else self._found(rows, ids, k)
        errors = [_relative(out - dense, dense), _relative(top - dense, dense), _relative(out - top, dense)]
        return torch.cat([found.to(dense.device), torch.stack(errors)])

    def _attend(self, head: int) -> None:
        queries = self.queries
        keys, values = self.host.keys(self.layer, head), self.host.values(self.layer, head)
        step = max(1, _NUMBERS // BLOCK_TOKENS)
        for start in range(0, queries.vectors.shape[1], step):
            rows = queries.vectors[None, head : head + 1, start : start + step]
            state = empty_state(rows, values.dim)
            for part in blocks(self.host.length):
                key, value = (stored.read(part, rows.device)[None, None] for stored in (keys, values))
                own = attend(rows, key, value, queries.scaling, softcap=queries.softcap)
                state = merge_states(state, own)
            self.out[head, start : start + step] = state.out[0, 0]
            self.lse[head, start : start + step] = state.lse[0, 0]

    def _rank(self, head: int) -> None:
        widest = max(self.ks, default=0)
        keys, values = self.host.keys(self.layer, head), self.host.values(self.layer, head)
        for part in self._parts(self.queries.vectors.shape[1], widest):
            rows = self.queries.vectors[head, part]
            scores, ids = top_scores(
                lambda block, rows=rows: rows @ keys.read(block, rows.device).T,  # type: ignore[misc]
                rows.shape[:1],
                self.host.length,
                max(1, widest),
            )
            self.largest[head, part] = scores.abs().amax(-1)
            gathered = self._gather(values, ids[:, :widest])
            for k in self.ks:
                weights, lse = softmax(self.queries.logits(scores[:, :k]))
                self.held[k][head, part] = torch.exp(lse - self.lse[head, part])
                self.top[k][head, part] = torch.einsum("rk,rkd->rd", weights, gathered[:, :k])
                self.kth[k][head, part] = scores[:, k - 1] if k else torch.inf

    def _found(self, rows: slice, ids: Tensor, k: int) -> Tensor:
        """Recall and mass `[2, Hkv, r]`."""
        found = torch.zeros(2, *ids.shape[:2], device=self.lse.device)
        for head in range(len(ids)):
            keys, asked = self.host.keys(self.layer, head), self.queries.vectors[head, rows]
            least = self.kth[k][head, rows] - _ROUNDING * self.largest[head, rows]
            lse = self.lse[head, rows]
            for part in self._parts(len(asked), ids.shape[2]):
                own = ids[head, part].to(asked.device)
                scores = torch.einsum("rd,rkd->rk", asked[part], self._gather(keys, own.clamp(min=0)))
                scores = scores.masked_fill(own < 0, -torch.inf)
                hits = ((own >= 0) & (scores >= least[part, None])).sum(-1)
                wanted = min(k, self.host.length)
                found[0, head, part] = hits.clamp(max=wanted) / wanted if wanted else 1.0
                shares = torch.exp(self.queries.logits(scores) - lse[part, None])
                found[1, head, part] = torch.where(own < 0, 0.0, shares).sum(-1)
        return found

    def _parts(self, rows: int, width: int) -> list[slice]:
        widest = max(self.queries.vectors.shape[-1], self.out.shape[-1])
        step = max(1, _NUMBERS // max(1, width * widest))
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _gather(self, stored: Rows, ids: Tensor) -> Tensor:
        """Rows of the store `[r, k, D]` in float32."""
        return stored.read(ids.cpu().flatten(), self.host.device).reshape(*ids.shape, stored.dim)


def _relative(difference: Tensor, dense: Tensor) -> Tensor:
    norm, of = difference.norm(dim=-1), dense.norm(dim=-1)
    return torch.where(norm == 0, 0.0, norm / of)


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles over queries."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> Self:
        """Of any number of values, at least one."""
        return cls(float(values.mean()), *(float(p) for p in np.percentile(values, (50, 95, 99))))


@dataclass(frozen=True, kw_only=True)
class Closeness:
    """Means of recall and mass, and the relative output errors, as `Exact.judge` defines them."""

    recall: float
    mass: float
    error: Spread
    approximation: Spread
    search: Spread

    @classmethod
    def of(cls, values: npt.NDArray[np.float64], **about: Any) -> Self:
        """Of measures `[5, n]` (`MEASURES`)."""
        recall, mass, *others = values
        error, approximation, search = map(Spread.of, others)
        means: dict[str, Any] = {"recall": float(recall.mean()), "mass": float(mass.mean())}
        return cls(**about, **means, error=error, approximation=approximation, search=search)


@dataclass(frozen=True, kw_only=True)
class HeadFidelity(Closeness):
    """Of one query head of one layer."""

    layer: int
    head: int


@dataclass(frozen=True, kw_only=True)
class Fidelity(Closeness):
    """Over `rows` queries of all searched layers and query heads; `worst` has the largest mean error."""

    rows: int
    worst: HeadFidelity
    heads: tuple[HeadFidelity, ...]


def summarize(measured: Mapping[int, Tensor]) -> Fidelity:
    """Of the measures `[5, H, T]` (`MEASURES`) of every layer's heads and rows."""
    heads = tuple(
        HeadFidelity.of(values[:, head].numpy(), layer=layer, head=head)
        for layer, values in measured.items()
        for head in range(values.shape[1])
    )
    rows = torch.cat([values.flatten(1) for values in measured.values()], dim=1).numpy()
    worst = max(heads, key=lambda head: head.error.mean)
    return Fidelity.of(rows, rows=rows.shape[1], worst=worst, heads=heads)
