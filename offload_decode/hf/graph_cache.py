"""A pass of a decoder that stops at every attention: what a layer asks there, and who answers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from offload_decode.common.errors import UnsupportedModel
from offload_decode.hf.cache_layers import PassLayer
from offload_decode.hf.running_pass import RUNNING


class Asked(NamedTuple):
    """What one layer's attention is asked: `query [B, H, T, D]`, `key` and `value [B, Hkv, T, D]` of the new
    tokens alone, and what a model says beside them.
    """

    module: torch.nn.Module
    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    softcap: float | None
    sinks: Tensor | None


Answers = Callable[[Asked], Tensor]
"""Who answers: `[B, T, H, D]`."""


class GraphCache(Cache):  # type: ignore[misc]
    """The cache of such a pass, `seen` tokens behind which it is said to stand: it holds nothing."""

    def __init__(self, layers: int, seen: int, answers: Answers):
        super().__init__(layers=[GraphLayer(index, seen, answers) for index in range(layers)])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """`GraphLayer.update`."""
        return self.layers[layer_idx].update(key_states, value_states)  # type: ignore[no-any-return]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """What is said."""
        return self.layers[layer_idx].get_seq_length()  # type: ignore[no-any-return]


class GraphLayer(PassLayer):
    """One layer of a `GraphCache`: the model's attention comes to `attend` with what `update` gave it."""

    def __init__(self, index: int, seen: int, answers: Answers):
        self.index = index
        self.seen = seen
        self.answers = answers
        self._given: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are, of which the run knows the layer."""
        tagged = key_states.view_as(key_states)
        self._given = tagged, value_states
        RUNNING.own.updated(self, tagged)
        return tagged, value_states

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """`[B, T, H, D]`. Raises `UnsupportedModel` for a model that makes something else of its keys."""
        if self._given is None or key is not self._given[0] or value is not self._given[1]:
            raise UnsupportedModel("this model's attention is not asked for what was put in its cache")
        self._given = None
        return self.answers(Asked(module, self.index, query, key, value, scaling, softcap, sinks))

    def get_seq_length(self) -> int:
        """What is said."""
        return self.seen
