"""QuoKA: the queries that are unlike their mean choose the keys, by cosine, for all rows together.

QuoKA (ICLR 2026), §3 and Algorithm 1. A chunk here is what one forward pass brings: a question, or one
generated token, for which only the cosine of a key with the group's mean of queries at unit length is left.
Queries are ranked in each query head on its own, and averaged over the group rank by rank; a chunk of no
more than `queries` tokens is kept whole, and averaged token by token. `prefill_jobs.methods.quoka` chooses
for the chunks of a prefill in the same way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import Rows
from offload_decode.attention.transfers import to_device, to_host
from offload_decode.common.errors import ConfigError
from offload_decode.selectors.base import Selector, SelectorOptions
from offload_decode.selectors.budgets import WHOLE_QUESTION
from offload_decode.selectors.scores import inner_products, top_tokens
from offload_decode.types import Selection


@dataclass(frozen=True)
class Scoring:
    """How QuoKA scores keys. `queries`: how many of a chunk's queries choose (N_Q). `similarity`: `cosine` or
    `dot`; `reduce`: over these queries, `max` or `mean`: the second ones are the paper's ablations (appendix
    I).
    """

    queries: int = 16
    similarity: str = "cosine"
    reduce: str = "max"

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ConfigError(f"option queries {self.queries} is out of range: it must be at least 1")
        if self.similarity not in ("cosine", "dot"):
            raise ConfigError(f"unknown similarity '{self.similarity}'; choose one of: cosine, dot")
        if self.reduce not in ("max", "mean"):
            raise ConfigError(f"unknown reduce '{self.reduce}'; choose one of: max, mean")

    def representatives(self, queries: Queries) -> Tensor:
        """The queries that score the keys, `Qbar [Hkv, batch, min(N_Q, T), D]`."""
        chunk = queries.by_token()
        if queries.tokens > self.queries:
            likeness = cosine_similarity(chunk, chunk.mean(3, keepdim=True), dim=-1)
            kept = likeness.topk(self.queries, largest=False).indices
            chunk = chunk.gather(3, kept.unsqueeze(-1).expand(*kept.shape, chunk.shape[-1]))
        if self.similarity == "cosine":
            chunk = normalize(chunk, dim=-1)
        return chunk.mean(2)

    def best_keys(self, asking: Tensor, keys: Rows, norms: Tensor, k: int) -> Tensor:
        """Ids int64 `[batch, min(k, N)]`, best first, of `keys` with lengths `norms [N]`, for the
        representatives `asking [batch, n, D]` of one KV head.
        """

        def score(part: slice) -> Tensor:
            scores = inner_products(asking.flatten(0, 1), keys, part).reshape(*asking.shape[:2], -1)
            scores = scores.amax(1) if self.reduce == "max" else scores.mean(1)
            if self.similarity == "cosine":
                scores /= to_device(norms[part], asking.device).clamp(min=torch.finfo(torch.float32).tiny)
            return scores

        return top_tokens(score, len(asking), len(keys), k)[1]


@dataclass(frozen=True)
class Options(Scoring, SelectorOptions):
    """Those of every selector, and how keys are scored."""


class QuoKA(Selector):
    """Select, for all of a chunk, the keys most similar to its queries that are least like their mean."""

    name = "quoka"
    paper = "https://openreview.net/forum?id=YS4N1YxXSM"
    reads = "every key and its norm, once for the whole group and chunk"
    holds = "nothing"
    options_type = Options
    options: Options
    per_row = False
    one_question = True
    pass_tokens = WHOLE_QUESTION

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The k best for each sequence and KV head, shared by all rows of both."""
        found = [
            self.options.best_keys(own, self.host.keys(layer, head), self.host.key_norms(layer, head), k)
            for head, own in enumerate(self.options.representatives(queries))
        ]
        rows = queries.group * queries.tokens
        (ids,) = to_host(torch.stack(found))
        return Selection(ids.unsqueeze(2).expand(-1, -1, rows, -1).flatten(1, 2))
