"""What functions of torch do with tensors of a device and of the host, by name, where it is not plain.

A function that is not named here takes tensors of one side, and numbers, and gives tensors of that side.
"""

from typing import Any

import torch
from torch import Tensor

REFUSED = {
    "numpy": "numpy cannot read a tensor of a CUDA device: use Tensor.cpu() first",
    "__array__": "numpy cannot read a tensor of a CUDA device: use Tensor.cpu() first",
    "pin_memory": "only tensors of the host can be pinned",
}
"""Functions that a tensor of a device does not have, and why."""

MOVES = frozenset(["to", "cpu", "cuda"])
"""Functions that bring a tensor to the other side."""

READS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
    *("__repr__", "__format__", "is_nonzero", "nonzero", "argwhere", "equal", "allclose", "unique"),
    *("unique_consecutive", "masked_select", "bincount"),
}
"""Functions whose result the host needs, or whose shape it does, so that it waits for the device."""

JOINS = frozenset(["cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"])
"""Functions that take no number of the host among tensors of a device."""

LIKE_FIRST = frozenset(["expand_as", "view_as", "reshape_as"])
"""Functions whose result lies where their first tensor does, wherever the other is."""

LOOKS = {
    *("__len__", "__hash__", "data_ptr", "untyped_storage", "is_pinned", "dim", "ndimension", "size"),
    *("stride", "numel", "nelement", "element_size", "storage_offset", "is_contiguous", "is_floating_point"),
    *("is_complex", "is_inference", "get_device", "requires_grad_", "_has_compatible_shallow_copy_type"),
}
"""Functions that touch no number of a tensor; nor does the reading of an attribute."""

WIDER = {"histc": lambda x, *args, **kwargs: torch.histc(x.float(), *args, **kwargs).to(x.dtype)}
"""Functions that a device has for more dtypes than the host, as the host computes them."""

SENT = frozenset(["tensor", "as_tensor", "asarray"])
"""Functions that make tensors of the host's numbers."""


def name_of(function: Any) -> str:
    """The name of a function of torch; `.device` where that attribute is read or set."""
    name: str = getattr(function, "__name__", "")
    return f".{function.__self__.__name__}" if name in ("__get__", "__set__") else name


def looks(name: str) -> bool:
    """Whether a function touches no number of a tensor."""
    return name.startswith(".") or name in LOOKS


def writes(name: str) -> bool:
    """Whether a function writes to its first tensor."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the device in this function of the device's tensors."""
    if name == "repeat_interleave":
        repeats = kwargs.get("repeats", args[-1])
        return isinstance(repeats, Tensor) and kwargs.get("output_size") is None
    if name == "where":
        return len(args) == 1
    if name in ("grouped_mm", "_grouped_mm"):  # but for bfloat16 on some cards, its groups are looked up
        return True
    if name == "__getitem__":
        return _masked(args[1])
    if name == "__setitem__":  # a mask that is filled with a number needs no places
        return _masked(args[1]) and isinstance(args[2], Tensor) and args[2].numel() != 1
    return name in READS


def tensors(given: Any) -> list[Tensor]:
    """All tensors in lists, tuples, dicts and slices of a function's arguments."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, slice):
        given = (given.start, given.stop, given.step)
    elif isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, tuple | list):
        return []
    return [one for part in given for one in tensors(part)]


def _masked(places: Any) -> bool:
    return any(part.dtype in (torch.bool, torch.uint8) for part in tensors(places))
