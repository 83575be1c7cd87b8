"""What the layers ask of a stored prefix as a conversation runs, and how much of it the tail answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload_decode.attention.states import attend
from offload_decode.engine.step import StoredPrefix
from offload_decode.evals.live_queries import Call
from offload_decode.models.cache import PrefixCache
from offload_decode.types import AttentionState


@dataclass(frozen=True)
class LayerPass:
    """One layer's queries in one forward pass, and the share `[H, T]` (float64, on the CPU) of the attention
    of each that goes to the tail, that is, to the tokens behind the stored ones.
    """

    call: Call
    tail_share: Tensor


class Heard(StoredPrefix):
    """A prefix like another, of one conversation that begins, which keeps what it is asked and answers."""

    def __init__(self, like: StoredPrefix):
        super().__init__(like.host, like.chosen, like.tail)
        self._heard: list[tuple[Call, Tensor]] = []
        self._ends: dict[int, int] = {}  # of the tail, by layer, when what was taken last had been asked

    def begin(
        self, layer: int, query: Tensor, scaling: float, softcap: float | None
    ) -> Callable[[], AttentionState]:
        """As `StoredPrefix.begin`."""
        finish = super().begin(layer, query, scaling, softcap)

        def heard() -> AttentionState:
            state = finish()
            self._heard.append((Call(layer, query, scaling, softcap), state.lse))
            return state

        return heard

    def take(self, cache: PrefixCache) -> list[LayerPass]:
        """What was asked since this was last called, in its order; `cache` is the conversation's."""
        tails = {layer.index: layer.tail for layer in cache.tails}
        passes = []
        for call, stored in self._heard:
            keys, _ = tails[call.layer].view()
            start, asking = self._ends.get(call.layer, 0), call.query.shape[2]
            end = self._ends[call.layer] = start + asking
            seen = torch.ones(asking, end, dtype=torch.bool, device=keys.device).tril(start)
            keys = keys[:, :, :end]
            own = attend(call.query, keys, keys[..., :1], call.scaling, seen[None, None], call.softcap)
            share = torch.sigmoid(own.lse.double() - stored.to(own.lse.device).double())
            passes.append(LayerPass(call, share[0].cpu()))
        self._heard.clear()
        return passes
