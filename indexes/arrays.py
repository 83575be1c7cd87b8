"""Arrays in the file of an index: written after each other, and mapped for reading.

An index that was extended from another one begins with that one's arrays. Where both stay, their bytes are
not written again: `FILE.base0`, `FILE.base1` and so on are hard links to the files that have them, and an
array is mapped as one, a part of a file after another.
"""

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offload_decode.common.mapping import map_over, reserve

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Layout = Mapping[str, tuple[Any, tuple[int, ...]]]
"""The dtype and the shape of each array, by name."""

ALIGNMENT = 64
_PAGE = 4096
"""Bytes: what is shared of an array ends on such a page of its file, and the rest begins on one."""
_LEAST = 4 * _PAGE  # less is written again: of parts that are mapped a process may have some 65,530
_MOST_BASES = 32
_NUMBERS = 8  # of the header; the last is the number of bases


class Part(NamedTuple):
    """Bytes of an array that lie in a file."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Mapped:
    """Arrays that are mapped from `files`, the bases first, with the parts of each: the system ends whoever
    reads beyond the end of a file that was cut.
    """

    files: Mapping[str, os.stat_result]
    arrays: Mapping[str, Array]
    parts: Mapping[str, Sequence[Part]]

    @property
    def shrunk(self) -> str | None:
        """A file that was cut since; one that was replaced stays whole for those who have mapped it."""
        for file, then in self.files.items():
            try:
                now = os.stat(file)
            except FileNotFoundError:
                continue
            if os.path.samestat(now, then) and now.st_size < then.st_size:
                return file
        return None

    def bases(self, stays: bool) -> list[str]:
        """The files that another index may share: without its own, unless it `stays`."""
        return [*self.files] if stays else [*self.files][:-1]

    def beginning(self, name: str, array: Array, bases: Sequence[str]) -> list[Part]:
        """The parts of these files with which an array begins as the one of that name does: not all of it
        where it ends within a page, and nothing where that is little.
        """
        found = []
        for file, start, length in self.parts.get(name, ()):
            whole = (start + length) // _PAGE * _PAGE - start
            if file not in bases or whole <= 0:
                break
            found.append(Part(file, start, whole))
            if whole < length:
                break
        size = _length(found)
        same = size <= array.nbytes and np.array_equal(_bytes(array)[:size], _bytes(self.arrays[name])[:size])
        return found if same and size >= _LEAST else []


def write(
    file: str,
    numbers: Sequence[int],
    arrays: Mapping[str, Array],
    earlier: Mapped | None = None,
    stays: bool = True,
) -> dict[str, os.stat_result]:
    """Write `numbers` (int64, seven at most), which tell the sizes, and `arrays`, each padded to 64 bytes,
    without what the files of an `earlier` index have of them; returns these files, as they were when they
    were mapped. Unless that index `stays`, its own file is none of them.
    """
    bases = earlier.bases(stays)[:_MOST_BASES] if earlier else []
    shared = {name: earlier.beginning(name, each, bases) if earlier else [] for name, each in arrays.items()}
    bases = [base for base in bases if any(part.file == base for parts in shared.values() for part in parts)]
    header = np.zeros(_NUMBERS, np.int64)
    header[: len(numbers)], header[-1] = numbers, len(bases)
    table = np.zeros((len(arrays), len(bases), 2), np.int64)
    for place, parts in enumerate(shared.values()):
        for part in parts:
            table[place, bases.index(part.file)] = part[1:]
    with open(file, "wb") as out:
        out.write(header.data)
        out.write(table.data)
        for name, array in arrays.items():
            out.write(bytes(-out.tell() % (_PAGE if shared[name] else ALIGNMENT)))
            out.write(_bytes(array)[_length(shared[name]) :].data)
        out.write(bytes(-out.tell() % ALIGNMENT))
    return {base: earlier.files[base] for base in bases} if earlier else {}


def base_path(file: str | os.PathLike[str], number: int) -> str:
    """Where the link to the file of a base lies."""
    return f"{os.fspath(file)}.base{number}"


def read(file: str, count: int, layout: Callable[[Sequence[int]], Layout]) -> tuple[list[int], Mapped]:
    """The `count` numbers of a file, and its arrays, mapped for reading.

    `layout(numbers)` says what arrays there are, and raises RuntimeError for numbers that cannot be. So does
    this where the files have not exactly their size: nothing is mapped or allocated by a number alone.
    """
    size = os.path.getsize(file)
    header = np.fromfile(file, np.int64, _NUMBERS).tolist() if size >= ALIGNMENT else [0] * _NUMBERS
    numbers, count_of_bases = header[:count], header[-1]
    found = layout(numbers)
    sizes = {name: prod(shape) * np.dtype(dtype).itemsize for name, (dtype, shape) in found.items()}
    entries = 2 * len(found) * count_of_bases
    if min(numbers) < 0 or not 0 <= count_of_bases <= _MOST_BASES or size < ALIGNMENT + 8 * entries:
        raise RuntimeError("its size is not that of its arrays")
    table = np.fromfile(file, np.int64, entries, offset=ALIGNMENT).reshape(len(found), count_of_bases, 2)
    names = [*(base_path(file, number) for number in range(count_of_bases)), file]
    seen = {name: os.stat(name) for name in names}
    parts, end = {}, ALIGNMENT + 8 * entries
    for (name, length), row in zip(sizes.items(), table.tolist(), strict=True):
        shared = [Part(base, *place) for base, place in zip(names, row, strict=False) if any(place)]
        if not all(_is_shared(part, seen[part.file].st_size) for part in shared) or not all(
            part.start % _PAGE == 0 for part in shared[1:]
        ):
            raise RuntimeError("what it shares is not in the files that it shares")
        start = end + -end % (_PAGE if shared else ALIGNMENT)
        parts[name] = [*shared, Part(file, start, length - _length(shared))]
        end = start + parts[name][-1].length
        if end < start:
            raise RuntimeError("it shares more than its arrays have")
    if size != end + -end % ALIGNMENT:
        raise RuntimeError("its size is not that of its arrays")
    raw = {name: _mapped(name) for name in names[-1:]}
    arrays = {}
    for name, (dtype, shape) in found.items():
        whole = _joined(parts[name]) if len(parts[name]) > 1 else _of(raw[file], parts[name][0])
        arrays[name] = np.asarray(whole).view(dtype).reshape(shape)
    return numbers, Mapped(seen, arrays, parts)


def _is_shared(part: Part, size: int) -> bool:
    """Whether a part lies in a file of this size, is aligned, and ends on a page."""
    fits = part.start >= 0 and 0 < part.length <= size - part.start
    return fits and part.start % ALIGNMENT == 0 and (part.start + part.length) % _PAGE == 0


def _joined(parts: Sequence[Part]) -> Bytes:
    """Parts of files as one array: mapped, or read where pages of memory are larger than those of files."""
    if mmap.PAGESIZE > _PAGE:
        return np.concatenate([np.fromfile(file, np.uint8, length, offset=at) for file, at, length in parts])
    first = parts[0].start % _PAGE
    reserved, view = reserve(first + _length(parts))
    address = view.ctypes.data
    for file, start, length in parts:
        ahead = start % _PAGE  # of the first one alone
        if length:
            with open(file, "rb") as opened:
                map_over(address, opened.fileno(), start - ahead, ahead + length)
        address += ahead + length
    reserved.madvise(mmap.MADV_WILLNEED)
    return view[first:]


def _of(raw: Bytes, part: Part) -> Bytes:
    return raw[part.start : part.start + part.length]


def _mapped(file: str) -> Bytes:
    """The bytes of a file, mapped, which the system begins to read at once: a first search asks for many."""
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(mapped, np.uint8)


def _bytes(array: Array) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _length(parts: Sequence[Part]) -> int:
    return sum(part.length for part in parts)
