"""llama.cpp's state of a sequence, as a file: `read` what it saved of a few tokens, `write` one of many.

A context that is full without its tokens having been run: keys and values of any origin are written in the
layout that `llama_state_seq_save_file` showed, and `llama_state_seq_load_file` takes them. Little-endian:
magic, version, a count of token ids and the ids; the number of streams (1) and of cells; for each cell its
position, the number of its sequences (1) and which (0); whether values are transposed, the number of layers;
then for each layer the keys (type, bytes of a row as 64 bits, rows) and for each layer the values, likewise,
or transposed: type, bytes of a number, channels, and for each channel the numbers of all cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint16]
"""Keys or values of a layer, `[cells, channels]`: numbers of 16 bits, whatever their type."""


@dataclass(frozen=True)
class Form:
    """What a state says of itself besides its cells. `key_type`, `value_type`: numbers of ggml's types."""

    magic: int
    version: int
    layers: int
    channels: int
    transposed: bool
    key_type: int
    value_type: int


@dataclass(frozen=True)
class State:
    """A form, the positions of the cells, and the keys and values of each layer."""

    form: Form
    positions: npt.NDArray[np.int32]
    keys: list[Rows]
    values: list[Rows]


def read(path: Path) -> State:
    """The state that llama.cpp saved; ValueError where its layout is none that this file knows."""
    with open(path, "rb") as file:
        magic, version, ids = _words(file, 3)
        _words(file, ids)
        streams, cells = _words(file, 2)
        meta = np.asarray(_words(file, 3 * cells), np.int32).reshape(cells, 3)
        _check(streams == 1 and (meta[:, 1:] == (1, 0)).all(), "it is not of one sequence in one stream")
        transposed, layers = _words(file, 2)
        _check(transposed in (0, 1), "it does not say whether values are transposed")
        keys = [_rows(file, cells) for _ in range(layers)]
        values = [_columns(file, cells) if transposed else _rows(file, cells) for _ in range(layers)]
        _check(not file.read(1), "something follows the values")
    kinds = {(key[0], value[0]) for key, value in zip(keys, values, strict=True)}
    widths = {own.shape[1] for _, own in (*keys, *values)}
    _check(len(kinds) == len(widths) == 1, "its layers differ")
    form = Form(magic, version, layers, widths.pop(), bool(transposed), *kinds.pop())
    return State(form, meta[:, 0], [own for _, own in keys], [own for _, own in values])


def write(path: Path, form: Form, cells: int, rows: Callable[[str, int], Rows]) -> None:
    """Cells at the positions from 0 on. `rows("keys" or "values", layer)` gives those of a layer, one layer
    at a time, for a whole context is larger than what should be held.
    """
    meta = np.zeros((cells, 3), "<i4")
    meta[:, 0], meta[:, 1] = np.arange(cells), 1
    with open(path, "wb") as file:
        _put(file, "<u4", form.magic, form.version, 0, 1, cells)
        file.write(meta.data)
        _put(file, "<u4", form.transposed, form.layers)
        for kind, number in (("keys", form.key_type), ("values", form.value_type)):
            for layer in range(form.layers):
                own = rows(kind, layer)
                assert own.shape == (cells, form.channels), f"{own.shape} {kind}"
                assert own.dtype.itemsize == 2, "numbers have 16 bits"
                _put(file, "<i4", number)
                if kind == "values" and form.transposed:
                    _put(file, "<u4", 2, form.channels)
                    own = np.ascontiguousarray(own.T)
                else:
                    _put(file, "<u8", 2 * form.channels)
                file.write(np.ascontiguousarray(own).view(np.uint16).data)


def _words(file: IO[bytes], count: int) -> list[int]:
    return [int(word) for word in _exactly(file, "<u4", count)]


def _put(file: IO[bytes], dtype: str, *numbers: int) -> None:
    file.write(np.array(numbers, dtype).tobytes())


def _rows(file: IO[bytes], cells: int) -> tuple[int, Rows]:
    (kind,), (row,) = _words(file, 1), _exactly(file, "<u8", 1)
    _check(0 < row < 1 << 20 and row % 2 == 0, f"a row has {row} bytes")
    return kind, _exactly(file, "<u2", cells * int(row) // 2).reshape(cells, -1)


def _columns(file: IO[bytes], cells: int) -> tuple[int, Rows]:
    kind, each, channels = _words(file, 3)
    _check(each == 2, f"a number has {each} bytes")
    return kind, _exactly(file, "<u2", cells * channels).reshape(channels, cells).T


def _exactly(file: IO[bytes], dtype: str, count: int) -> npt.NDArray[np.uint64]:
    wanted = count * np.dtype(dtype).itemsize
    found = file.read(wanted)
    _check(len(found) == wanted, "it ends too early")
    return np.frombuffer(found, dtype)


def _check(known: bool, otherwise: str) -> None:
    if not known:
        raise ValueError(f"llama.cpp's state has a layout that is not known: {otherwise}")
