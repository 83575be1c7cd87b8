"""Top-k decoding: the k stored keys with the largest inner product, for every query head.

Paper 002 (top-k decoding), Algorithm 1; the parts are merged as METHODS §1 says, which the paper does not.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from offload_decode.head_indexes import HeadIndexes
from offload_decode.kv import HostKV
from offload_decode.queries import Queries
from offload_decode.rows import numpy_view
from offload_decode.selectors import base
from offload_decode.types import ModelShape, Selection


@dataclass(frozen=True)
class Options(base.Options):
    """`index`: the kind of vector index that is searched."""

    index: str = "flat"


class TopK(base.Selector):
    """Search one index per (layer, KV head) with the group's queries as one batch."""

    name = "topk"
    paper = "https://arxiv.org/abs/2502.06766"
    reads = "the keys (flat) or what the index probes of them"
    holds = "the index; nothing with flat"
    options_type = Options

    def __init__(self, options: Options, host: HostKV, shape: ModelShape):
        super().__init__(options, host, shape)
        self.indexes = HeadIndexes(host.store, options.index)
        # One thread a core: `flat` searches on the calling thread, without the interpreter's lock.
        self.pool = ThreadPoolExecutor(os.cpu_count())

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The index's k best; with their scores where the index knows them exactly."""
        rows = numpy_view(queries.rows)
        searched = [self.indexes.get(layer, head) for head in range(rows.shape[0])]
        hits = list(self.pool.map(lambda index, own: index.search(own, k), searched, rows))
        ids = torch.from_numpy(np.stack([hit.ids for hit in hits]))
        exact = all(index.exact_scores for index in searched)
        return Selection(ids, torch.from_numpy(np.stack([hit.scores for hit in hits])) if exact else None)
