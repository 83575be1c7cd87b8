"""What a recurrent layer keeps while its store is being written: its states after the last commit."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np

from offload_decode.errors import StoreDamaged
from offload_decode.store.files import check_sizes, open_regular
from offload_decode.store.format import Array, numpy_dtype
from offload_decode.store.staging import Segment
from offload_decode.store.streams import as_bytes
from offload_decode.types import StateShape


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
