"""Cache layers of transformers whose stored prefix lies elsewhere, and `Pass`, by which attention finds them.

Layers of full attention, of latents, of a window, without keys; and `GraphLayer`, where a CUDA graph is cut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from offload_decode.attention.queries import CausalMask
from offload_decode.common.errors import UnsupportedModel
from offload_decode.hf.recurrent import States
from offload_decode.kv.generated import GeneratedKV, Prefix

KV = tuple[Tensor, Tensor]
"""Keys and values `[B, Hkv, T, D]`."""


@dataclass(eq=False)
class Pass:
    """What masks, rotations and attention calls of a decoder's run need to know, and transformers hands to
    none of them; `hf.hooks` makes one for every run.

    rotated_for: the length of text that keys are rotated for; None: as transformers does. mask: the 2-D mask
    that the run was given, over the prefix too. unpadded: what a token sees follows from its place alone.
    positions: where the new tokens stand, int64 `[B, T]`; None where no padding stands before them.
    indexed: the layer whose index keys were appended to last, and where they are; asked: what the model's own
    indexer (`hf.own_index`) asked of them.
    """

    rotated_for: int | None = None
    mask: Tensor | None = None
    unpadded: bool = False
    positions: Tensor | None = None
    indexed: tuple[int, Sequence[LatentLayer]] | None = None
    asked: Any = None
    _by_key: dict[int, tuple[ref[Tensor], Any]] = field(default_factory=dict, init=False)
    _updated: Any = field(default=None, init=False)
    _whole: tuple[Tensor, bool] | None = field(default=None, init=False)

    def updated(self, layer: Any, keys: Tensor) -> None:
        """`layer` was appended to, and gave these keys to the attention call."""
        self._by_key[id(keys)] = ref(keys), layer
        self._updated = layer

    def layer_of(self, keys: Tensor) -> Any:
        """The layer that gave these keys; None of others."""
        found = self._by_key.get(id(keys))
        return found[1] if found is not None and found[0]() is keys else None

    def layer_before(self, index: int) -> Any:
        """The layer that was appended to last, if it has this index; asked once."""
        layer, self._updated = self._updated, None
        return layer if layer is not None and layer.index == index else None

    def sees_all(self, mask: Tensor | None) -> bool:
        """Whether a mask hides nothing. One on a device is read once for the layers that share it."""
        if mask is None:
            return True
        if self._whole is None or self._whole[0] is not mask:
            self._whole = mask, bool(mask.all())
        return self._whole[1]


class _Running(threading.local):
    """The run of this thread, for functions that transformers calls without a word of each other."""

    def __init__(self) -> None:
        self.current = Pass()


RUNNING = _Running()


class _Layer:
    """What transformers asks of every cache layer; the mixers of its release 5.5 read the states here."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    is_initialized = True
    supports_early_init = False
    states: States | None = None

    @property
    def conv_states(self) -> Tensor | None:
        return None if self.states is None else self.states.get("conv0")

    @property
    def recurrent_states(self) -> Tensor | None:
        return None if self.states is None else self.states.get("recurrent0")

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name up to transformers 5.8


