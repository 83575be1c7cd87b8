"""A transformers cache behind a stored prefix: layers that keep the generated KV, and recurrent states."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NoReturn

import torch
from torch import Tensor

from offload_decode.common.errors import ConfigError, UnsupportedModel
from offload_decode.hf.cache_layers import GeneratedLayer, KeylessLayer, LatentLayer, PrefixLayer, WindowLayer
from offload_decode.hf.compat import DTYPES
from offload_decode.hf.positions import ANYWHERE, Positions
from offload_decode.hf.recurrent import RecurrentCache, States
from offload_decode.kv.generated import Prefix
from offload_decode.types import LayerKind, ModelShape


class CorpusCache(RecurrentCache):
    """The transformers cache over a stored corpus; hand it to `generate` or to a model's forward, as `cache`
    or, before transformers 5.24, as `past_key_values`.
    """

    def __init__(
        self,
        layers: Sequence[GeneratedLayer | KeylessLayer],
        decoder: object = None,
        dtype: torch.dtype | None = None,
        positions: Positions = ANYWHERE,
    ):
        super().__init__(list(layers))
        self.generated_layers = [layer for layer in layers if isinstance(layer, GeneratedLayer)]
        # In place of a layer without keys the first full one, as in transformers.
        first = next(
            (layer for layer in self.generated_layers if not layer.is_sliding),
            next(iter(self.generated_layers), None),
        )
        self._keyed: list[Any] = [layer if isinstance(layer, GeneratedLayer) else first for layer in layers]
        self.windows = {
            layer.sliding_window for layer in self.generated_layers if isinstance(layer, WindowLayer)
        }
        self.decoder, self.dtype, self.positions = decoder, dtype, positions
        # Which tokens after the prefix are no padding, bool [B, S]; None: all of them.
        self.shown: Tensor | None = None
        # The mask of the next pass, where it is known to show all stored tokens: a million are not read.
        self.shows_prefix: Tensor | None = None
        # The thread that runs a pass, and how many tokens are generated before it and with it.
        self.begun: tuple[int, int, int] | None = None

    @classmethod
    def over(
        cls,
        prefix: Prefix,
        shape: ModelShape,
        windows: Mapping[int, tuple[Tensor, Tensor]],
        decoder: object = None,
        dtype: torch.dtype | None = None,
        states: Mapping[int, Sequence[Tensor]] = {},
        positions: Positions = ANYWHERE,
    ) -> CorpusCache:
        """An empty cache behind `prefix`; `windows` holds the seed `[1, Hkv, w, D]` of each local layer,
        `states` those of each recurrent layer after the prefix, `[1, ...]` in the order of its shape, and
        `decoder`, in `dtype`, is the only one that may run behind it, if one is given. `positions` are the
        store's.
        """
        layers: list[GeneratedLayer | KeylessLayer] = []
        for index, layer in enumerate(shape.layers):
            dtypes = {state.name: DTYPES[state.dtype] for state in layer.states}
            first = States(dict(zip(dtypes, states.get(index, ()), strict=False)), dtypes) if dtypes else None
            if layer.window is not None:
                chunked = layer.kind is LayerKind.CHUNKED
                layers.append(WindowLayer(index, prefix, layer.window, windows[index], first, chunked))
            elif layer.kind is LayerKind.FULL:
                index_dim = 0 if layer.index is None else layer.index.dim
                layers.append(
                    LatentLayer(index, prefix, first, index_dim)
                    if layer.latent
                    else PrefixLayer(index, prefix, first)
                )
            else:
                layers.append(KeylessLayer(index, first))
        return cls(layers, decoder, dtype, positions)

    def fork(self, prefix: Prefix) -> CorpusCache:
        """An independent copy that shares the stored parts."""
        layers = [layer.fork(prefix) for layer in self.layers]
        copy = CorpusCache(layers, self.decoder, self.dtype, self.positions)
        copy.shown = self.shown
        copy.marks, copy._last = dict(self.marks), dict(self._last)
        return copy

    def __deepcopy__(self, memo: dict[int, object]) -> CorpusCache:
        return self.fork(deepcopy(self.prefix, memo))

    @property
    def prefix(self) -> Prefix:
        """The stored prefix, which all layers share."""
        return self.generated_layers[0].prefix

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """`GeneratedLayer.update`. Raises `UnsupportedModel` outside a pass of a model that was switched."""
        if self.begun is None:
            raise UnsupportedModel(
                "this cache is for a model that attends to its stored prefix: run engine.loaded.model"
            )
        return self.layers[layer_idx].update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Stored and generated tokens."""
        layer = self._keyed[layer_idx]
        return int(layer.prefix.length + layer.generated.length)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The keys that a mask covers, and where they begin: every query may see the rest of the prefix."""
        layer = self._keyed[layer_idx]
        return layer.seeded + layer.generated.length + query_length, int(layer.prefix.length) - layer.seeded

    def crop(self, tokens: int) -> None:
        """Remove the last `-tokens` tokens; transformers' older meaning of positive numbers is refused."""
        if not -self.generated_length <= tokens <= 0:
            most = self.generated_length
            raise ConfigError(
                f"cannot crop by {tokens}: give minus the number of tokens to remove, at most the {most} "
                "that follow the stored prefix"
            )
        if tokens and self.prefix.remembers:
            raise ConfigError(
                "this selector cannot bring back tokens that it has dropped: begin with a new cache"
            )
        self.cut(self.generated_length + tokens)

    def reset(self) -> None:
        """Forget the generated tokens, as `crop` does."""
        self.crop(-self.generated_length)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these sequences."""
        for layer in self.generated_layers:
            layer.generated.rows(indices)
        if self.generated_length:  # else any number of them may come
            self.pick_states(indices)
        if self.shown is not None:
            self._hide(self.shown[indices.to(self.shown.device)])

    reorder_cache = batch_select_indices  # of beam search

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        if (rows := self.batch) is not None:
            self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """Called by assisted decoding and prompt lookup, which would crop stored tokens."""
        raise ConfigError(
            "assisted decoding and prompt lookup do not work behind a stored prefix: call generate "
            "without assistant_model and prompt_lookup_num_tokens"
        )

    def cut(self, generated_length: int) -> None:
        """Keep so many tokens after the prefix, also where a failed forward pass reached some layers only.

        A recurrent state is known where a turn began and where the last pass did; `ConfigError` elsewhere.
        """
        if generated_length != self.generated_length or self.begun is not None:
            self.restore_states(generated_length, self.prefix_length)
        for layer in self.generated_layers:
            layer.generated.crop(min(generated_length, layer.generated.length))
            layer.unattended = False
        self.begun = None
        if self.shown is not None:
            self._hide(self.shown[:, : self.generated_length])

    def kept(self, generated_length: int) -> int:
        """The most tokens after the prefix, `generated_length` or fewer, that `cut` can keep."""
        if generated_length >= self.generated_length or not self.recurrent:
            return min(generated_length, self.generated_length)
        return max((mark for mark in (*self.marks, *self._last) if mark <= generated_length), default=0)

    def trim(self) -> None:
        """Free the room for more tokens: the next pass allocates it again."""
        for layer in self.generated_layers:
            layer.generated.trim()

    @property
    def nbytes(self) -> int:
        """Bytes of the generated KV and of recurrent states, those kept of earlier turns included."""
        return sum(layer.generated.nbytes for layer in self.generated_layers) + self.state_bytes

    def begin(self, rows: int, tokens: int) -> None:
        """A pass of so many sequences and tokens begins."""
        length = self.generated_layers[0].generated.length
        self.begun = threading.get_ident(), length, length + tokens
        if self.recurrent:
            self.mark_states(length, rows, tokens)

    def rebase(self) -> None:
        """The generated KV has joined the prefix: start anew."""
        for layer in self.layers:
            layer.rebase()
        self.marks, self._last = {}, {}

    def positions_of(self, shown: Tensor, tokens: int) -> Tensor:
        """Of the last `tokens`, int64 `[B, T]`, where `shown [B, S]` after the prefix are no padding."""
        return (self.prefix_length + shown.long().cumsum(-1) - 1)[:, -tokens:]

    def hidden(self, tokens: int) -> Tensor | None:
        """How much of the last `tokens` is padding in each sequence, int64 `[B]`; None where nothing is."""
        if self.shown is None or bool((new := self.shown[:, -tokens:]).all()):
            return None
        return (~new).sum(dim=1)

    def take_back(self) -> None:
        """Undo a pass that was interrupted. Raises `ConfigError` in another thread."""
        if self.begun is None:
            return
        thread, length, _ = self.begun
        if thread != threading.get_ident():
            raise ConfigError(
                "another thread runs a pass over this cache, or was interrupted in one: give each thread "
                "its own cache (Engine.new_cache, Engine.fork)"
            )
        if self.prefix.remembers:
            raise ConfigError(
                "a pass over this cache was interrupted, and this selector cannot undo it: begin with a "
                "new cache"
            )
        self.cut(length)

    def show(self, tokens: int, shown: Tensor | None) -> None:
        """`tokens` more follow, whose padding bool `shown [B, S]` hides; None hides none of them."""
        if shown is not None and self.recurrent:
            new = shown[:, -tokens:]
            if bool((new[:, :-1] & ~new[:, 1:]).any()):
                raise ConfigError("this model has recurrent layers, which need padding on the left")
        if shown is None and self.shown is not None:
            shown = torch.nn.functional.pad(self.shown, (0, tokens), value=True)
        self._hide(shown)

    def refuse_rows(self, rows: int) -> NoReturn:
        """Raise `ConfigError`, as a pass of so many sequences cannot follow those that are there."""
        raise ConfigError(
            f"this cache holds {self.batch} sequences, and {rows} came: run as many in every pass, or "
            "change it with batch_select_indices or batch_repeat_interleave"
        )

    def check_room(self, tokens: int, shown: Tensor | None) -> None:
        """Raise unless `tokens` more, `shown [B, S]` as for `show`, have positions; padding needs none."""
        earlier = self.generated_length if self.shown is None else int(self.shown.sum(-1).max())
        behind = earlier + tokens if shown is None else int(shown.sum(-1).max())
        self.positions.check(self.prefix_length + behind)

    def check_attended(self) -> None:
        """The pass is over: raise if new keys of a layer never reached the registered attention."""
        assert self.begun is not None
        for layer in self.generated_layers:
            if layer.unattended or layer.generated.length != self.begun[2]:
                raise UnsupportedModel(
                    f"layer {layer.index} attended without its stored prefix: the model does not pass the "
                    "cache's keys to the registered attention function, or runs with gradient checkpointing"
                )
        self.begun = None

    @property
    def prefix_length(self) -> int:
        """Stored tokens."""
        return int(self.prefix.length)

    @property
    def batch(self) -> int | None:
        """Sequences of generated tokens; None before there are any."""
        return self.generated_layers[0].generated.batch

    @property
    def generated_length(self) -> int:
        """Tokens after the prefix."""
        return int(self.generated_layers[0].generated.length)

    def _hide(self, shown: Tensor | None) -> None:
        self.shown = None if shown is None or bool(shown.all()) else shown
