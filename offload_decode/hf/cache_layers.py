"""transformers cache layers whose prefix lies elsewhere: only what follows it is held here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from offload_decode.attention.queries import Places
from offload_decode.hf.running_pass import RUNNING
from offload_decode.kv.generated import GeneratedKV, Prefix

# The states of a recurrent layer: those of a convolution's last inputs, and those of the recurrence.


class States:
    """States `[B, ...]` of one layer by name (`types.StateShape`), none before its first token.

    A state is replaced and never written to, so that a copy of them all is a copy of references. `dtypes` are
    those in which the model's own cache keeps them, where they are known.
    """

    def __init__(
        self, held: Mapping[str, Tensor] | None = None, dtypes: Mapping[str, torch.dtype] | None = None
    ):
        self.held = dict(held or {})
        self._dtypes = dtypes or {}

    def copy(self) -> States:
        """The same states for an independent continuation."""
        return States(self.held, self._dtypes)

    def get(self, name: str) -> Tensor | None:
        """A state for a mixer, which may write into it: its own from now on."""
        if name in self.held:
            self.held[name] = self.held[name].clone()
        return self.held.get(name)

    def put(self, name: str, state: Tensor) -> Tensor:
        """Take the state after a pass."""
        self.held[name] = state.detach().to(self._dtypes.get(name, state.dtype))
        return self.held[name]

    def push(self, name: str, inputs: Tensor, kernel_size: int | None) -> Tensor:
        """Take the inputs `[B, C, T]` of a convolution; returns them behind those that came before, or, as
        transformers 5.5 has it, which names no kernel size, the last ones alone.
        """
        before, inputs = self.held.get(name), inputs.to(self._dtypes.get(name, inputs.dtype))
        if before is None:
            size = kernel_size or inputs.shape[-1]
            whole = torch.nn.functional.pad(inputs, (max(0, size - inputs.shape[-1]), 0))
        else:
            size = before.shape[-1]
            whole = torch.cat([before, inputs], dim=-1)
        last = self.held[name] = whole[..., -size:].detach().clone()
        return last if kernel_size is None else whole

    def rows(self, index: Tensor) -> States:
        """These rows of the batch; of one that all rows share, as many of it."""
        return States({name: _rows(state, index) for name, state in self.held.items()}, self._dtypes)

    def scattered(self, index: Tensor, rows: States) -> States:
        """With `rows` in the places `index`."""
        whole = {name: state.clone() for name, state in self.held.items()}
        for name, state in whole.items():
            state[index.to(state.device)] = rows.held[name]
        return States(whole, self._dtypes)


def _rows(state: Tensor, index: Tensor) -> Tensor:
    if len(state) == 1:
        return state.expand(len(index), *state.shape[1:])
    return state.index_select(0, index.to(state.device))


class _Stateful:
    """What the mixers of transformers 5.5 read of their layer."""

    states: States | None

    @property
    def conv_states(self) -> Tensor | None:
        """The last inputs of a convolution."""
        return None if self.states is None else self.states.get("conv0")

    @property
    def recurrent_states(self) -> Tensor | None:
        """The state of a recurrence."""
        return None if self.states is None else self.states.get("recurrent0")


class GeneratedLayer(_Stateful, CacheLayerMixin):  # type: ignore[misc]
    """What both kinds of layer share: a tail behind `prefix.length` tokens that are kept elsewhere."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    seeded = 0  # tokens of the prefix that come to the attention call with the tail

    def __init__(self, index: int, prefix: Prefix, states: States | None = None):
        super().__init__()
        self.index = index
        self.prefix = prefix
        self.states = states
        self.tail = GeneratedKV()
        self.is_initialized = True
        self.unattended = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the tail takes the shape of what is appended first."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[B, Hkv, T, D]`; returns what the attention call receives, which is known by its keys."""
        self.tail.append(key_states, value_states)
        keys, values = self.visible()
        RUNNING.own.updated(self, keys)
        self.unattended = True
        return keys, values

    def visible(self) -> tuple[Tensor, Tensor]:
        """Keys and values for the attention call."""
        return self.tail.view()

    @property
    def places(self) -> Places:
        """What the last rows see of `visible`, where nothing is padding."""
        return Places()

    def get_seq_length(self) -> int:
        """Prefix and tail together."""
        return self.prefix.length + self.tail.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the tail, and of the prefix what is seeded: every query may see all else of it."""
        return self.seeded + self.tail.length + query_length, self.prefix.length - self.seeded

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum (the name of this method up to transformers 5.8)."""
        return -1

    def reset(self) -> None:
        """Forget the tail."""
        self.tail = GeneratedKV()
        self.unattended = False


class PrefixLayer(GeneratedLayer):
    """A full-attention layer: `prefix.attend` sees to the prefix, the attention call to the tail."""

    def fork(self, prefix: Prefix) -> Self:
        """The same layer with a copy of the tail."""
        copy = type(self)(self.index, prefix, self.states and self.states.copy())
        copy.tail = self.tail.fork()
        return copy

    def rebase(self) -> None:
        """The tail has joined the prefix: start an empty one."""
        self.reset()


