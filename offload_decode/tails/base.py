"""The unselected tail: an estimate of the attention to the stored tokens that a row did not select.

A step attends exactly to the selected tokens; the estimate is the state of all others, so that every token
counts once (docs/methods.md §1). It is computed on the host, where keys and values lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isqrt
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.attention.states import empty_state
from offload_decode.kv.host import SCORES, HostKV
from offload_decode.pages.reference import page_tokens
from offload_decode.types import PageSelection, Selection

HOST = torch.device("cpu")


class Estimate(NamedTuple):
    """The state of the unselected tokens: `out [..., D]`, `lse [...]`, empty where there are none.

    deviation: `[...]`, the natural log of the standard error of `exp(lse)`; None where it is not known.
    """

    out: Tensor
    lse: Tensor
    deviation: Tensor | None = None


@dataclass(frozen=True)
class Selected:
    """What r rows of one KV head selected: `ids [r, k]` int64, padded with -1; `scores [r, k]`, their q·k, or
    None.
    """

    ids: Tensor
    scores: Tensor | None

    @property
    def padding(self) -> Tensor:
        """True `[r, k]` where an id is padding."""
        return self.ids < 0


class Tail(ABC):
    """One way of estimating. `size` is the number after the colon in `-o tail=name:size`; `states_error`
    says whether estimates come with their deviation.
    """

    name: ClassVar[str]
    default_size: ClassVar[int]
    least_size: ClassVar[int] = 1
    largest_size: ClassVar[int] = 1 << 16
    states_error: ClassVar[bool] = False

    def __init__(self, host: HostKV, size: int):
        self.host = host
        self.size = size

    def estimate(self, layer: int, queries: Queries, selection: Selection | PageSelection) -> Estimate:
        """The state of what `selection`, which is not everything, leaves out for each of the rows
        `[Hkv, R]`.
        """
        rows = queries.rows.cpu()
        state = empty_state(rows, self.host.values(layer, 0).dim)
        deviation = torch.full_like(state.lse, -torch.inf) if self.states_error else None
        lists, list_of_row = selected_lists(selection, queries, self.host.length)
        scores = selection.scores if isinstance(selection, Selection) else None
        for head in range(rows.shape[0]):
            for part in self._parts(layer, head, rows.shape[1], lists.shape[2]):
                own = None if scores is None else scores[head, part].cpu()
                selected = Selected(lists[head, list_of_row[part]], own)
                estimate = self.estimate_rows(layer, head, queries, rows[head, part], selected)
                state.out[head, part], state.lse[head, part] = estimate.out, estimate.lse
                if deviation is not None and estimate.deviation is not None:
                    deviation[head, part] = estimate.deviation
        device = queries.rows.device
        return Estimate(
            state.out.to(device), state.lse.to(device), None if deviation is None else deviation.to(device)
        )

    def _parts(self, layer: int, head: int, rows: int, k: int) -> list[slice]:
        # A row meets every cluster, and the tokens that the part's rows selected.
        step = max(1, min(SCORES // self.width(layer, head), isqrt(SCORES // max(1, k))))
        return [slice(start, start + step) for start in range(0, rows, step)]

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held beyond the store, so far."""

    @abstractmethod
    def width(self, layer: int, head: int) -> int:
        """Numbers in memory for each row."""

    @abstractmethod
    def estimate_rows(
        self, layer: int, head: int, queries: Queries, rows: Tensor, selected: Selected
    ) -> Estimate:
        """The estimate for `rows [r, D]` of one KV head."""


def selected_lists(
    selection: Selection | PageSelection, queries: Queries, n_tokens: int
) -> tuple[Tensor, Tensor]:
    """Lists of selected tokens `[Hkv, Q, k]` int64, padded with -1, and the list of each row `[R]` int64."""
    each = torch.arange(queries.rows.shape[1])
    if isinstance(selection, Selection):
        assert selection.ids is not None, "everything is selected: there is no tail"
        return selection.ids.cpu(), each
    lists = page_tokens(selection.pages, selection.page_size, n_tokens, selection.limit).cpu()
    if not selection.shared:
        return lists, each
    sequence, token = each // (queries.group * queries.tokens), each % queries.tokens
    return lists, sequence * queries.tokens + token
