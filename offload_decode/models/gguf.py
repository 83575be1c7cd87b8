"""The header of a GGUF file, read before a library reads the file: bounded, of one piece, of sane sizes.

The form is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from offload_decode.common.errors import ModelError
from offload_decode.common.files import NotPlain, open_plain
from offload_decode.models.tokenizer_trial import MOST_TOKENS

SUFFIX = ".gguf"
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_PAIRS, _MOST_TENSORS = 1 << 16, 1 << 20
_MOST_TEXT, _MOST_LISTED, _MOST_BYTES = 1 << 26, 1 << 24, 1 << 29  # of a text, a list, all that is said
_ALIGNMENT, _MOST_ALIGNMENT, _MOST_NUMBERS = 32, 1 << 20, 1 << 40
_HEADS = ("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length")
_MOST_SIZE = {"block_count": 512, "embedding_length": 1 << 20, "vocab_size": 1 << 26}
_MOST_SIZE |= dict.fromkeys(["feed_forward_length", "expert_feed_forward_length"], 1 << 22)
_MOST_SIZE["ggml.tokens"] = MOST_TOKENS  # how many there are
_MOST_SIZE |= dict.fromkeys([*_HEADS, "expert_count", "expert_used_count"], 1 << 14)


class StoredTensor(NamedTuple):
    """A tensor of a file: ggml's type, its shape as torch counts, rows first, and where its bytes begin."""

    kind: int
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself, by key (of lists of texts only how many there are), and its tensors."""

    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> Header:
    """The header of a file. `ModelError` where it is no GGUF, one piece of several, cut off, or of absurd
    sizes.
    """
    try:
        with os.fdopen(open_plain(path, follow=True), "rb") as file:
            reader = _Reader(file, path.stat().st_size)
            fields = reader.pairs()
            _check_sizes(fields)
            header = Header(fields, reader.tensors(fields.get("general.alignment", _ALIGNMENT)))
    except (NotPlain, ValueError, struct.error) as error:
        raise ModelError(f"{path} cannot be read as GGUF, because {error}: fetch it again") from error
    if (pieces := fields.get("split.count", 1)) not in (0, 1):
        raise ModelError(
            f"{path} is one of {pieces!s:.40} pieces: join them with llama-gguf-split --merge, and give the "
            "whole"
        )
    return header


class _Reader:
    """Reads from the start of a file on; ValueError where it says more than it holds."""

    def __init__(self, file: Any, size: int) -> None:
        self.file, self.size, self.left = file, size, min(size, _MOST_BYTES)

    def pairs(self) -> dict[str, Any]:
        """What the file says of itself; of lists of texts only how many there are."""
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin like one")
        version, self.count, pairs = self._unpack("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"it is of version {version}, and 2 and 3 are read")
        if pairs > _MOST_PAIRS or self.count > _MOST_TENSORS:
            raise ValueError("it says that it holds too many entries")
        return {self._text(): self._value(self._unpack("<I")[0]) for _ in range(pairs)}

    def tensors(self, alignment: Any) -> dict[str, StoredTensor]:
        """By name; their bytes begin at the next multiple of `alignment` behind the header."""
        if type(alignment) is not int or not 0 < alignment <= _MOST_ALIGNMENT:
            raise ValueError(f"its alignment is {alignment!s:.40}")
        stated: list[tuple[str, int, tuple[int, ...], int]] = []
        for _ in range(self.count):
            name = self._text()
            (dimensions,) = self._unpack("<I")
            if dimensions > 4:
                raise ValueError("a tensor has more than four dimensions")
            *sizes, kind, offset = self._unpack(f"<{dimensions}QIQ")
            if math.prod(sizes) > _MOST_NUMBERS or offset >= self.size:
                raise ValueError("it is cut off")
            stated.append((name, kind, tuple(reversed(sizes)), offset))
        start = -(-self.file.tell() // alignment) * alignment
        return {name: StoredTensor(kind, shape, start + offset) for name, kind, shape, offset in stated}

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._unpack(f"<{_NUMBERS[kind]}")[0]
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"it holds a value of the unknown type {kind}")
        inner, count = self._unpack("<IQ")
        if count > _MOST_LISTED:
            raise ValueError("it holds a list that is too long")
        if inner in _NUMBERS:
            return list(self._unpack(f"<{count}{_NUMBERS[inner]}"))
        if inner != _STRING:
            raise ValueError(f"it holds a list of the unknown type {inner}")
        for _ in range(count):
            self._take(self._unpack("<Q")[0])
        return count

    def _text(self) -> str:
        (length,) = self._unpack("<Q")
        if length > _MOST_TEXT:
            raise ValueError("it holds a text that is too long")
        return self._take(length).decode("utf-8", "replace")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, count: int) -> bytes:
        if count > self.left:
            raise ValueError("it is cut off, or says too much of itself")
        self.left -= count
        taken: bytes = self.file.read(count)
        if len(taken) < count:
            raise ValueError("it is cut off")
        return taken


def _check_sizes(fields: dict[str, Any]) -> None:
    """Beyond these a model could not even be outlined: see `checkpoint`."""
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError("it names no architecture")
    # Of any architecture: libraries read the sizes of others that the file names too.
    for key, found in fields.items():
        name = key.partition(".")[2]
        if name not in _MOST_SIZE:
            continue
        most = _MOST_SIZE[name]
        for value in found if isinstance(found, list) else [found]:
            if type(value) is not int or not 0 <= value <= most:
                raise ValueError(f"its {name} is {value!s:.40}, and that is a whole number up to {most:,}")
