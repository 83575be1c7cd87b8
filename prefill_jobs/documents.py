"""PDF and Word documents to text, by pypdf and python-docx (the extra `documents`).

Both kinds come from anywhere, and can unpack to far more than they are. pypdf bounds that (75 MB a stream);
what a Word document unpacks to is looked at before it is opened.
"""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any

from offload_decode.common.errors import CorpusError

PDF, ZIP = b"%PDF-", b"PK\x03\x04"
MOST_PAGES = 50_000
LARGEST = 256 << 20
"""Characters of a text, and bytes that a Word document may unpack to."""

Reader = Callable[[bytes], str]


def _readable(kind: str, module: str, package: str) -> Callable[[Callable[[Any, bytes], str]], Reader]:
    """Gives a reader its library, and makes a reason of whatever that meets in a file: hostile ones bring out
    errors of every type.
    """

    def of(read: Callable[[Any, bytes], str]) -> Reader:
        @wraps(read)
        def reader(data: bytes) -> str:
            try:
                library = import_module(module)
            except ImportError as error:
                raise CorpusError(
                    f"it is {kind}, for which {package} is missing (pip install 'offload-decode[documents]')"
                ) from error
            try:
                return read(library, data)
            except (CorpusError, MemoryError):
                raise
            except Exception as error:
                raise CorpusError(f"it is {kind} that is damaged ({type(error).__name__})") from error

        return reader

    return of


@_readable("a PDF document", "pypdf", "pypdf")
def of_pdf(pypdf: Any, data: bytes) -> str:
    """The text of the pages, one after another. Raises `CorpusError` with a reason as `decoding.text_of`."""
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it tells of each flaw that it works around
    file = pypdf.PdfReader(io.BytesIO(data))
    if file.is_encrypted:
        try:
            opened = bool(file.decrypt(""))
        except pypdf.errors.DependencyError:
            opened = False
        if not opened:
            raise CorpusError("it is an encrypted PDF document")
    if len(file.pages) > MOST_PAGES:
        raise CorpusError(f"it is a PDF document of more than {MOST_PAGES:,} pages")
    text = _bounded(page.extract_text() for page in file.pages)
    if not text.strip():
        raise CorpusError("it is a PDF document that holds no text, as if it was scanned")
    return text


@_readable("a Word document", "docx", "python-docx")
def of_docx(docx: Any, data: bytes) -> str:
    """Paragraphs and tables in their order, the cells of a row apart by tabs. Raises as `of_pdf`."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(part.file_size for part in archive.infolist()) > LARGEST:
            raise CorpusError(f"it is a Word document that unpacks to more than {LARGEST >> 20} MiB")
    return _bounded(_blocks(docx.Document(io.BytesIO(data))))


def _blocks(container: Any) -> Iterator[str]:
    """The lines of a document or of a cell of a table."""
    for block in container.iter_inner_content():
        if not hasattr(block, "rows"):
            yield block.text
            continue
        for row in block.rows:
            cells = {id(cell._tc): cell for cell in row.cells}  # a wide cell is there several times
            yield "\t".join("\n".join(_blocks(cell)) for cell in cells.values())


def _bounded(pieces: Iterator[str]) -> str:
    """The pieces in lines of their own."""
    kept: list[str] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece) + 1
        if length > LARGEST:
            raise CorpusError(f"it holds more than {LARGEST >> 20} MiB of text")
    return "\n".join(kept)
