"""What all formats share: the result, the bounds, and how a third-party reader is called."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from offload_decode.common.errors import CorpusError

MAX_SIZE = 256 << 20
"""Characters of a text, and unpacked bytes of an archive (a Word document)."""


class Reading(NamedTuple):
    """The text of a document, and `notes`: sentences without a full stop on what was guessed or left out."""

    text: str
    notes: tuple[str, ...] = ()


@contextmanager
def library(kind: str, module: str, package: str) -> Iterator[Any]:
    """A module that reads a `kind` of document. Whatever it raises becomes a `CorpusError`: hostile files
    bring out errors of every type.
    """
    try:
        library = import_module(module)
    except ImportError as error:
        raise CorpusError(
            f"it is {kind}, for which {package} is missing (pip install 'offload-decode[documents]')"
        ) from error
    try:
        yield library
    except (CorpusError, MemoryError):
        raise
    except Exception as error:
        raise CorpusError(f"it is {kind} that is damaged ({type(error).__name__})") from error


def joined(pieces: Iterable[str]) -> str:
    """The pieces, each on lines of its own. Raises `CorpusError` beyond `MAX_SIZE`."""
    kept: list[str] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece) + 1
        if length > MAX_SIZE:
            raise CorpusError(f"it holds more than {MAX_SIZE >> 20} MiB of text")
    return "\n".join(kept)
