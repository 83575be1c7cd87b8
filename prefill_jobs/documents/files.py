"""The bytes of a file, within bounds."""

import os
from typing import BinaryIO

from offload_decode.common.errors import CorpusError
from offload_decode.common.files import NotPlain, open_plain

LARGEST = 256 << 20
"""Bytes of a document: some fifty million tokens, more than a store is made of in one piece."""
_PIECE = 1 << 20


def read_plain(path: str, follow: bool = False) -> bytes:
    """The bytes of the regular file at `path`; a link is followed only with `follow`. Never blocks, as on a
    pipe.

    Raises `CorpusError` with a reason, as `text_of`, and `OSError`.
    """
    try:
        descriptor = open_plain(path, follow)
    except NotPlain as error:
        raise CorpusError(str(error)) from error
    with os.fdopen(descriptor, "rb") as file:
        return read_bounded(file, os.fstat(descriptor).st_size)


def read_bounded(file: BinaryIO, size: int = 0) -> bytes:
    """All of a file; `CorpusError` with a reason where that, or its stated `size`, is more than `LARGEST`."""
    pieces: list[bytes] = []
    left = LARGEST if size <= LARGEST else -1
    while left >= 0 and (piece := file.read(_PIECE)):
        left -= len(piece)
        pieces.append(piece)
    if left < 0:
        raise CorpusError(f"it has more than {LARGEST >> 20} MiB")
    return b"".join(pieces)
