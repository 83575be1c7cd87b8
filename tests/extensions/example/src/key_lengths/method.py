"""Evenly: a chunk attends to earlier tokens at even distances."""

import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.prefill_jobs.methods.base import Earlier, Sparse


class Evenly(Sparse):
    """Attend to tokens at even distances."""

    name = "evenly"
    paper = "none: an example"

    def choose(self, layer: int, queries: Queries, earlier: Earlier, k: int) -> Tensor:
        """The same tokens for every KV head."""
        ids = torch.arange(k) * earlier.length // max(1, k)
        return ids.expand(self.shape.kv_heads, -1)
