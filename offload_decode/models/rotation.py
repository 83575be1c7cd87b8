"""Rotary embeddings held to the length that a store was rotated for, in every pass behind it.

transformers looks at the largest position of a pass and takes it for the end of the text. Here each rotary
module of such a model is asked for one position more, the last one of that length, whose rotation is dropped:
whatever the module does with lengths, it does as in one pass over all of the text.
"""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from offload_decode.errors import ConfigError, UnsupportedModel

DEPENDENT = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies change with the length of a text."""

UNSAID = 0
"""The length of a store that says none."""

_pass = threading.local()


def rotate_for(length: int | None) -> None:
    """What follows in this thread is rotated as a text of `length` tokens; None: as transformers does."""
    _pass.length = length


def depends_on_length(module: nn.Module) -> bool:
    """Whether it is a rotary embedding that changes with the length of a text."""
    kinds = getattr(module, "rope_type", None)
    return any(kind in DEPENDENT for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def hold_rotations(decoder: nn.Module) -> None:
    """Let the rotary embeddings of `decoder` obey `rotate_for`."""
    for module in decoder.modules():
        if depends_on_length(module):
            module.register_forward_hook(_Held(), with_kwargs=True)


class _Held:
    """A forward hook with a copy of its module for each length: modules remember the longest text they saw,
    and several threads may run stores of other lengths.
    """

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        length = getattr(_pass, "length", None)
        if length is None:
            return output
        if length == UNSAID:
            raise ConfigError(
                "this model rotates keys by the length of the whole text, and its cache does not say which "
                "that is: take a cache from an engine (Engine.new_cache)"
            )
        # Buffers that are made in inference mode cannot be changed in place outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if length not in self.modules:
                self.modules[length] = _unused(module)
            given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
            positions: Tensor = given.pop("position_ids")
            if positions.ndim != 2:
                raise UnsupportedModel(
                    "this model rotates by the length of its text, and by more than one position a token: "
                    "that is not served"
                )
            last = torch.full_like(positions[:, :1], length - 1)
            given["position_ids"] = torch.cat([positions, last], dim=1)
            rotated = self.modules[length](given.pop("x"), **given)
            return tuple(part[:, :-1] for part in rotated) if isinstance(rotated, tuple) else rotated[:, :-1]


def _unused(module: nn.Module) -> nn.Module:
    """A copy of a rotary embedding as it was before it saw any text."""
    config = getattr(module, "config", None)
    copy = deepcopy(module, {id(config): config})
    copy._forward_hooks.clear()
    for name, original in list(copy.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            setattr(copy, name.removesuffix("original_inv_freq") + "inv_freq", original.clone())
    for name in [name for name in vars(copy) if name.endswith("max_seq_len_cached")]:
        setattr(copy, name, copy.original_max_seq_len)
    return copy
