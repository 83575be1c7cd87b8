"""Arrays in one file: whole numbers that tell their sizes, then each array from a multiple of 64 bytes on."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Layout = Mapping[str, tuple[Any, tuple[int, ...]]]
"""The dtype and the shape of each array, by name."""

_ALIGNMENT = 64


@dataclass(frozen=True)
class Mapped:
    """A file that is mapped into memory: the system ends whoever reads beyond the end of one that was cut."""

    file: str
    device: int
    inode: int
    size: int

    @classmethod
    def of(cls, file: str) -> Mapped:
        """The file as it is now."""
        about = os.stat(file)
        return cls(file, about.st_dev, about.st_ino, about.st_size)

    @property
    def shrank(self) -> bool:
        """Whether it has been cut since; one that was replaced stays whole for those who have mapped it."""
        try:
            now = os.stat(self.file)
        except FileNotFoundError:
            return False
        return (now.st_dev, now.st_ino) == (self.device, self.inode) and now.st_size < self.size


def aligned(array: Array) -> Array:
    """The array itself, or a copy of it that is contiguous and begins at a multiple of 64 bytes: a row that
    begins within a line of the cache lies in one line more.
    """
    if array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT == 0:
        return array
    room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    own: Array = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    own[...] = array
    return own


def write(file: str, numbers: Sequence[int], arrays: Iterable[Array]) -> None:
    """Write `numbers` (int64, eight at most) and `arrays` to a new file."""
    with open(file, "wb") as out:
        for part in (np.array(numbers, np.int64), *arrays):
            out.write(np.ascontiguousarray(part).data)
            out.write(bytes(-out.tell() % _ALIGNMENT))


def read(
    file: str, count: int, layout: Callable[[Sequence[int]], Layout]
) -> tuple[list[int], dict[str, Array]]:
    """The `count` numbers of a file, and its arrays, mapped for reading.

    `layout(numbers)` says what arrays there are, and raises RuntimeError for numbers that cannot be. So does
    this where the file has not exactly their size: nothing is mapped or allocated by a number alone.
    """
    size = os.path.getsize(file)
    numbers = np.fromfile(file, np.int64, count).tolist() if size >= _ALIGNMENT else [0] * count
    found = layout(numbers)
    sizes = {name: prod(shape) * np.dtype(dtype).itemsize for name, (dtype, shape) in found.items()}
    if min(numbers) < 0 or size != _ALIGNMENT + sum(map(_rounded, sizes.values())):
        raise RuntimeError("its size is not that of its arrays")
    raw = _mapped(file)
    arrays, start = {}, _ALIGNMENT
    for name, (dtype, shape) in found.items():
        arrays[name] = np.asarray(raw[start : start + sizes[name]]).view(dtype).reshape(shape)
        start += _rounded(sizes[name])
    return numbers, arrays


def _mapped(file: str) -> npt.NDArray[np.uint8]:
    """The bytes of a file, mapped. The system begins to read them in order: a first search asks for much of
    them, here and there, and would wait for each place.
    """
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(mapped, np.uint8)


def _rounded(size: int) -> int:
    return size + -size % _ALIGNMENT
