"""PDF, Word and HTML documents to text, by pypdf and python-docx (the extra `documents`) and BeautifulSoup.

Documents come from anywhere, and can unpack to far more than they are. pypdf bounds that (75 MB a stream);
the unpacked size of a Word document is checked before it is opened.

Why BeautifulSoup: inscriptis, measured beside it, loses the title, shows hidden text, pads tables with
blanks, and gives nothing of a page of 20,000 nested elements. trafilatura takes 93 MB, and drops what it
takes for boilerplate.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from offload_decode.common.errors import CorpusError

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

PDF, ZIP = b"%PDF-", b"PK\x03\x04"
HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
MAX_PAGES = 50_000
MAX_SIZE = 256 << 20
"""Characters of a text, and unpacked bytes of a Word document."""
MAX_HTML = 64 << 20
"""Characters of a page: parsed, it takes about 30 times its size in memory."""

_UNSEEN = frozenset({"script", "style", "template", "noscript"})
_PREFORMATTED = frozenset({"pre", "textarea"})
_CELLS = frozenset({"td", "th"})
_BLOCKS = frozenset(
    [
        "address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "div", "dl", "dt",
        "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header",
        "hr", "li", "main", "nav", "ol", "p", "pre", "section", "summary", "table", "title", "tr", "ul",
    ]
)  # fmt: skip


@contextmanager
def _library(kind: str, module: str, package: str) -> Iterator[Any]:
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


def read_pdf(data: bytes) -> str:
    """The text of the pages, one after another. Raises `CorpusError` with a reason, as `decoding.text_of`."""
    with _library("a PDF document", "pypdf", "pypdf") as pypdf:
        logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it reports each flaw that it works around
        file = pypdf.PdfReader(io.BytesIO(data))
        if file.is_encrypted:
            try:
                opened = bool(file.decrypt(""))
            except pypdf.errors.DependencyError:
                opened = False
            if not opened:
                raise CorpusError("it is an encrypted PDF document")
        if len(file.pages) > MAX_PAGES:
            raise CorpusError(f"it is a PDF document of more than {MAX_PAGES:,} pages")
        text = _joined(page.extract_text() for page in file.pages)
    if not text.strip():
        raise CorpusError("it is a PDF document that holds no text, as if it was scanned")
    return text


def read_docx(data: bytes) -> str:
    """Paragraphs and tables in order, the cells of a row separated by tabs. Raises as `read_pdf`."""
    with _library("a Word document", "docx", "python-docx") as docx:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(part.file_size for part in archive.infolist()) > MAX_SIZE:
                raise CorpusError(f"it is a Word document that unpacks to more than {MAX_SIZE >> 20} MiB")
        return _joined(_docx_lines(docx.Document(io.BytesIO(data))))


def _docx_lines(container: Any) -> Iterator[str]:
    """The lines of a document or of a cell of a table."""
    for block in container.iter_inner_content():
        if not hasattr(block, "rows"):
            yield block.text
            continue
        for row in block.rows:
            cells = {id(cell._tc): cell for cell in row.cells}  # a merged cell is listed several times
            yield "\t".join("\n".join(_docx_lines(cell)) for cell in cells.values())


def _joined(pieces: Iterator[str]) -> str:
    """The pieces, each on lines of its own. Raises `CorpusError` beyond `MAX_SIZE`."""
    kept: list[str] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece) + 1
        if length > MAX_SIZE:
            raise CorpusError(f"it holds more than {MAX_SIZE >> 20} MiB of text")
    return "\n".join(kept)


def visible_text(markup: str) -> str:
    """The text of a page as a browser shows it. Raises as `read_pdf`."""
    if len(markup) > MAX_HTML:
        raise CorpusError(f"it is HTML of more than {MAX_HTML >> 20} MiB")
    from bs4 import BeautifulSoup, ParserRejectedMarkup

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # guesses about markup that looks like a file name or like XML
        try:
            soup = BeautifulSoup(markup, "html.parser")
        except ParserRejectedMarkup as error:
            raise CorpusError("it is not HTML that can be parsed") from error
    lines = [line.rstrip() for line in "".join(_html_pieces(soup)).split("\n")]
    return "\n".join(line for before, line in pairwise(["", *lines]) if line or before)


def _html_pieces(soup: BeautifulSoup) -> Iterator[str]:
    """What is seen, in order: blocks begin and end lines; outside of `<pre>`, white space is one space.

    One pass without recursion or changes to the tree: large pages are too much for either.
    """
    from bs4.element import CData, NavigableString, Tag

    preformatted, new_line = 0, True
    stack: list[tuple[Tag | None, Iterator[Any]]] = [(None, iter(soup.contents))]
    while stack:
        parent, children = stack[-1]
        child = next(children, None)
        piece = ""
        if child is None:
            stack.pop()
            if parent is not None:
                preformatted -= parent.name in _PREFORMATTED
                piece = "\n" if parent.name in _BLOCKS else " " if parent.name in _CELLS else ""
        elif isinstance(child, Tag):
            if child.name not in _UNSEEN and not child.has_attr("hidden"):
                preformatted += child.name in _PREFORMATTED
                piece = "\n" if child.name in _BLOCKS or child.name == "br" else ""
                stack.append((child, iter(child.contents)))
        elif type(child) in (NavigableString, CData):  # comments and declarations are of other types
            piece = str(child) if preformatted else re.sub(r"\s+", " ", child)
            if new_line and not preformatted:
                piece = piece.lstrip()
        if piece:
            new_line = piece.endswith("\n")
            yield piece
