"""What local and recurrent layers keep while their store is being written: the newest KV, and the states.

Files are never changed once they are committed, so a killed process cannot have spoilt them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import numpy as np

from offload_decode.common.errors import StoreDamaged
from offload_decode.store.files import check_sizes, open_regular
from offload_decode.store.format import Array, Manifest, numpy_dtype
from offload_decode.store.staging import Segment
from offload_decode.store.streams import as_bytes
from offload_decode.types import StateShape


class _Log:
    """The files of one layer in a folder."""

    def __init__(self, folder: Path, layer: int) -> None:
        self._folder, self._layer = folder, layer
        self._written: set[Path] = set()

    def take_written(self) -> set[Path]:
        """The files that were made since this was last asked."""
        written, self._written = self._written, set()
        return written

    def _write(self, file: Path, data: bytes | memoryview) -> None:
        file.unlink(missing_ok=True)  # a killed process may have begun it
        with open(file, "xb") as out:
            out.write(data)
        self._written.add(file)

    def _read(self, file: Path) -> bytes:
        with os.fdopen(open_regular(file), "rb") as opened:
            return opened.read()

    def _holds(self, file: Path, size: int, crc: int) -> bool:
        """Whether the file has this size and checksum."""
        try:
            check_sizes([(str(file), size)])
            return zlib.crc32(self._read(file)) == crc
        except StoreDamaged:
            return False


class StateLog(_Log):
    """The states of one recurrent layer after the tokens so far, and at the last chunk boundary: a file a
    commit, earlier ones removed.
    """

    def __init__(self, folder: Path, layer: int, shapes: Sequence[StateShape]) -> None:
        super().__init__(folder, layer)
        self.segment: Segment | None = None
        self.at_seam: Segment | None = None
        self._shapes = tuple(shapes)
        self._sizes = [prod(own.shape) * numpy_dtype(own.dtype).itemsize for own in shapes]  # bytes

    @property
    def rows(self) -> int:
        """Tokens that the states are after."""
        return self.segment.stop if self.segment else 0

    def restore(self, segment: Segment | None, at_seam: Segment | None) -> bool:
        """Continue after `segment`, if the files are what the checksums say."""
        self.segment, self.at_seam = segment, at_seam
        size = sum(self._sizes)
        return all(self._holds(self._file(own.stop), size, own.crc) for own in (segment, at_seam) if own)

    def keep(self) -> None:
        """These are the states at the last chunk boundary."""
        self.at_seam = self.segment

    def put(self, stop: int, states: Sequence[Array]) -> None:
        """The states after the first `stop` tokens, in the order and of the shapes of the layer."""
        for given, wanted in zip(states, self._shapes, strict=True):
            assert (given.shape, given.dtype) == (wanted.shape, numpy_dtype(wanted.dtype)), (
                f"layer {self._layer}: {given.shape} {given.dtype} for its {wanted.name}"
            )
        data = b"".join(as_bytes(state) for state in states)
        self._write(self._file(stop), data)
        self.segment = Segment(0, stop, zlib.crc32(data))

    def states(self, at_seam: bool = False) -> tuple[Array, ...] | None:
        """The states, as copies; None before the first token, or before the last chunk boundary."""
        segment = self.at_seam if at_seam else self.segment
        if segment is None:
            return None
        data = np.frombuffer(self._read(self._file(segment.stop)), np.uint8)
        parts = np.split(data, list(accumulate(self._sizes))[:-1])
        return tuple(
            part.copy().view(numpy_dtype(own.dtype)).reshape(own.shape)
            for part, own in zip(parts, self._shapes, strict=True)
        )

    def trim(self) -> None:
        """Remove the files of earlier commits, and of an unfinished one."""
        kept = [self._file(own.stop) for own in (self.segment, self.at_seam) if own]
        for file in self._folder.glob(f"state-{self._layer:03d}-*"):
            if file not in kept:
                file.unlink(missing_ok=True)

    def _file(self, stop: int) -> Path:
        return self._folder / f"state-{self._layer:03d}-{stop}"


class WindowLog(_Log):
    """The newest KV of one local layer: a file an append, removed once the window has moved past it."""

    def __init__(self, folder: Path, layer: int, manifest: Manifest) -> None:
        super().__init__(folder, layer)
        self.segments: list[Segment] = []
        self._shape, self._dtype = manifest.shape.layers[layer], manifest.numpy_dtype
        self._window = manifest.kept_window(self._shape)
        self._width = self._shape.key_dim + self._shape.value_dim

    @property
    def rows(self) -> int:
        """Tokens appended so far."""
        return self.segments[-1].stop if self.segments else 0

    def restore(self, segments: list[Segment]) -> bool:
        """Continue after `segments`, if they follow each other and their files are what the checksums say."""
        self.segments = segments
        if any(one.stop != other.start for one, other in pairwise(segments)):
            return False
        token = self._shape.kv_heads * self._width * self._dtype.itemsize  # bytes
        return all(
            own.start < own.stop and self._holds(self._file(own), (own.stop - own.start) * token, own.crc)
            for own in segments
        )

    def append(self, keys: Array, values: Array, start: int | None = None) -> None:
        """Append keys `[heads, T, Dk]` and values `[heads, T, Dv]`; the first may begin at any token."""
        own, block = self._shape, np.concatenate([keys, values], axis=2)
        assert (len(keys), keys.shape[2], values.shape[2]) == (own.kv_heads, own.key_dim, own.value_dim), (
            f"layer {self._layer}: {keys.shape} and {values.shape} for its window"
        )
        assert block.dtype == self._dtype, f"layer {self._layer}: {block.dtype} for {self._dtype}"
        data = as_bytes(block)
        start = self.rows if start is None else start
        segment = Segment(start, start + keys.shape[1], zlib.crc32(data))
        self._write(self._file(segment), data)
        self.segments.append(segment)

    def window(self) -> tuple[Array, Array]:
        """Keys and values `[heads, min(window, rows), …]` of the last tokens, as copies."""
        shape = (self._shape.kv_heads, -1, self._width)
        blocks = [
            np.frombuffer(self._read(self._file(own)), self._dtype).reshape(shape) for own in self.live()
        ]
        empty = np.empty((self._shape.kv_heads, 0, self._width), self._dtype)
        rows = np.concatenate([empty, *blocks], axis=1)[:, -self._window :]
        keys, values = np.split(rows, [self._shape.key_dim], axis=2)
        return keys.copy(), values.copy()

    def live(self) -> list[Segment]:
        """The segments that the window reaches into."""
        return [segment for segment in self.segments if segment.stop > self.rows - self._window]

    def trim(self) -> None:
        """Remove the files that the window has moved past."""
        live = self.live()
        for segment in self.segments[: len(self.segments) - len(live)]:
            self._file(segment).unlink(missing_ok=True)
        self.segments = live

    def _file(self, segment: Segment) -> Path:
        return self._folder / f"{self._layer:03d}-{segment.start}-{segment.stop}"
