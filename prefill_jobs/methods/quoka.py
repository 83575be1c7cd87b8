"""QuoKA: the chunk's queries that are least like their mean choose the tokens, by cosine.

QuoKA (ICLR 2026), §3 and Algorithms 1 and 2; the scoring is that of `offload_decode.selectors.quoka`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.prefill_jobs.methods.base import Earlier, Sparse, SparseOptions
from offload_decode.selectors.quoka import QuoKA as Selector
from offload_decode.selectors.quoka import Scoring


@dataclass(frozen=True)
class Options(Scoring, SparseOptions):
    """`budget` and `chunk`, and how keys are scored."""

    def __post_init__(self) -> None:
        Scoring.__post_init__(self)
        SparseOptions.__post_init__(self)


class QuoKA(Sparse):
    """Attend to the keys most similar to the queries that are least like their mean."""

    name = "quoka"
    paper = Selector.paper
    options_type = Options
    options: Options

    def choose(self, layer: int, queries: Queries, earlier: Earlier, k: int) -> Tensor:
        best = [
            self.options.best_keys(own, earlier.keys(layer, head), earlier.key_norms(layer, head), k)[0]
            for head, own in enumerate(self.options.representatives(queries))
        ]
        return torch.stack(best).cpu()
