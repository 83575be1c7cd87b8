"""Which stored tokens an answer attended to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.kernels.host_tokens import score_tokens
from offload_decode.kv.host import BLOCK_TOKENS, HostKV
from offload_decode.pages.reference import page_tokens
from offload_decode.types import AttentionState, PageSelection, Selection


class Watch:
    """Sums the attention that one conversation pays to each stored token while it is watched.

    mass: float32 `[N]`, the sum over all rows that were seen of a row's softmax over the stored tokens (0 for
    tokens that were not selected); N · 4 bytes, of which the system commits the pages that are written to.
    rows: how many rows that were.
    """

    def __init__(self, host: HostKV):
        self.host = host
        self.mass = np.zeros(host.length, np.float32)
        self.rows = 0

    def see(
        self,
        layer: int,
        rows: Tensor,
        queries: Queries,
        selection: Selection | PageSelection,
        state: AttentionState,
    ) -> None:
        """Take note of some rows, int64 `[n]`, of what was selected for `queries` of one layer: those of this
        conversation's tokens that count. `state [Hkv, R]` is that of all stored tokens, estimated ones too.
        """
        if not len(rows):
            return
        own = replace(queries, rows=queries.on_host()[:, rows], group=1, tokens=1, copy=None)
        lse = state.lse.cpu()[:, rows, None]
        self.rows += lse.numel()
        scores = None
        if isinstance(selection, PageSelection):
            ids = _listed(selection, queries, self.host.length)[:, rows]
        elif selection.ids is None:
            self._see_all(layer, own, lse)
            return
        else:
            ids = selection.ids.cpu()[:, rows]
            scores = None if selection.scores is None else selection.scores.cpu()[:, rows]
        if scores is None:
            scores = score_tokens(own.rows, self.host.layer_keys(layer), ids)
        mass = (own.logits(scores) - lse).exp().masked_fill(ids < 0, 0.0)
        np.add.at(self.mass, ids.clamp(min=0).numpy().ravel(), mass.numpy().ravel())

    def _see_all(self, layer: int, queries: Queries, lse: Tensor) -> None:
        for head, keys in enumerate(self.host.layer_keys(layer)):
            for start in range(0, self.host.length, BLOCK_TOKENS):
                part = slice(start, start + BLOCK_TOKENS)
                scores = queries.rows[head] @ keys.read(part, torch.device("cpu")).T
                self.mass[part] += (queries.logits(scores) - lse[head]).exp().sum(0).numpy()


def last_rows(queries: Queries, sequence: int, end: int | None = None) -> Tensor:
    """The rows of a sequence's last token before token `end` (None: of all), int64 `[group]`: one for each
    query head of a KV head.
    """
    members = sequence * queries.group + torch.arange(queries.group)
    return members * queries.tokens + (queries.tokens if end is None else end) - 1


def _listed(selection: PageSelection, queries: Queries, n_tokens: int) -> Tensor:
    """The tokens of every row, int64 `[Hkv, R, n]`, -1 where there is none."""
    tokens = page_tokens(selection.pages.cpu(), selection.page_size, n_tokens, selection.limit.cpu())
    return queries.by_row(tokens.unsqueeze(2)) if selection.shared else tokens
