"""What local and recurrent layers keep while their store is being written: the newest KV, and the states.

Files are never changed once they are committed, so a killed process cannot have spoilt them.
"""

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
    """The files of one layer in a folder, whose names begin with `name`: one for each segment. New ones are
    added to `written`.
    """

    def __init__(self, folder: Path, name: str, written: set[Path]) -> None:
        self._folder, self._name, self._written = folder, name, written

    def _file(self, own: Segment) -> Path:
        return self._folder / f"{self._name}-{own.start}-{own.stop}"

    def _write(self, start: int, stop: int, data: bytes | memoryview) -> Segment:
        own = Segment(start, stop, zlib.crc32(data))
        self._file(own).unlink(missing_ok=True)  # a killed process may have begun it
        with open(self._file(own), "xb") as out:
            out.write(data)
        self._written.add(self._file(own))
        return own

    def _read(self, own: Segment) -> bytes:
        with os.fdopen(open_regular(self._file(own)), "rb") as opened:
            return opened.read()

    def _holds(self, own: Segment, size: int) -> bool:
        """Whether the file has this size and the checksum of its segment."""
        try:
            check_sizes([(str(self._file(own)), size)])
            return zlib.crc32(self._read(own)) == own.crc
        except StoreDamaged:
            return False


class StateLog(_Log):
    """The states of one recurrent layer after the tokens so far, and at the last chunk boundary."""

    def __init__(self, folder: Path, layer: int, shapes: Sequence[StateShape], written: set[Path]) -> None:
        super().__init__(folder, f"state-{layer:03d}", written)
        self.segment: Segment | None = None
        self.at_seam: Segment | None = None
        self._shapes = tuple(shapes)
        self._sizes = [prod(own.shape) * numpy_dtype(own.dtype).itemsize for own in shapes]  # bytes

    @property
    def rows(self) -> int:
        """Tokens that the states are after."""
        return self.segment.stop if self.segment else 0

    def files(self) -> list[Path]:
        """The files that are needed still."""
        return [self._file(own) for own in (self.segment, self.at_seam) if own]

    def restore(self, segment: Segment | None, at_seam: Segment | None) -> bool:
        """Continue after `segment`, if the files are what the checksums say."""
        self.segment, self.at_seam = segment, at_seam
        return all(self._holds(own, sum(self._sizes)) for own in (segment, at_seam) if own)

    def put(self, stop: int, states: Sequence[Array]) -> Segment:
        """Write the states after the first `stop` tokens, in the order and of the shapes of the layer."""
        for state, expected in zip(states, self._shapes, strict=True):
            assert (state.shape, state.dtype) == (expected.shape, numpy_dtype(expected.dtype)), (
                f"{self._name}: {state.shape} {state.dtype} for its {expected.name}"
            )
        self.segment = self._write(0, stop, b"".join(map(as_bytes, states)))
        return self.segment

    def states(self, at_seam: bool = False) -> tuple[Array, ...] | None:
        """The states, as copies; None before the first token, or before the last chunk boundary."""
        segment = self.at_seam if at_seam else self.segment
        if segment is None:
            return None
        parts = np.split(np.frombuffer(self._read(segment), np.uint8), list(accumulate(self._sizes))[:-1])
        return tuple(
            part.copy().view(numpy_dtype(own.dtype)).reshape(own.shape)
            for part, own in zip(parts, self._shapes, strict=True)
        )

    def _file(self, own: Segment) -> Path:
        return self._folder / f"{self._name}-{own.stop}"


class WindowLog(_Log):
    """The newest KV of one local layer: a file an append, needed until the window has moved past it."""

    def __init__(self, folder: Path, layer: int, manifest: Manifest, written: set[Path]) -> None:
        super().__init__(folder, f"{layer:03d}", written)
        self.segments: list[Segment] = []
        self._shape, self._dtype = manifest.shape.layers[layer], manifest.numpy_dtype
        self._window = manifest.kept_window(self._shape)
        self._width = self._shape.key_dim + self._shape.value_dim

    @property
    def rows(self) -> int:
        """Tokens appended so far."""
        return self.segments[-1].stop if self.segments else 0

    def files(self) -> list[Path]:
        """The files that are needed still."""
        return [self._file(own) for own in self.segments]

    def restore(self, segments: list[Segment]) -> bool:
        """Continue after `segments`, if they follow each other and their files are what the checksums say."""
        self.segments = segments
        token = self._shape.kv_heads * self._width * self._dtype.itemsize  # bytes
        return all(one.stop == other.start for one, other in pairwise(segments)) and all(
            own.start < own.stop and self._holds(own, (own.stop - own.start) * token) for own in segments
        )

    def append(self, keys: Array, values: Array, start: int | None = None) -> None:
        """Append keys `[heads, T, Dk]` and values `[heads, T, Dv]`; the first may begin at any token."""
        own, block = self._shape, np.concatenate([keys, values], axis=2)
        assert (len(keys), keys.shape[2], values.shape[2]) == (own.kv_heads, own.key_dim, own.value_dim), (
            f"layer {self._name}: {keys.shape} and {values.shape} for its window"
        )
        assert block.dtype == self._dtype, f"layer {self._name}: {block.dtype} for {self._dtype}"
        start = self.rows if start is None else start
        every = [*self.segments, self._write(start, start + keys.shape[1], as_bytes(block))]
        self.segments = [segment for segment in every if segment.stop > every[-1].stop - self._window]

    def window(self) -> tuple[Array, Array]:
        """Keys and values `[heads, min(window, rows), …]` of the last tokens, as copies."""
        heads = self._shape.kv_heads
        blocks = [np.frombuffer(self._read(own), self._dtype) for own in self.segments]
        every = [np.empty((heads, 0, self._width), self._dtype)]
        every += [block.reshape(heads, -1, self._width) for block in blocks]
        rows = np.concatenate(every, axis=1)[:, -self._window :]
        keys, values = np.split(rows, [self._shape.key_dim], axis=2)
        return keys.copy(), values.copy()
