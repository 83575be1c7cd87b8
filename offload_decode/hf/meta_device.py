"""Models without weights, on torch's meta device, made without the import of its compiler."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# The arithmetic of rotary frequencies: names of methods, operators and functions.
_ARITHMETIC = frozenset(
    ["arange", "add", "div", "mul", "pow", "reciprocal", "rpow", "sub", "truediv", "rtruediv", "rdiv"]
)
_SHORT = 1 << 16  # elements


class Unfilled(TorchFunctionMode):
    """On the meta device, draw no random numbers, do arithmetic with short tensors on the CPU, and make
    tensors like others by their shape.

    torch would do all of it in Python there, and import sympy and its compiler: a second for tensors without
    values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.nn.init.normal_ and given["tensor"].is_meta:
            return given["tensor"]
        plain = func is torch.empty_like and args[0].is_meta and args[0].is_contiguous()
        if plain and given.keys() <= {"dtype", "device"}:
            return torch.empty(args[0].shape, **{"dtype": args[0].dtype, "device": "meta"} | given)
        name = getattr(func, "__name__", "").removeprefix("__").removesuffix("__")
        if name not in _ARITHMETIC or "out" in given:
            return func(*args, **given)
        tensors = [one for one in args if isinstance(one, Tensor)]
        if tensors and all(one.is_meta and one.numel() <= _SHORT for one in tensors):
            on_cpu = (
                torch.ones(one.shape, dtype=one.dtype, device="cpu") if isinstance(one, Tensor) else one
                for one in args
            )
            return func(*on_cpu, **given).to("meta")
        if func is torch.arange and str(given.get("device")) == "meta":
            return torch.arange(*args, **given | {"device": "cpu"}).to("meta")
        return func(*args, **given)
