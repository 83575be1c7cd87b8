"""Models without weights, on torch's meta device, made without the import of its compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What rotary frequencies are made by: their names as methods, as operators and as functions.
_ARITHMETIC = {
    "arange",
    "add",
    "div",
    "mul",
    "pow",
    "reciprocal",
    "rpow",
    "sub",
    "truediv",
    "rtruediv",
    "rdiv",
}
_SHORT = 1 << 16  # elements


class Unfilled(TorchFunctionMode):
    """On the meta device random numbers are not drawn, arithmetic with short tensors takes what it makes from
    the CPU, and tensors like others are made by their shape.

    There torch runs all of it in Python, and imports sympy and its compiler for it: a second that changes
    nothing, as such a tensor has no values.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func is torch.nn.init.normal_ and given["tensor"].is_meta:
            return given["tensor"]
        if func is torch.empty_like and _plain(args[0]) and given.keys() <= {"dtype", "device"}:
            return torch.empty(args[0].shape, **{"dtype": args[0].dtype, "device": "meta"} | given)
        if (
            getattr(func, "__name__", "").removeprefix("__").removesuffix("__") not in _ARITHMETIC
            or "out" in given
        ):
            return func(*args, **given)
        met = [one for one in args if isinstance(one, Tensor)]
        if met and all(one.is_meta and one.numel() <= _SHORT for one in met):
            here = (_like(one) if isinstance(one, Tensor) else one for one in args)
            return func(*here, **given).to("meta")
        if func is torch.arange and str(given.get("device")) == "meta":
            return torch.arange(*args, **given | {"device": "cpu"}).to("meta")
        return func(*args, **given)


def _plain(made: Tensor) -> bool:
    return made.is_meta and made.is_contiguous()


def _like(made: Tensor) -> Tensor:
    return torch.ones(made.shape, dtype=made.dtype, device="cpu")
