"""What a recurrent layer keeps while its store is being written: its states after the last commit."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from offload_decode.common.errors import StoreDamaged
from offload_decode.store.files import check_sizes, open_regular
from offload_decode.store.format import Array, numpy_dtype
from offload_decode.store.staging import Segment
from offload_decode.store.streams import as_bytes
from offload_decode.types import LayerShape, StateShape


class StateLog:
    """The states of one layer after the tokens so far, and at the seam: a file a commit, the others removed.

    Files are never changed once they are committed, so a killed process cannot have spoilt them.
    """

    def __init__(self, folder: Path, layer: int, shapes: Sequence[StateShape]) -> None:
        self.segment: Segment | None = None
        self.at_seam: Segment | None = None
        self._folder, self._layer, self._shapes = folder, layer, tuple(shapes)
        self._written: set[Path] = set()

    @property
    def rows(self) -> int:
        """Tokens that the states are after."""
        return self.segment.stop if self.segment else 0

    def restore(self, segment: Segment | None, at_seam: Segment | None) -> bool:
        """Go on after `segment`, if the files are what the checksums say."""
        self.segment, self.at_seam = segment, at_seam
        return all(self._holds(own) for own in (segment, at_seam) if own)

    def keep(self) -> None:
        """These are the states at the seam."""
        self.at_seam = self.segment

    def put(self, stop: int, states: Sequence[Array]) -> None:
        """The states after the first `stop` tokens, in the order and of the shapes of the layer."""
        for given, wanted in zip(states, self._shapes, strict=True):
            assert (given.shape, given.dtype) == (wanted.shape, numpy_dtype(wanted.dtype)), (
                f"layer {self._layer}: {given.shape} {given.dtype} for its {wanted.name}"
            )
        data = b"".join(as_bytes(state) for state in states)
        file = self._file(stop)
        file.unlink(missing_ok=True)  # a killed process may have begun this commit
        with open(file, "xb") as out:
            out.write(data)
        self._written.add(file)
        self.segment = Segment(0, stop, zlib.crc32(data))

    def take_written(self) -> set[Path]:
        """The files that were made since this was last asked."""
        written, self._written = self._written, set()
        return written

    def states(self, at_seam: bool = False) -> tuple[Array, ...] | None:
        """The states, as copies; None before the first token, or before the seam."""
        segment = self.at_seam if at_seam else self.segment
        if segment is None:
            return None
        data = np.frombuffer(self._bytes(segment), np.uint8)
        parts = np.split(data, list(accumulate(self._sizes))[:-1])
        return tuple(
            part.copy().view(numpy_dtype(own.dtype)).reshape(own.shape)
            for part, own in zip(parts, self._shapes, strict=True)
        )

    def trim(self) -> None:
        """Remove the files of earlier commits, and of one that was begun and not made."""
        kept = [self._file(own.stop) for own in (self.segment, self.at_seam) if own]
        for file in self._folder.glob(f"state-{self._layer:03d}-*"):
            if file not in kept:
                file.unlink(missing_ok=True)

    @property
    def _sizes(self) -> list[int]:
        """Bytes of each state."""
        return [prod(own.shape) * numpy_dtype(own.dtype).itemsize for own in self._shapes]

    def _holds(self, segment: Segment) -> bool:
        try:
            check_sizes([(str(self._file(segment.stop)), sum(self._sizes))])
            return zlib.crc32(self._bytes(segment)) == segment.crc
        except StoreDamaged:
            return False

    def _bytes(self, segment: Segment) -> bytes:
        with os.fdopen(open_regular(self._file(segment.stop)), "rb") as file:
            return file.read()

    def _file(self, stop: int) -> Path:
        return self._folder / f"state-{self._layer:03d}-{stop}"


# What a local layer keeps while its store is being written: the newest KV and no more.


class WindowLog:
    """The newest KV of one sliding layer: a file an append, removed once the window has moved past it.

    Files are never changed once they are committed, so a killed process cannot have spoilt them.
    """

    def __init__(
        self, folder: Path, layer: int, window: int, shape: LayerShape, dtype: np.dtype[Any]
    ) -> None:
        self.segments: list[Segment] = []
        self._folder, self._layer, self._window = folder, layer, window
        self._shape, self._dtype = shape, dtype
        self._written: set[Path] = set()

    @property
    def rows(self) -> int:
        """Tokens appended so far."""
        return self.segments[-1].stop if self.segments else 0

    def restore(self, segments: list[Segment]) -> bool:
        """Go on after `segments`, if they follow each other and their files are what the checksums say."""
        self.segments = segments
        if any(one.stop != other.start for one, other in pairwise(segments)):
            return False
        return all(own.start < own.stop and self._holds(own) for own in segments)

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
        file = self._file(segment)
        file.unlink(missing_ok=True)  # a killed process may have begun it
        with open(file, "xb") as out:
            out.write(data)
        self._written.add(file)
        self.segments.append(segment)

    def take_written(self) -> set[Path]:
        """The files that were made since this was last asked."""
        written, self._written = self._written, set()
        return written

    def window(self) -> tuple[Array, Array]:
        """Keys and values `[heads, min(window, rows), …]` of the last tokens, as copies."""
        blocks = [self._read(segment) for segment in self.segments if segment.stop > self.rows - self._window]
        own = self._shape
        empty = np.empty((own.kv_heads, 0, own.key_dim + own.value_dim), self._dtype)
        rows = np.concatenate([empty, *blocks], axis=1)[:, -self._window :]
        keys, values = np.split(rows, [own.key_dim], axis=2)
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

    def _holds(self, segment: Segment) -> bool:
        own, rows = self._shape, segment.stop - segment.start
        size = own.kv_heads * rows * (own.key_dim + own.value_dim) * self._dtype.itemsize
        file = self._file(segment)
        try:
            check_sizes([(str(file), size)])
        except StoreDamaged:
            return False
        with os.fdopen(open_regular(file), "rb") as opened:
            return zlib.crc32(opened.read()) == segment.crc

    def _read(self, segment: Segment) -> Array:
        with os.fdopen(open_regular(self._file(segment)), "rb") as file:
            width = self._shape.key_dim + self._shape.value_dim
            return np.fromfile(file, self._dtype).reshape(self._shape.kv_heads, -1, width)
