"""What all formats share: the result, the bounds, and how a third-party reader is called."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

from offload_decode.common.errors import CorpusError

MAX_SIZE = 256 << 20
"""Characters of a text, and unpacked bytes of an archive (a Word document)."""


class Reading(NamedTuple):
    """The text of a document, and `notes`: sentences without a full stop on what was guessed or left out."""

    text: str
    notes: tuple[str, ...] = ()


@contextmanager
def damaged(kind: str) -> Iterator[None]:
    """Whatever is raised inside becomes a `CorpusError`: hostile files bring out errors of every type."""
    try:
        yield
    except (CorpusError, MemoryError):
        raise
    except Exception as error:
        raise CorpusError(f"it is {kind} that is damaged ({type(error).__name__})") from error


@contextmanager
def library(kind: str, module: str, package: str) -> Iterator[Any]:
    """A module that reads a `kind` of document. Whatever it raises becomes a `CorpusError`."""
    try:
        library = import_module(module)
    except ImportError as error:
        raise CorpusError(
            f"it is {kind}, for which {package} is missing (pip install 'offload-decode[documents]')"
        ) from error
    with damaged(kind):
        yield library


def left_out(counts: Mapping[str, int]) -> tuple[str, ...]:
    """The note on what was left out: names of single things, each with how many there were."""
    ends = {name: "es" if name.endswith("x") else "s" for name in counts}
    named = [f"{n:,} {name}" + ends[name] * (n > 1) for name, n in sorted(counts.items()) if n]
    return (f"left out: {', '.join(named)}",) if named else ()


class Lines:
    """Text that is laid out while it is written: what ends a line, and what stands in a cell."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._breaks = 0  # lines to end before the next text
        self._length = 0
        self._cell = -1  # the piece at which one began, or the one before ended

    def write(self, piece: str) -> None:
        """Raises `CorpusError` beyond `MAX_SIZE`."""
        if piece:
            self.pieces.append("\n" * self._breaks + piece)
            self._breaks = 0
            self._length += len(piece) + 1
            if self._length > MAX_SIZE:
                raise CorpusError(f"it holds more than {MAX_SIZE >> 20} MiB of text")

    def forget(self, begin: int) -> None:
        """Take back the pieces from `begin` on."""
        if begin < len(self.pieces):
            self._breaks = len(self.pieces[begin]) - len(self.pieces[begin].lstrip("\n"))
            del self.pieces[begin:]

    def end_line(self, blank: bool = False) -> None:
        """What follows begins a line, behind a `blank` one."""
        if self._breaks <= blank:
            self._breaks = 1 + blank

    def begin_cell(self) -> None:
        """What came before ends where the cell begins, even an empty one."""
        self.pieces.append("\n" * self._breaks)
        self._breaks, self._cell = 0, len(self.pieces)

    def end_cell(self) -> None:
        """The last line of a cell ends with a tab instead."""
        self._breaks = 0
        self.write("\t")
        self._cell = len(self.pieces)

    @property
    def in_cell(self) -> bool:
        """Whether nothing is written yet since a cell began or ended."""
        return self._cell == len(self.pieces)

    @property
    def between_words(self) -> bool:
        """Whether white space here would be one too many."""
        return bool(self._breaks) or not self.pieces or self.pieces[-1][-1:].strip() == ""

    @property
    def text(self) -> str:
        """Without blanks at the end of lines, and one blank line in place of several."""
        lines = [line.rstrip() for line in "".join(self.pieces).split("\n")]
        return "\n".join(line for before, line in pairwise(["", *lines]) if line or before)


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
