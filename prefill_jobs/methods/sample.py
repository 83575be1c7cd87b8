"""SampleAttention: evenly sampled queries of the chunk attend to all tokens, and the chunk to those that they
attend to most.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import Rows
from offload_decode.common.errors import ConfigError
from offload_decode.prefill_jobs.methods.base import Earlier, Sparse, SparseOptions
from offload_decode.selectors.scores import blocks, inner_products


@dataclass(frozen=True)
class Options(SparseOptions):
    """`queries`: how many of the chunk's tokens are sampled."""

    queries: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries < 1:
            raise ConfigError(f"option queries {self.queries} is out of range: it must be at least 1")


class SampleAttention(Sparse):
    """Attend to the tokens that hold most of the attention of evenly sampled queries (§4.2 of the paper)."""

    name = "sample"
    paper = "https://arxiv.org/abs/2406.15486"
    options_type = Options
    options: Options

    def choose(self, layer: int, queries: Queries, earlier: Earlier, k: int) -> Tensor:
        sampled = min(self.options.queries, queries.tokens)
        places = (2 * torch.arange(sampled) + 1) * queries.tokens // (2 * sampled)
        samples = queries.by_token()[:, 0, :, places.to(queries.vectors.device)].flatten(1, 2)
        mass = (self._mass(queries, own, earlier.keys(layer, head)) for head, own in enumerate(samples))
        return torch.stack([own.topk(k).indices for own in mass])

    def _mass(self, queries: Queries, samples: Tensor, keys: Rows) -> Tensor:
        """The attention `[N]` that each key gets from the `samples [R, D]`, summed.

        Two passes over the keys, so that only the scores of a block are in memory.
        """
        parts = list(blocks(len(keys), rows=len(samples)))
        logits = (queries.logits(inner_products(samples, keys, part)) for part in parts)
        lse = torch.stack([part.logsumexp(-1) for part in logits]).logsumexp(0)
        mass = torch.empty(len(keys))
        for part in parts:
            scores = queries.logits(inner_products(samples, keys, part))
            mass[part] = torch.exp(scores - lse[:, None]).sum(0).cpu()
        return mass
