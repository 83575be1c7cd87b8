"""transformers cache layers whose prefix lies elsewhere: only the tail is held here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from offload_decode.errors import ConfigError, UnsupportedModel
from offload_decode.kv.tail import Prefix, TailKV
from offload_decode.types import ModelShape


class TailLayer(CacheLayerMixin):
    """What both kinds of layer share: a tail behind `prefix.length` tokens that are kept elsewhere."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, index: int, prefix: Prefix):
        super().__init__()
        self.index = index
        self.prefix = prefix
        self.tail = TailKV()
        self.is_initialized = True
        self.unattended = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the tail takes the shape of what is appended first."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[B, Hkv, T, D]`; returns what the attention call receives, tagged with this layer."""
        self.tail.append(key_states, value_states)
        keys, values = self.visible()
        keys.offload_layer = self  # type: ignore[attr-defined]  # read by models.attention in the very next call
        self.unattended = True
        return keys, values

    def visible(self) -> tuple[Tensor, Tensor]:
        """Keys and values for the attention call."""
        return self.tail.view()

    def get_seq_length(self) -> int:
        """Prefix and tail together."""
        return self.prefix.length + self.tail.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the tail alone: every query may see the whole prefix."""
        return self.tail.length + query_length, self.prefix.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum (the name of this method up to transformers 5.8)."""
        return -1

    def reset(self) -> None:
        """Forget the tail."""
        self.tail = TailKV()
        self.unattended = False

    def crop(self, tokens: int) -> None:
        """Remove the last `-tokens` tokens; transformers' older meaning of positive numbers is refused."""
        if not -self.tail.length <= tokens <= 0:
            raise ConfigError(
                f"cannot crop by {tokens}: give minus the number of tokens to remove, and of the "
                f"{self.tail.length} that follow the stored prefix at most all"
            )
        if tokens and self.prefix.remembers:
            raise ConfigError(
                "this selector cannot remember what it has dropped: "
                "begin with a new cache instead of cropping this one"
            )
        self.tail.crop(self.tail.length + tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Pick batch rows, for beam search."""
        self.tail.rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these batch rows."""
        self.tail.rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        if self.tail.length:
            rows = self.tail.view()[0].shape[0]
            self.tail.rows(torch.arange(rows).repeat_interleave(repeats))


class PrefixLayer(TailLayer):
    """A full-attention layer: `prefix.attend` sees to the prefix, the attention call to the tail."""

    def fork(self, prefix: Prefix) -> PrefixLayer:
        """The same layer with a copy of the tail."""
        copy = PrefixLayer(self.index, prefix)
        copy.tail = self.tail.fork()
        return copy

    def rebase(self) -> None:
        """The tail has joined the prefix: start an empty one."""
        self.reset()


class WindowLayer(TailLayer):
    """A sliding-window layer: seeded with the stored window, keeps the whole tail, so that cropping stays
    exact.
    """

    is_sliding = True

    def __init__(self, index: int, prefix: Prefix, sliding_window: int, seed: tuple[Tensor, Tensor]):
        super().__init__(index, prefix)
        self.sliding_window = sliding_window
        self.seed = seed

    def visible(self) -> tuple[Tensor, Tensor]:
        """Seed and tail; the mask holds every row to its window, which padding may shift."""
        if not self.tail.length:
            return self.seed
        keys, values = self.tail.view()
        seed_keys, seed_values = (part.expand(keys.shape[0], -1, -1, -1) for part in self.seed)
        return torch.cat([seed_keys, keys], dim=2), torch.cat([seed_values, values], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers seed and tail."""
        seeded = self.seed[0].shape[2]
        return seeded + self.tail.length + query_length, self.prefix.length - seeded

    def get_max_length(self) -> int:
        """The window."""
        return self.sliding_window

    def fork(self, prefix: Prefix) -> WindowLayer:
        """The same layer with a copy of the tail."""
        copy = WindowLayer(self.index, prefix, self.sliding_window, self.seed)
        copy.tail = self.tail.fork()
        return copy

    def rebase(self) -> None:
        """The tail has joined the prefix: its end becomes the seed."""
        keys, values = self.visible()
        start = max(0, keys.shape[2] - (self.sliding_window - 1))
        self.seed = keys[:, :, start:].clone(), values[:, :, start:].clone()
        self.reset()


class PrefixCache(Cache):
    """A transformers cache behind a prefix; hand it to `generate(past_key_values=...)` or to a model's
    forward.
    """

    def __init__(
        self,
        layers: Sequence[PrefixLayer | WindowLayer],
        decoder: object = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layers=list(layers))
        self.decoder = decoder
        self.dtype = dtype
        # Which tokens after the prefix are no padding, bool [B, S]; None: all of them.
        self.shown: Tensor | None = None
        # The thread that runs a pass, and the length of the tail before it.
        self.begun: tuple[int, int] | None = None

    @classmethod
    def over(
        cls,
        prefix: Prefix,
        shape: ModelShape,
        windows: dict[int, tuple[Tensor, Tensor]],
        decoder: object = None,
        dtype: torch.dtype | None = None,
    ) -> PrefixCache:
        """An empty tail behind `prefix`; `windows` holds the seed `[1, Hkv, w, D]` of each sliding layer, and
        `decoder`, in `dtype`, is the only one that may run behind it, if one is given.
        """
        layers: list[PrefixLayer | WindowLayer] = []
        for index, own in enumerate(shape.layers):
            if own.window is not None:
                layers.append(WindowLayer(index, prefix, own.window, windows[index]))
            else:
                layers.append(PrefixLayer(index, prefix))
        return cls(layers, decoder, dtype)

    def fork(self, prefix: Prefix) -> PrefixCache:
        """An independent copy that shares the stored parts."""
        copy = PrefixCache([layer.fork(prefix) for layer in self.layers], self.decoder, self.dtype)
        copy.shown = self.shown
        return copy

    def __deepcopy__(self, memo: dict[int, object]) -> PrefixCache:
        """A fork: what is stored is not copied."""
        return self.fork(deepcopy(self.layers[0].prefix, memo))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """`TailLayer.update`, in a pass of a model that is switched to the stored prefix."""
        if self.begun is None:
            raise UnsupportedModel(
                "this cache goes with a stored prefix, to which the model that uses it does not attend: "
                "run engine.loaded.model"
            )
        return self.layers[layer_idx].update(key_states, value_states)  # type: ignore[no-any-return]

    def crop(self, tokens: int) -> None:
        """As `TailLayer.crop`."""
        super().crop(tokens)
        self._keep_shown()

    def reset(self) -> None:
        """Forget the tail, as `crop` does."""
        self.crop(-self.tail_length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Pick batch rows, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these batch rows."""
        super().batch_select_indices(indices)
        if self.shown is not None:
            self._hide(self.shown[indices.to(self.shown.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        super().batch_repeat_interleave(repeats)
        if self.shown is not None:
            self.shown = self.shown.repeat_interleave(repeats, dim=0)

    def activate_past_recording(self) -> None:
        """Called by assisted decoding and prompt lookup, which take the prefix for tokens of their own."""
        raise ConfigError(
            "assisted decoding and prompt lookup do not work behind a stored prefix: "
            "call generate without assistant_model and prompt_lookup_num_tokens"
        )

    def cut(self, tail_length: int) -> None:
        """Keep so many tokens after the prefix, also where a failed forward pass reached some layers only."""
        for layer in self.layers:
            layer.tail.crop(min(tail_length, layer.tail.length))
            layer.unattended = False
        self.begun = None
        self._keep_shown()

    def take_back(self) -> None:
        """Undo a pass that was interrupted."""
        if self.begun is None:
            return
        thread, length = self.begun
        if thread != threading.get_ident():
            raise ConfigError(
                "another thread runs a pass over this cache, or was interrupted in one: give each thread a "
                "cache of its own (Engine.new_cache, Engine.fork)"
            )
        if self.layers[0].prefix.remembers:
            raise ConfigError(
                "a pass over this cache was interrupted, and this selector cannot take back what it "
                "remembers: begin with a new cache"
            )
        self.cut(length)

    def show(self, tokens: int, shown: Tensor | None) -> None:
        """`tokens` more follow, of which bool `shown [B, S]` hides the padding; None hides none of them."""
        if shown is None and self.shown is not None:
            shown = torch.nn.functional.pad(self.shown, (0, tokens), value=True)
        self._hide(shown)

    def check_model(self, decoder: Any) -> None:
        """Raise unless `decoder` may run behind this prefix, and is as it was when it was opened."""
        if self.decoder not in (None, decoder):
            raise ConfigError(
                "this cache belongs to another model: take one from the engine that this model was opened "
                "with"
            )
        windows = {layer.sliding_window for layer in self.layers if isinstance(layer, WindowLayer)}
        converted = self.dtype not in (None, decoder.dtype)
        if converted or (windows and windows != {decoder.config.sliding_window}):
            raise ConfigError(
                "the dtype or the sliding window of this model was changed after its store was opened: load "
                "the model anew, and open the store with it"
            )

    def check_rows(self, rows: int) -> None:
        """Raise unless a pass of so many rows can follow what is there."""
        held = self.layers[0].tail.batch
        if held not in (None, rows):
            raise ConfigError(
                f"this cache holds {held} rows, and {rows} came: run as many in every pass, or change what "
                "it holds with batch_select_indices or batch_repeat_interleave"
            )

    def check_attended(self, tokens: int) -> None:
        """Raise if `tokens` new keys of some layer never reached the registered attention function."""
        assert self.begun is not None
        for layer in self.layers:
            if layer.unattended or layer.tail.length != self.begun[1] + tokens:
                raise UnsupportedModel(
                    f"layer {layer.index} attended without its stored prefix: the model does not hand the "
                    "cache's keys to the registered attention function, or runs with gradient checkpointing"
                )

    @property
    def prefix_length(self) -> int:
        """Stored tokens."""
        return int(self.layers[0].prefix.length)

    @property
    def tail_length(self) -> int:
        """Tokens after the prefix."""
        return int(self.layers[0].tail.length)

    def _keep_shown(self) -> None:
        if self.shown is not None:
            self._hide(self.shown[:, : self.tail_length])

    def _hide(self, shown: Tensor | None) -> None:
        self.shown = None if shown is None or bool(shown.all()) else shown
