"""The stand-in's tensors, and the rules that they keep."""

from __future__ import annotations

from typing import Any

import torch
from numba.extending import typeof_impl
from torch import Tensor

from tests.card import rules
from tests.card.rules import name_of, tensors
from tests.card.streams import Memory, Seen, Stream, Transfers, Waited, address, done

Args, Named = tuple[Any, ...], dict[str, Any]
CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")


class DeviceTensor(Tensor):
    """A tensor of the stand-in. Its memory is the host's, of which nobody outside this room is told."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        """Every function of torch, in threads beside that of `stand_in` too."""
        if Card.present is None:
            raise RuntimeError("a tensor of a stand-in device has outlived it")
        return Card.present.call(function, args, kwargs or {})

    def record_stream(self, stream: object) -> None:
        """Memory of the stand-in is given to nobody else as long as a tensor has it."""


class Address(int):
    """Where a tensor of the stand-in lies: compiled code of the host may not have it."""


@typeof_impl.register(Address)
def _refuse_address(address: Address, context: object) -> None:
    raise TypeError("compiled code of the host cannot read the memory of a CUDA device")


class Card:
    """The device, with so many bytes of memory."""

    present: Card | None = None

    def __init__(self, memory: int) -> None:
        self.memory = Memory(memory)
        self.transfers = Transfers()
        self.order = self.transfers.order
        self._written: dict[int, tuple[Stream, int]] = {}  # storages, and by which work last
        self._read: dict[int, Seen] = {}  # storages, and by which work since they were written

    @property
    def waits(self) -> list[Waited]:
        """Every time that the host waited for the device, in order."""
        return self.order.waits

    def call(self, function: Any, args: Args, kwargs: Named) -> Any:
        """A function of torch, with tensors of either side."""
        with torch._C.DisableTorchFunctionSubclass():
            name, given = name_of(function), tensors((args, kwargs))
            if any(isinstance(part, DeviceTensor) for part in given):
                return self._with_device(function, name, args, kwargs, given)
            return self._with_host(function, name, args, kwargs, given)

    def launch(self, args: Any) -> list[Any]:
        """A kernel takes these: the same with the memory behind the device's tensors.

        Raises for memory of the host that is not pinned, which no device can read.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if self.order.graph is not None:
                raise RuntimeError("the stand-in's graphs note no kernels")
            given = tensors(args)
            if not all(isinstance(part, DeviceTensor) or self.transfers.pinned(part) for part in given):
                raise RuntimeError("a kernel was given a tensor that is neither on the device nor pinned")
            work = self.order.launch()
            for part in given:
                if isinstance(part, DeviceTensor):
                    self._check_order("kernel", part)
                    self._check_unread("kernel", part)
                    self._wrote(part, work)
            return [part.as_subclass(Tensor) if isinstance(part, DeviceTensor) else part for part in args]

    def _with_host(self, function: Any, name: str, args: Args, kwargs: Named, given: list[Tensor]) -> Any:
        """A function that was given no tensor of the device; it may make one."""
        kwargs = dict(kwargs)
        pin = name == "pin_memory" or bool(kwargs.pop("pin_memory", False))
        if name == "is_pinned":
            return self.transfers.pinned(given[0])
        if given and name in rules.MOVES:
            return self._moved(name, args, kwargs)
        away = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        if away:
            kwargs["device"] = HOST
        if rules.writes(name):
            self._check_arrived(name, given)
        result = given[0].clone() if name == "pin_memory" else function(*args, **kwargs)
        self._check_arrived(name, given, result)
        if pin:
            self.transfers.pin(result)
        if away:
            if name in rules.SENT:
                self._wait("sent", name)
            self._made(result, self.order.launch())
            result = _on_device(result)
            if self.order.graph is not None:
                self.order.graph.note(function, args, kwargs | {"device": CUDA}, result)
        return result

    def _with_device(self, function: Any, name: str, args: Args, kwargs: Named, given: list[Tensor]) -> Any:
        """A function that was given some tensor of the device."""
        if name in rules.REFUSED:
            raise TypeError(rules.REFUSED[name])
        here = bool(args) and isinstance(args[0], DeviceTensor)
        if here and name in _SAID:
            return _SAID[name]
        if name == "data_ptr":
            return Address(function(*args))
        if name == "__deepcopy__":
            return self._deep_copy(*args)
        if name == "_has_compatible_shallow_copy_type":
            return isinstance(args[0], DeviceTensor) and isinstance(args[1], DeviceTensor)
        if name in rules.MOVES:
            return self._moved(name, args, kwargs)
        if name == "copy_" and here != isinstance(args[1], DeviceTensor):
            self._copied(args[0], args[1], kwargs.get("non_blocking", args[2:] == (True,)))
            return args[0]
        if name == "__setitem__" and self._set_across(*args):
            return None
        self._check_sides(name, args, given)
        return self._computed(function, name, args, kwargs, given)

    def _computed(self, function: Any, name: str, args: Args, kwargs: Named, given: list[Tensor]) -> Any:
        device = kwargs.get("device")
        away = device is None or torch.device(device).type == "cuda"
        if device is not None and away:
            kwargs = kwargs | {"device": HOST}
        if rules.looks(name):
            return _on_device(function(*args, **kwargs))
        work = self.order.launch()
        writes = rules.writes(name)
        for part in given:
            if isinstance(part, DeviceTensor):
                self._check_order(name, part)
        if writes:
            self._check_unread(name, given[0])
        if rules.waits(name, args, kwargs):
            self._wait("read", name)
        before = {address(part) for part in given}
        if writes and self.order.graph is not None:
            self.order.graph.keep(given[0])
        result = rules.WIDER.get(name, function)(*args, **kwargs)
        for part in given:
            if isinstance(part, DeviceTensor):
                self._read.setdefault(address(part), {}).update(work)
        for part in tensors(result) if away else ():
            if address(part) not in before:
                self._made(part, work)
        if writes:
            self._wrote(given[0], work)
        if name in rules.LIKE_FIRST:
            away = isinstance(given[0], DeviceTensor)
        result = _on_device(result) if away else result
        if self.order.graph is not None and (
            writes or any(address(o) not in before for o in tensors(result))
        ):
            self.order.graph.note(function, args, kwargs, result)
        return result

    def _moved(self, name: str, args: Args, kwargs: Named) -> Any:
        """`to`, `cpu`, `cuda`."""
        tensor = args[0]
        here, (device, dtype, non_blocking) = isinstance(tensor, DeviceTensor), _target(name, args, kwargs)
        if device is None or device.type == ("cuda" if here else "cpu"):
            options = {key: kwargs[key] for key in ("copy", "memory_format") if key in kwargs}

            def cast(own: Tensor) -> Tensor:
                return own.to(dtype=dtype or own.dtype, **options)

            return self._computed(cast, "to", (tensor,), {}, [tensor]) if here else cast(tensor)
        if device.type not in ("cpu", "cuda"):
            return tensor.to(device, dtype)
        moved = torch.empty_like(tensor.as_subclass(Tensor), dtype=dtype)
        if here and non_blocking:
            self.transfers.pin(moved)  # as torch does
        if not here:
            self._made(moved, {})
            moved = moved.as_subclass(DeviceTensor)
        self._copied(moved, tensor, non_blocking)
        return moved

    def _copied(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        """From one side to the other."""
        sent = isinstance(target, DeviceTensor)
        self._check_order("copy", target if sent else source)
        if sent:
            self._check_unread("copy", target)
        plain = target.as_subclass(Tensor), source.as_subclass(Tensor)
        work = self.transfers.copy(*plain, non_blocking, sent)
        if sent:
            self._wrote(target, work)
        else:
            self._read.setdefault(address(source), {}).update(work)

    def _set_across(self, target: Tensor, places: Any, value: Any) -> bool:
        """`target[places] = value` as a copy from the other side, where torch makes it one."""
        if tensors(places) or not isinstance(value, Tensor):
            return False
        here = isinstance(target, DeviceTensor)
        if here == isinstance(value, DeviceTensor) or (here and value.ndim == 0):
            return False
        part = target.as_subclass(Tensor)[places]
        self._copied(part.as_subclass(DeviceTensor) if here else part, value.expand_as(part), False)
        return True

    def _deep_copy(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        copy = tensor.detach().clone().as_subclass(DeviceTensor).requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            copy._is_param = True
        self._made(copy, self.order.launch())
        memo[id(tensor)] = copy
        return copy

    def _check_sides(self, name: str, args: Args, given: list[Tensor]) -> None:
        """Raises where torch would; places may lie on the host, which sends them."""
        places: list[Tensor] = []
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], DeviceTensor):
            places = [part for part in tensors(args[1]) if not isinstance(part, DeviceTensor)]
            given = [args[0], *tensors(args[2:])]
        others = [part for part in given if not isinstance(part, DeviceTensor) and part.device == HOST]
        if any(part.ndim or name in rules.JOINS for part in others):
            raise RuntimeError(f"{name}: expected all tensors on the same device, but found cuda:0 and cpu")
        if any(part.ndim for part in places):
            self._wait("sent", name)

    def _check_order(self, name: str, part: Tensor) -> None:
        stream = self.order.current
        by, count = self._written.get(address(part), (stream, 0))
        if stream.seen.get(by, 0) < count:
            raise RuntimeError(f"{name}: touches what another stream writes, without having waited for it")

    def _check_unread(self, name: str, part: Tensor) -> None:
        if part.numel() and not done(self.order.current.seen, self._read.get(address(part), {})):
            raise RuntimeError(f"{name}: writes what another stream still reads, without having waited")

    def _check_arrived(self, name: str, given: list[Tensor], views: Any = ()) -> None:
        if rules.looks(name):
            return
        views = {address(part) for part in tensors(views)}
        for part in given:
            if address(part) not in views:
                self.transfers.check_arrived(name, part)

    def _made(self, part: Tensor, work: Seen) -> None:
        """Memory that nobody had; where another tensor's lay before, that one is of no more interest."""
        self._written.pop(address(part), None)
        self.memory.take(part)
        self._wrote(part, work)

    def _wrote(self, part: Tensor, work: Seen) -> None:
        self._read.pop(address(part), None)
        for own in work.items():
            self._written[address(part)] = own

    def _wait(self, kind: str, name: str) -> None:
        self.order.wait(kind, name, self.order.current.seen)


_SAID = {".device": CUDA, ".is_cuda": True, ".is_cpu": False, "get_device": 0, "is_pinned": False}


def _target(name: str, args: Args, kwargs: Named) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """Where `to`, `cpu` and `cuda` bring a tensor, as what, and whether the host goes on meanwhile."""
    non_blocking = bool(kwargs.get("non_blocking", False))
    if name != "to":
        return (HOST if name == "cpu" else CUDA), None, non_blocking
    for other in (*args[1:], *kwargs.values()):
        if isinstance(other, Tensor):
            return (CUDA if isinstance(other, DeviceTensor) else other.device), other.dtype, non_blocking
    options = {key: own for key, own in kwargs.items() if key != "copy"}
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args[1:], **options)
    return device, dtype, non_blocking


def _on_device(result: Any) -> Any:
    """What a function made of the device's memory, as tensors of the device."""
    if isinstance(result, Tensor):
        plain = type(result) is Tensor and result.device == HOST
        return result.as_subclass(DeviceTensor) if plain else result
    if isinstance(result, list):
        return [_on_device(part) for part in result]
    if not isinstance(result, tuple) or not tensors(result):
        return result
    parts = [_on_device(part) for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
