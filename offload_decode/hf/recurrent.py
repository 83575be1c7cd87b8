"""Recurrent layers in a cache: their states, and where in the conversation these can be restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from offload_decode.common.errors import ConfigError, UnsupportedModel


class States:
    """States `[B, ...]` of one layer by name (`types.StateShape`): the last inputs of its convolutions, and
    what its recurrence carries on. Empty before its first token.

    A state is replaced and never written to, so that copying them all copies references. `dtypes` are those
    in which the model's own cache keeps them, where they are known.
    """

    def __init__(self, held: Mapping[str, Tensor] = {}, dtypes: Mapping[str, torch.dtype] = {}):
        self.held, self._dtypes = dict(held), dtypes

    def copy(self) -> States:
        return States(self.held, self._dtypes)

    def get(self, name: str) -> Tensor | None:
        """A state for a mixer, which may write into it: its own from now on."""
        if name in self.held:
            self.held[name] = self.held[name].clone()
        return self.held.get(name)

    def put(self, name: str, state: Tensor) -> Tensor:
        """Take the state after a pass; returned in the dtype in which it is kept."""
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

        def picked(state: Tensor) -> Tensor:
            if len(state) == 1:
                return state.expand(len(index), *state.shape[1:])
            return state[index.to(state.device)]

        return States({name: picked(state) for name, state in self.held.items()}, self._dtypes)

    def scattered(self, index: Tensor, rows: States) -> States:
        """With `rows` in the places `index`."""
        held = self.held.items()
        whole = {name: own.index_copy(0, index.to(own.device), rows.held[name]) for name, own in held}
        return States(whole, self._dtypes)


Marks = dict[int, dict[int, States]]
"""States by layer, after so many generated tokens."""


class RecurrentCache(Cache):  # type: ignore[misc]
    """Holds the states of the layers that have some; `begun` is not None during a pass."""

    begun: tuple[int, int, int] | None

    def __init__(self, layers: list[Any]):
        super().__init__(layers=layers)
        self.recurrent = any(layer.states is not None for layer in layers)
        self.marks: Marks = {}  # where turns began
        self._last: Marks = {}  # where the last pass did

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution; None before the first token."""
        return self._states(layer_idx).get(f"conv{state_idx}")

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: Any = None,
        **_: object,
    ) -> Tensor:
        return self._states(layer_idx).push(f"conv{state_idx}", conv_states, conv_kernel_size)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a recurrence; None before the first token."""
        return self._states(layer_idx).get(f"recurrent{state_idx}")

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        return self._states(layer_idx).put(f"recurrent{state_idx}", recurrent_states)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """As MiniMax asks for it."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a recurrent layer, the last one where none is given, has seen a token."""
        if layer_idx is None:
            layer_idx = max(layer.index for layer in self.layers if layer.states is not None)
        return bool(self._states(layer_idx).held)

    def mark_states(self, generated_length: int, rows: int, tokens: int) -> None:
        """A pass begins: it may be taken back, and one of several tokens begins a turn."""
        self._last = {generated_length: {i: states.copy() for i, states in self._held().items()}}
        if tokens > 1 or not generated_length:
            self.marks = self._last | self.marks
        if rows > 1 and not generated_length:
            # What is stored is of one row; a state is never written to, so that rows may share it for now.
            index = torch.zeros(rows, dtype=torch.long)
            self._replace_states({i: states.rows(index) for i, states in self._held().items()})

    def restore_states(self, generated_length: int, prefix_length: int) -> None:
        """The states after so many generated tokens; `ConfigError` where they were not kept."""
        if not self.recurrent:
            return
        held = self.marks.get(generated_length) or self._last.get(generated_length)
        if held is None:
            known = ", ".join(str(prefix_length + mark) for mark in sorted(self.marks))
            raise ConfigError(
                "this model has recurrent layers, whose states are kept only where a turn began: crop to "
                f"{known} tokens, or fork before you branch"
            )
        self._replace_states(held)
        self.join(generated_length)

    @property
    def state_bytes(self) -> int:
        """Bytes of all states, each counted once."""
        kept = [layers for marks in (self.marks, self._last) for layers in marks.values()]
        states = [state for layers in [self._held(), *kept] for state in layers.values()]
        held = {id(tensor): tensor for state in states for tensor in state.held.values()}
        return sum(int(tensor.nbytes) for tensor in held.values())

    def pick_states(self, rows: Tensor) -> None:
        """Keep these batch rows, also of what is marked; what is stored is of no row."""
        self._replace_states({i: states.rows(rows) for i, states in self._held().items()})
        for marks in (self.marks, self._last):
            for length, held in marks.items():
                marks[length] = {i: states.rows(rows) if length else states for i, states in held.items()}

    def join(self, generated_length: int) -> None:
        """The passes since `generated_length` were one turn: forget where the later ones began."""
        self.marks = {length: held for length, held in self.marks.items() if length <= generated_length}

    def states(self, layer: int) -> list[Tensor]:
        """What a recurrent layer has after the last token, `[B, ...]`, in the order of its shape."""
        held = self._held()[layer].held
        return [held[name] for name in sorted(held)]

    def _held(self) -> dict[int, States]:
        return {layer.index: layer.states for layer in self.layers if layer.states is not None}

    def _replace_states(self, held: Mapping[int, States]) -> None:
        for index, states in held.items():
            self.layers[index].states = states.copy()

    def _states(self, layer_idx: int) -> States:
        states: States | None = self.layers[layer_idx].states
        if self.begun is None or states is None:
            raise UnsupportedModel(
                f"layer {layer_idx} keeps a recurrent state that this cache has no place for: run "
                "engine.loaded.model, with the configuration that its store was made with"
            )
        return states