class GeneratedLayer(_Layer):
    """A layer that keeps the KV of the tokens that follow `prefix.length` stored ones."""

    supports_early_init = True  # else a cache of such layers counts as one that has seen no token
    seeded = 0  # tokens of the prefix that come to the attention call with the generated ones

    def __init__(self, index: int, prefix: Prefix, states: States | None = None):
        self.index, self.prefix, self.states = index, prefix, states
        self.generated = GeneratedKV()
        self.unattended = False

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> KV:
        """Append `[B, Hkv, T, D]`; returns what the attention call receives, and is known by."""
        self.append(key_states, value_states)
        keys, values = self.visible()
        RUNNING.current.updated(self, keys)
        self.unattended = True
        return keys, values

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Let them join the generated KV."""
        self.generated.append(key_states, value_states)

    def visible(self) -> KV:
        """Keys and values for the attention call."""
        return self.generated.view()

    @property
    def causal(self) -> CausalMask:
        """What the last queries see of `visible`, where nothing is padding."""
        return CausalMask()

    def get_seq_length(self) -> int:
        return self.prefix.length + self.generated.length

    def reset(self) -> None:
        self.generated = GeneratedKV()
        self.unattended = False

    def fork(self, prefix: Prefix) -> Self:
        fork = copy(self)
        fork.prefix, fork.generated, fork.unattended = prefix, self.generated.fork(), False
        fork.states = self.states and self.states.copy()
        return fork

    def rebase(self) -> None:
        self.reset()


class PrefixLayer(GeneratedLayer):
    """A full-attention layer: `prefix.begin` attends to the prefix, the call to the generated KV."""


class LatentLayer(PrefixLayer):
    """A full-attention layer of latents: a token's row (`hf.mla`) is kept once, as key and value in one. The
    last `index_dim` numbers of it are the token's key for an indexer of the model's own (`hf.own_index`).
    """

    rank = rotary = 0  # of the latents, known from the first on

    def __init__(self, index: int, prefix: Prefix, states: States | None = None, index_dim: int = 0):
        super().__init__(index, prefix, states)
        self.index_dim = index_dim

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Latents `[B, 1, T, rank]` and rotary parts `[B, 1, T, rotary]`; index keys come after them."""
        self.rank, self.rotary = key_states.shape[-1], value_states.shape[-1]
        rows = pad(torch.cat([key_states, value_states], dim=-1), (0, self.index_dim))
        self.generated.append(rows, rows)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Keep index keys `[B, T, D]` of the tokens that were appended last. Returns zeros `[B, S, D]`: what
        the indexer makes of them is not used behind a prefix.
        """
        self.append_index(indexer_key_states)
        RUNNING.current.indexed = self.index, [self]
        batch, _, dim = indexer_key_states.shape
        return indexer_key_states.new_zeros(()).expand(batch, self.generated.length, dim)

    def append_index(self, index_keys: Tensor) -> None:
        """Write index keys `[B, T, D]` of the last tokens into their rows."""
        if self.index_dim:
            self.index_keys[:, -index_keys.shape[1] :] = index_keys.detach()

    @property
    def index_keys(self) -> Tensor:
        """Index keys `[B, S, D]` of the generated tokens, a view of their rows."""
        rows, _ = self.generated.view()
        return rows[:, 0, :, rows.shape[-1] - self.index_dim :]

    def visible(self) -> KV:
        rows, _ = self.generated.view()
        return rows[..., : self.rank], rows[..., self.rank : self.rank + self.rotary]


class WindowLayer(GeneratedLayer):
    """Near tokens: the stored window, all generated KV, so that cropping is exact; a mask limits them."""

    is_sliding = True

    def __init__(
        self, index: int, prefix: Prefix, sliding_window: int, seed: KV, states: States | None, chunked: bool
    ):
        super().__init__(index, prefix, states)
        self.sliding_window, self.seed, self.chunked = sliding_window, seed, chunked
        self.seeded = seed[0].shape[2]

    def visible(self) -> KV:
        """Seed and generated KV; the mask limits every token to its window, which padding may shift."""
        if not self.generated.length:
            return self.seed
        return self._behind_seed(self.seeded)

    def _behind_seed(self, tokens: int) -> KV:
        keys, values = self.generated.view()
        seed_keys, seed_values = (
            part[:, :, part.shape[2] - tokens :].expand(keys.shape[0], -1, -1, -1) for part in self.seed
        )
        return torch.cat([seed_keys, keys], dim=2), torch.cat([seed_values, values], dim=2)

    @property
    def causal(self) -> CausalMask:
        """Those of the window; chunks are seen by a mask."""
        return CausalMask(self.sliding_window)

    def near(self, tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values that some of the last `tokens` may see, and which of them each does: bool
        `[tokens, S]`, or None for one token, which sees them all. Nothing is padding.
        """
        end, window = self.get_seq_length(), self.sliding_window
        first = end - tokens
        least = max(0, first - first % window if self.chunked else first - window + 1)
        before = self.prefix.length - least
        if before > 0:
            keys, values = self._behind_seed(before)
        else:
            keys, values = (part[:, :, -before:] for part in self.generated.view())
        if tokens == 1:
            return keys, values, None
        asked = torch.arange(first, end, device=keys.device)[:, None]
        seen = torch.arange(least, end, device=keys.device)
        within = asked // window == seen // window if self.chunked else asked - seen < window
        return keys, values, within & (seen <= asked)

    def get_max_length(self) -> int:
        return self.sliding_window

    def rebase(self) -> None:
        """The generated KV has joined the prefix: its end becomes the seed."""
        keys, values = self.visible()
        start = max(0, keys.shape[2] - (self.sliding_window - 1))
        self.seed = keys[:, :, start:].clone(), values[:, :, start:].clone()
        self.seeded = keys.shape[2] - start
        self.reset()


class KeylessLayer(_Layer):
    """A layer that keeps no keys: it is recurrent, or no attention, or reads those of another layer."""

    def __init__(self, index: int, states: States | None = None):
        self.index, self.states = index, states

    def fork(self, prefix: Prefix) -> KeylessLayer:
        return KeylessLayer(self.index, self.states and self.states.copy())

    def rebase(self) -> None:
        """It keeps nothing that could join the prefix."""


class PassLayer(_Layer):
    """A layer of a cache that exists for one pass."""

    is_croppable = False


class AttentionCall(NamedTuple):
    """The call of one layer's attention at which a CUDA graph ends: `query [B, H, T, D]`, `key` and `value
    [B, Hkv, T, D]` of the new tokens alone, and what the model gives beside them.
    """

    module: torch.nn.Module
    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    softcap: float | None
    sinks: Tensor | None


Attend = Callable[[AttentionCall], Tensor]
"""Computes the attention of a call: `[B, T, H, D]`."""


class GraphCache(Cache):  # type: ignore[misc]
    """The cache of a pass that is recorded as CUDA graphs: it holds nothing, and reports `seen` tokens."""

    def __init__(self, layers: int, seen: int, attend: Attend):
        super().__init__(layers=[GraphLayer(index, seen, attend) for index in range(layers)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[layer_idx].get_seq_length()  # type: ignore[no-any-return]


class GraphLayer(PassLayer):
    """One layer of a `GraphCache`: the model's attention comes to `attend` with what `update` gave it."""

    def __init__(self, index: int, seen: int, attend: Attend):
        self.index, self._seen, self._attend = index, seen, attend
        self._given: KV | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> KV:
        tagged = key_states.view_as(key_states)
        self._given = tagged, value_states
        RUNNING.current.updated(self, tagged)
        return tagged, value_states

    def attend(self, call: AttentionCall) -> Tensor:
        """`[B, T, H, D]`. Raises `UnsupportedModel` for a model that makes something else of its keys."""
        if self._given is None or call.key is not self._given[0] or call.value is not self._given[1]:
            raise UnsupportedModel("this model's attention receives other keys than those put in its cache")
        self._given = None
        return self._attend(call)

    def get_seq_length(self) -> int:
        return self._seen
