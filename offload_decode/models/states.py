"""The states of a recurrent layer: those of a convolution's last inputs, and those of the recurrence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


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
