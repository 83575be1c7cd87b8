"""The bytes of one file of a corpus: of a plain file, and no more than a document may have."""

from __future__ import annotations

import os
from typing import BinaryIO

from offload_decode.common.errors import CorpusError
from offload_decode.common.files import NotPlain, open_plain

LARGEST = 256 << 20
"""Bytes of a document: some fifty million tokens, of which no store is made in one piece."""

_PIECE = 1 << 20


def read_plain(path: str, follow: bool = False) -> bytes:
    """The bytes of the plain file at `path`; of what it leads to, if it is a link, only with `follow`.

    Raises `CorpusError` with a reason, as `decoding.text_of`, and `OSError`. Never waits, as for a pipe.
    """
    try:
        descriptor = open_plain(path, follow)
    except NotPlain as error:
        raise CorpusError(str(error)) from error
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > LARGEST:
            raise _too_large()
        return read_bounded(file)


def read_bounded(file: BinaryIO) -> bytes:
    """All that a file holds; `CorpusError` with a reason where that is more than `LARGEST`."""
    pieces: list[bytes] = []
    left = LARGEST
    while piece := file.read(_PIECE):
        left -= len(piece)
        if left < 0:
            raise _too_large()
        pieces.append(piece)
    return b"".join(pieces)


def _too_large() -> CorpusError:
    return CorpusError(f"it has more than {LARGEST >> 20} MiB")
