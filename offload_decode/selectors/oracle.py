"""Oracle: exact top-k by full scores, without an index; the ceiling of every selector.

Top-k decoding (arXiv 2502.06766), Algorithm 1, with every inner product computed.
"""

from __future__ import annotations

from offload_decode.attention.queries import Queries
from offload_decode.selectors.base import Selector
from offload_decode.selectors.scores import top_inner_products
from offload_decode.types import Selection


class Oracle(Selector):
    """Score every key exactly and select the best."""

    name = "oracle"
    paper = "https://arxiv.org/abs/2502.06766"
    reads = "every key"
    holds = "nothing"

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The k keys of largest inner product, with their scores."""
        return top_inner_products(queries.rows, self.host.layer_keys(layer), k)
