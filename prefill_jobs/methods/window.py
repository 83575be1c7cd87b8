"""Windowed prefill: the first tokens, which take up surplus attention, and the most recent ones."""

import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.prefill_jobs.methods.base import Earlier, Sparse

SINKS = 4


class Window(Sparse):
    """Attend to the first 4 tokens and to the most recent ones (StreamingLLM, §3.2)."""

    name = "window"
    paper = "https://arxiv.org/abs/2309.17453"

    def choose(self, layer: int, queries: Queries, earlier: Earlier, k: int) -> Tensor:
        sinks = min(SINKS, k)
        ids = torch.cat([torch.arange(sinks), torch.arange(earlier.length - (k - sinks), earlier.length)])
        return ids.expand(self.shape.kv_heads, -1)
