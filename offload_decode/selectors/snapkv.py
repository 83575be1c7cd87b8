"""SnapKV: the end of the prompt votes for the tokens that its answer will need.

Li et al. 2024, Listing 1, with the max pooling and the kernel of the authors' LongBench runs. The prompt ends
with the question: the first forward pass after a reset gives the observation window, its last tokens. Each of
its queries spreads one vote, its softmax over the stored tokens; votes are summed over the window and the
query heads of a KV head's group, pooled over neighbours, and the top k chosen once. All rows of that pass and
all later tokens attend to them until the next question. A question that comes in several passes is judged by
the first. Generated KV, the window in it, is attended to densely beside the k tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.selectors.base import EVERYTHING, Memory, SelectorOptions
from offload_decode.selectors.budgets import WHOLE_QUESTION
from offload_decode.selectors.scores import blocks, inner_products
from offload_decode.types import Selection

LARGEST = 1 << 16  # window or kernel


@dataclass(frozen=True)
class Options(SelectorOptions):
    """`window`: tokens at a question's end that vote. `kernel`: neighbours that share their highest vote."""

    window: int = 32
    kernel: int = 7


class SnapKV(Memory[Tensor]):
    """Choose k tokens once for the whole answer, by the votes of the question's last tokens.

    The state is their ids `[Hkv, k]`, those with the most votes first.
    """

    name = "snapkv"
    paper = "https://arxiv.org/abs/2404.14469"
    reads = "nothing (every key, twice, when a question is put)"
    holds = "k ids; a number for every token while a head votes"
    options_type = Options
    options: Options
    pass_tokens = WHOLE_QUESTION

    def prepare(self) -> None:
        super().prepare()
        window, kernel = self.options.window, self.options.kernel
        if not (1 <= window <= LARGEST and 1 <= kernel <= LARGEST and kernel % 2):
            raise ConfigError(
                f"snapkv: window={window}, kernel={kernel} will not do: "
                f"the window is from 1 to {LARGEST:,}, and the kernel an odd number in that range"
            )

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The tokens that the question's end voted for, the same for every row of a KV head."""
        if k >= self.host.length:
            return EVERYTHING
        if layer not in self.state:
            heads = range(len(queries.vectors))
            self.state[layer] = torch.stack([self._elected(layer, head, queries, k) for head in heads])
        return Selection(self.state[layer][:, None].expand(-1, queries.vectors.shape[1], -1))

    def _elected(self, layer: int, head: int, queries: Queries, k: int) -> Tensor:
        votes, kernel = self._votes(layer, head, queries)[None], self.options.kernel
        return max_pool1d(votes, kernel, stride=1, padding=kernel // 2)[0].topk(k).indices.cpu()

    def _votes(self, layer: int, head: int, queries: Queries) -> Tensor:
        """Attention of the window's queries to each stored token, summed: float32 `[N]`."""
        window = queries.by_token()[head, 0, :, -self.options.window :].flatten(0, 1)
        keys = self.host.keys(layer, head)
        lse, votes = window.new_full((len(window),), -torch.inf), window.new_empty(len(keys))
        for part in blocks(len(keys), rows=len(window)):
            lse = torch.logaddexp(lse, queries.logits(inner_products(window, keys, part)).logsumexp(1))
        for part in blocks(len(keys), rows=len(window)):
            votes[part] = (queries.logits(inner_products(window, keys, part)) - lse[:, None]).exp().sum(0)
        return votes