class LatentLayer(PrefixLayer):
    """A full-attention layer that caches latents: the tail holds each token's row (`models.latent`) once, as
    key and value in one.
    """

    rank = 0  # of the latents, known from the first on

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append latents `[B, 1, T, rank]` and rotary parts `[B, 1, T, rotary]`; returns those so far."""
        self.rank = key_states.shape[-1]
        rows = torch.cat([key_states, value_states], dim=-1)
        return super().update(rows, rows)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """What the indexer of a model (DeepSeek-V3.2) scores, `[B, S, D]`: zeros, for its choice is not asked
        for behind a prefix.
        """
        batch, _, dim = indexer_key_states.shape
        return indexer_key_states.new_zeros(()).expand(batch, self.tail.length, dim)

    def visible(self) -> tuple[Tensor, Tensor]:
        """Latents and rotary parts, of which the model makes keys and values."""
        rows, _ = self.tail.view()
        return rows[..., : self.rank], rows[..., self.rank :]

    def fork(self, prefix: Prefix) -> Self:
        """The same layer with a copy of the tail."""
        copy = super().fork(prefix)
        copy.rank = self.rank
        return copy


class WindowLayer(GeneratedLayer):
    """A layer that attends to near tokens: seeded with the stored window, keeps the whole tail, so that
    cropping stays exact. The mask holds each row to its window, or to its chunk.
    """

    is_sliding = True

    def __init__(
        self,
        index: int,
        prefix: Prefix,
        sliding_window: int,
        seed: tuple[Tensor, Tensor],
        states: States | None = None,
        chunked: bool = False,
    ):
        super().__init__(index, prefix, states)
        self.sliding_window = sliding_window
        self.seed = seed
        self.seeded = seed[0].shape[2]
        self.chunked = chunked

    def visible(self) -> tuple[Tensor, Tensor]:
        """Seed and tail; the mask holds every row to its window, which padding may shift."""
        if not self.tail.length:
            return self.seed
        keys, values = self.tail.view()
        seed_keys, seed_values = (part.expand(keys.shape[0], -1, -1, -1) for part in self.seed)
        return torch.cat([seed_keys, keys], dim=2), torch.cat([seed_values, values], dim=2)

    @property
    def places(self) -> Places:
        """Those of the window; chunks are seen by a mask."""
        return Places(self.sliding_window)

    def near(self, tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values that some of the last `tokens` may see, and which of them each does: bool
        `[tokens, S]`, or None for one token, which sees them all. Nothing is padding.
        """
        end, window = self.get_seq_length(), self.sliding_window
        first = end - tokens
        least = max(0, first - first % window if self.chunked else first - window + 1)
        keys, values = self.tail.view()
        before = self.prefix.length - least
        if before > 0:
            rows = len(keys)
            seeds = (part[:, :, part.shape[2] - before :].expand(rows, -1, -1, -1) for part in self.seed)
            keys, values = (torch.cat(pair, dim=2) for pair in zip(seeds, (keys, values), strict=True))
        else:
            keys, values = keys[:, :, -before:], values[:, :, -before:]
        if tokens == 1:
            return keys, values, None
        asked = torch.arange(first, end, device=keys.device)[:, None]
        seen = torch.arange(least, end, device=keys.device)
        within = asked // window == seen // window if self.chunked else asked - seen < window
        return keys, values, within & (seen <= asked)

    def get_max_length(self) -> int:
        """The window."""
        return self.sliding_window

    def fork(self, prefix: Prefix) -> WindowLayer:
        """The same layer with a copy of the tail."""
        states = self.states and self.states.copy()
        copy = WindowLayer(self.index, prefix, self.sliding_window, self.seed, states, self.chunked)
        copy.tail = self.tail.fork()
        return copy

    def rebase(self) -> None:
        """The tail has joined the prefix: its end becomes the seed."""
        keys, values = self.visible()
        start = max(0, keys.shape[2] - (self.sliding_window - 1))
        self.seed = keys[:, :, start:].clone(), values[:, :, start:].clone()
        self.seeded = keys.shape[2] - start
        self.reset()


class PassLayer:
    """What transformers asks of a layer whose cache is there for one pass."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    is_initialized = True
    supports_early_init = False
    states = None

    def get_max_cache_shape(self) -> int:
        """No maximum."""
        return -1

    get_max_length = get_max_cache_shape


class KeylessLayer(_Stateful):
    """A layer that keeps no keys: it is recurrent, or no attention, or reads those of another layer."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    is_initialized = True
    supports_early_init = False

    def __init__(self, index: int, states: States | None = None):
        self.index = index
        self.states = states

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum (the name of this method up to transformers 5.8)."""
        return -1

    def fork(self, prefix: Prefix) -> KeylessLayer:
        """The same layer with a copy of its states."""
        return KeylessLayer(self.index, self.states and self.states.copy())

    def rebase(self) -> None:
        """Nothing is kept of the tail."""
